"""What decode and prefill engines say to each other, as msgpack over TCP.

The prefill engine greets whoever connects with Hello, is answered by Introduction, and says Welcome
or Refused. From then on the decode engine sends Prefill and Cancel. A Prefill is answered by any
number of Landed, before which the content has been handed over (as Piece after Piece, where the two
share no memory), and by Finished or Failed.
"""

from __future__ import annotations

import msgspec

from paged.runtime.greeting import Hello, Message, Refused, Welcome


class Introduction(Message, frozen=True):
    """Who wants prompts computed.

    Attributes:
        nonce: random bytes of its own.
        proof: that it knows the key, see `paged.runtime.transfer.handshake`.
        facts: by name, what must be the same in both engines.
    """

    nonce: bytes
    proof: bytes
    facts: dict[str, str]


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


class Prefill(Message, frozen=True):
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


class Cancel(Message, frozen=True):
    """A prompt is not wanted any more. Answered by Failed, unless it has ended already."""

    number: int


class Piece(Message, frozen=True):
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


class Landed(Message, frozen=True):
    """Some of the wanted pages are there, with all layers."""

    number: int
    first: int
    count: int


class Finished(Message, frozen=True):
    """All wanted pages are there."""

    number: int


class Failed(Message, frozen=True):
    """No more will come, for this reason."""

    number: int
    reason: str


ToPrefill = Introduction | Prefill | Cancel
ToDecode = Hello | Welcome | Refused | Piece | Landed | Finished | Failed
