"""How two processes of ours begin to speak over a line: one greets, the other says who it is."""

from __future__ import annotations

import msgspec

MOST_AT_FIRST = 2**16
"""Bytes of a message from somebody whose key nobody has seen yet."""


class NotAdmitted(Exception):
    """The other side is nobody whom this process works with."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A tag and the fields' values, without their names."""


class Hello(Message, frozen=True):
    """Random bytes, which whoever knows the key is to sign."""

    nonce: bytes


class Welcome(Message, frozen=True):
    """The other side is let in; `proof` is that who says so knows the key."""

    proof: bytes


class Refused(Message, frozen=True):
    """It is not, for this reason."""

    reason: str
