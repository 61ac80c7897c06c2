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

# Of a message from somebody whose key nobody has seen yet.
MOST_AT_FIRST = 2**16


class _Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tag and the fields' values, without their names."""


class Hello(_Message, frozen=True):
    """Random bytes, which whoever knows the key is to sign."""

    nonce: bytes


class Join(_Message, frozen=True):
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


class Welcome(_Message, frozen=True):
    """It is part of the engine; `proof` is that rank 0 knows the key."""

    proof: bytes


class Refused(_Message, frozen=True):
    """It is not, for this reason."""

    reason: str


class Begin(_Message, frozen=True):
    """All are there: the address at which `jax.distributed` finds rank 0."""

    coordinator: str


class Following(_Message, frozen=True):
    """The model is loaded and compiled."""


class Failing(_Message, frozen=True):
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


class Call(_Message, frozen=True):
    """Call a program, by its number among all, with these arrays of the host."""

    program: int
    inputs: list[Packed]


class End(_Message, frozen=True):
    """The engine is closed."""


ToLeader = Join | Following | Failing
ToFollower = Hello | Welcome | Refused | Begin | Call | End
