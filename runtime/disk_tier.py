"""What of a prompt is on the disk alone, and worth reading before its request is queued.

Other requests go on meanwhile. What was read becomes host pages, where the scheduler finds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from paged.groups import Windows
from paged.hits import find_prefix, find_tables
from paged.pool import PagePool, of_group
from paged.prefix import extend_hashes
from paged.runtime.disk_pages import DiskPages, Fetched
from paged.runtime.load_costs import LoadCosts


class DiskTier:
    """Looks prompts up in all three tiers."""

    def __init__(
        self, files: DiskPages, pool: PagePool, windows: Windows, load_costs: LoadCosts
    ) -> None:
        self.files = files
        self._pool = pool
        self._windows = windows
        self._load_costs = load_costs
        self._on_disk = pool.num_pages + pool.host.num_pages  # a number that no page has

    def fetch(self, prompt: list[int], salt: str) -> Fetched | None:
        """Begin to read what the other tiers lack of a prompt; None if that is not worth it."""
        page_size, hashes = self._pool.page_size, list[bytes]()
        extend_hashes(hashes, prompt[:-1], page_size, salt)
        near = find_prefix(self._pool, hashes, self._windows, on_host=True)
        tables = find_tables(self._find, self._match, page_size, hashes, self._windows)
        wanted = [
            of_group(hashes[entry], group)
            for group, table in enumerate(tables)
            for entry, page in enumerate(table)
            if page == self._on_disk
        ]
        num_gained = (len(tables[0]) - len(near[0])) * page_size
        per_page = self._load_costs.per_page + self.files.seconds_per_page
        costs = replace(self._load_costs, per_page=per_page)
        if len(wanted) > self._pool.host.num_pages or not costs.are_worth(len(wanted), num_gained):
            return None
        return self.files.fetch(wanted)

    def _find(self, content: bytes, group: int) -> int | None:
        page = self._pool.find(content, group, on_host=True)
        if page is None and of_group(content, group) in self.files:
            return self._on_disk
        return page

    def _match(self, hashes: Sequence[bytes], group: int) -> list[int]:
        pages = []
        for content in hashes:
            page = self._find(content, group)
            if page is None:
                break
            pages.append(page)
        return pages


def fingerprint(params: object, what: object) -> str:
    """A name for what a model writes to its pages.

    Args:
        params: every weight counts.
        what: all else that matters; its `repr` must tell it from every other.
    """
    leaves = jax.tree.leaves(params)
    sums = [np.asarray(_checksum(leaf)).tobytes() for leaf in leaves]
    described = repr((what, [(leaf.shape, leaf.dtype) for leaf in leaves]))
    return blake2b(b"".join(sums) + described.encode(), digest_size=16).hexdigest()


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Two sums of an array's bits, each weighted by its place."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * leaf.dtype.itemsize}"))
    bits = leaf.astype(jnp.uint32).ravel()
    places = lax.iota(jnp.uint32, bits.size)
    factors = (2 * places + 1, (places ^ (places >> 15)) * jnp.uint32(0x9E3779B1) | 1)
    return jnp.stack([jnp.sum(bits * factor) for factor in factors])
