"""What a request takes, told to whoever counts it for its key."""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


class Account(Protocol):
    """What a request's tokens are put down to.

    Attributes:
        interval: seconds between two reports of a request's tokens.
    """

    @property
    def interval(self) -> float: ...

    def spend(self, name: str, num_tokens: int) -> None:
        """Tokens were read or made for the keys of a name."""


@dataclass
class Meter:
    """Counts the tokens of one request for its key."""

    account: Account
    name: str
    _pending: int = 0
    _reported: float = field(default_factory=time.monotonic)

    def add(self, num_tokens: int) -> None:
        """So many more were read or made."""
        self._pending += num_tokens
        if time.monotonic() - self._reported >= self.account.interval:
            self.report()

    def report(self) -> None:
        """Tell whoever counts."""
        if self._pending:
            self.account.spend(self.name, self._pending)
        self._pending, self._reported = 0, time.monotonic()


METER: ContextVar[Meter | None] = ContextVar("METER", default=None)
"""That of the request that is being answered, if its key is counted."""


def count_tokens(num_tokens: int) -> None:
    """Tokens were read or made for the request that is being answered."""
    if (meter := METER.get()) is not None:
        meter.add(num_tokens)
