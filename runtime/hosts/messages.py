"""What processes of one engine say to each other, as msgpack over TCP.

Rank 0 greets whoever connects with Hello, is answered by Join, and says Welcome or Refused. When
all are there it says Begin to each, which answers Following when it is ready, or Failing. From then
on rank 0 alone speaks: Call after Call, and End.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from paged.runtime.greeting import Hello, Message, Refused, Welcome


class Join(Message, frozen=True):
    """Who wants to be part of the engine.

    Attributes:
        nonce: random bytes of its own.
        proof: that it knows the key, see `paged.runtime.hosts.handshake`.
        facts: by name, what must be the same in all processes.
    """

    rank: int
    nonce: bytes
    proof: bytes
    facts: dict[str, str]


class Begin(Message, frozen=True):
    """All are there: the address at which `jax.distributed` finds rank 0."""

    coordinator: str


class Following(Message, frozen=True):
    """The model is loaded and compiled."""


class Failing(Message, frozen=True):
    """It cannot be, for this reason."""

    reason: str


class Packed(msgspec.Struct, frozen=True, array_like=True):
    """An array: its dtype as numpy writes it, and its bytes."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, array: NDArray[Any] | np.generic) -> Packed:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> NDArray[Any]:
        return np.frombuffer(self.content, self.dtype).reshape(self.shape)


class Call(Message, frozen=True):
    """Call a program, by its number among all, with these arrays of the host."""

    program: int
    inputs: list[Packed]


class End(Message, frozen=True):
    """The engine is closed."""


ToLeader = Join | Following | Failing
ToFollower = Hello | Welcome | Refused | Begin | Call | End
