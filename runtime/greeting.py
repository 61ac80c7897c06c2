"""How two processes of ours begin to speak over a line: one greets, the other says who it is."""

from __future__ import annotations

import msgspec

MOST_AT_FIRST = 2**16
"""Bytes of a message from somebody whose key nobody has seen yet."""


_MOST_QUOTED = 500


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


def in_one_line(said: object) -> str:
    """What another process has said, fit for a line of a log: maybe it is nobody of ours."""
    words = " ".join(str(said).split())
    shown = "".join(each if each.isprintable() else "?" for each in words)
    return shown if len(shown) <= _MOST_QUOTED else f"{shown[:_MOST_QUOTED]}..."
