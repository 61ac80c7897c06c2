"""Hashes that name the content of a page: its tokens and every token before them.

Equal hashes mean equal keys and values, so a page may be shared by all sequences that begin with
the same tokens. The hashes form a chain, each over its parent's, from a root that holds the cache
salt: sequences of different salts have no hash in common. The hash is BLAKE2b with 256 bits, for
which nobody can find two inputs of one value, so that no prompt can be crafted to read the pages
of another.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_HASH_BYTES = 32


def root_hash(salt: str = "") -> bytes:
    """The parent of a sequence's first page.

    Args:
        salt: whatever else the keys and values depend on, or must not be shared across.
    """
    # Roots and pages are personalised apart: no salt equals the input of some page's hash.
    return blake2b(salt.encode(), digest_size=_HASH_BYTES, person=b"paged root").digest()


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a page, full or not.

    Args:
        parent: hash of the page before it, or the root.
        tokens: the ids in the page, each within 32 bits.
    """
    # All parents, and all tokens, have one size, so no two inputs run together.
    content = parent + array("i", tokens).tobytes()
    return blake2b(content, digest_size=_HASH_BYTES, person=b"paged page").digest()


def extend_hashes(
    hashes: list[bytes], tokens: Sequence[int], page_size: int, salt: str = ""
) -> None:
    """Append to a sequence's page hashes those of the full pages among its next tokens.

    Args:
        hashes: of its pages so far, from the first; extended in place.
        tokens: ids from position `len(hashes) * page_size` on; a last partial page is ignored.
    """
    parent = hashes[-1] if hashes else root_hash(salt)
    for start in range(0, len(tokens) - page_size + 1, page_size):
        parent = page_hash(parent, tokens[start : start + page_size])
        hashes.append(parent)
