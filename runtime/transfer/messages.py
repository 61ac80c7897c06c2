"""What decode and prefill engines say to each other, as msgpack over TCP.

The prefill engine greets whoever connects with Hello, is answered by Introduction, and says Welcome
or Refused. From then on the decode engine sends Prefill and Cancel. A Prefill is answered by any
number of Landed, before which the content has been handed over (as Piece after Piece, where the two
share no memory), and by Finished or Failed.
"""

from __future__ import annotations

import msgspec

MOST_AT_FIRST = 2**16
"""Bytes of a message from somebody whose key nobody has seen yet."""


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tag and the fields' values, without their names."""


class Hello(_Message, frozen=True):
    """Random bytes, which whoever knows the key is to sign."""

    nonce: bytes


class Introduction(_Message, frozen=True):
    """Who wants prompts computed.

    Attributes:
        nonce: random bytes of its own.
        proof: that it knows the key, see `paged.runtime.transfer.handshake`.
        facts: by name, what must be the same in both engines.
    """

    nonce: bytes
    proof: bytes
    facts: dict[str, str]


class Welcome(_Message, frozen=True):
    """It may ask; `proof` is that the prefill engine knows the key."""

    proof: bytes


class Refused(_Message, frozen=True):
    """It may not, for this reason."""

    reason: str


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """Memory of the decode engine that a process of the same machine can open.

    Attributes:
        path: of the open file that it is.
        machine: the machine's name for this run of its system.
        token: random bytes at the end of it: a path may lead elsewhere in another container.
    """

    path: str
    machine: str
    token: bytes


class Prefill(_Message, frozen=True):
    """Compute a prompt, and hand over its full pages.

    Attributes:
        number: unique on the connection.
        token_ids: those of the full pages, and one more.
        salt: that of the request, which keeps prefix cache entries apart.
        priority: that of the request.
        first: for each group of layers, the first page that is wanted, of those of the prompt.
        shared: where they go, if the prefill engine can open it.
    """

    number: int
    token_ids: list[int]
    salt: str
    priority: int
    first: list[int]
    shared: Shared | None


class Cancel(_Message, frozen=True):
    """A prompt is not wanted any more."""

    number: int


class Piece(_Message, frozen=True):
    """One layer of some of the wanted pages, which follows the message.

    Attributes:
        number: of the Prefill.
        part: 0 for values, 1 for their scales.
        layer: within the pages of a group.
        first, count: which pages, as they are counted through all groups.
    """

    number: int
    part: int
    layer: int
    first: int
    count: int


class Landed(_Message, frozen=True):
    """Some of the wanted pages are there, with all layers."""

    number: int
    first: int
    count: int


class Finished(_Message, frozen=True):
    """All wanted pages are there."""

    number: int


class Failed(_Message, frozen=True):
    """No more will come, for this reason."""

    number: int
    reason: str


ToPrefill = Introduction | Prefill | Cancel
ToDecode = Hello | Welcome | Refused | Piece | Landed | Finished | Failed
