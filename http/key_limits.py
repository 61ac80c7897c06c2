"""What each key has in use, and a middleware that refuses what is beyond.

Several API processes count together: the first counts, and the others ask it at its socket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged.http.api.errors import ApiError, error_response, retry_after
from paged.http.auth import are_among, digests_of, refused
from paged.http.keys import KeyEntry, KeyRing
from paged.http.meter import METER, Account, Meter
from paged.http.paths import is_for_admins, is_open, path_of
from paged.http.peers import Answers, Peers

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}"
    for of in ("requests", "tokens")
    for what in ("limit", "remaining", "reset")
)
_MINUTE = 60.0


class Verdict(msgspec.Struct, frozen=True):
    """Whether a request of a key may run.

    Attributes:
        refusal: why not; None if it may.
        retry_after: seconds until it may, if it may not.
        headers: that tell clients where they stand.
    """

    refusal: str | None
    retry_after: float
    headers: dict[str, str]


@dataclass
class _Use:
    """What the keys of a name have in use.

    Attributes:
        num_running: requests.
        spent: tokens that a minute's allowance has yet to make up for, as of `at`.
    """

    at: float
    num_running: int = 0
    spent: float = 0.0

    def spent_now(self, per_minute: int) -> float:
        """What is left of it after the time that has passed."""
        now = time.monotonic()
        self.spent = max(self.spent - (now - self.at) * per_minute / _MINUTE, 0.0)
        self.at = now
        return self.spent


class Counts(Account, Protocol):
    """Who counts what keys have in use."""

    async def take(self, entry: KeyEntry) -> Verdict:
        """A request of a key begins, unless the verdict refuses it."""

    def give(self, name: str) -> None:
        """A request that was taken has ended."""


class LocalCounts:
    """The counts of all keys, in this process."""

    interval = 0.0

    def __init__(self) -> None:
        self._uses: dict[str, _Use] = {}

    async def take(self, entry: KeyEntry) -> Verdict:
        return self.taken(entry.name, entry.max_concurrent, entry.tokens_per_minute)

    def taken(self, name: str, most_running: int | None, per_minute: int | None) -> Verdict:
        """As `take`, by the numbers of the entry that matter."""
        use = self._use(name)
        spent = use.spent_now(per_minute) if per_minute else 0.0
        refusal, wait = None, 0.0
        if most_running is not None and use.num_running >= most_running:
            refusal, wait = f"{use.num_running} requests of this key run: as many as may", 1.0
        elif per_minute is not None and spent >= per_minute:
            refusal = f"The {per_minute} tokens a minute of this key are used up"
            wait = (spent - per_minute + 1) * _MINUTE / per_minute
        else:
            use.num_running += 1
        headers: dict[str, str] = {}
        if most_running is not None:
            left = max(most_running - use.num_running, 0)
            headers |= _headers("requests", most_running, left, 0.0 if left else 1.0)
        if per_minute is not None:
            left = max(int(per_minute - spent), 0)
            headers |= _headers("tokens", per_minute, left, spent * _MINUTE / per_minute)
        return Verdict(refusal, wait, headers)

    def give(self, name: str) -> None:
        self._use(name).num_running -= 1

    def spend(self, name: str, num_tokens: int) -> None:
        self._use(name).spent += num_tokens

    def _use(self, name: str) -> _Use:
        return self._uses.setdefault(name, _Use(time.monotonic()))


class CountsOfFirst:
    """The counts of the first API process, asked from another."""

    interval = 1.0

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._tasks: set[asyncio.Task[None]] = set()

    async def take(self, entry: KeyEntry) -> Verdict:
        numbers = entry.max_concurrent, entry.tokens_per_minute
        return await self._peers.ask_first("take", Verdict, entry.name, *numbers)

    def give(self, name: str) -> None:
        self._tell(self._peers.ask_first("give", type(None), name))

    def spend(self, name: str, num_tokens: int) -> None:
        self._tell(self._peers.ask_first("spend", type(None), name, num_tokens))

    def _tell(self, news: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(news)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _headers(of: str, limit: int, left: int, seconds: float) -> dict[str, str]:
    names = [name for name in RATE_HEADERS if name.endswith(of)]
    return dict(zip(names, (str(limit), str(left), _duration(seconds)), strict=True))


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{round(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds, 1), 60)
    return f"{minutes:.0f}m{rest:.0f}s" if minutes else f"{rest:g}s"


class LimitKeys:
    """Middleware that lets a request through if its key is in the file, and within its limits.

    Args:
        ring: the keys of the file.
        counts: who counts what they use.
        keys: others, which have no limits.
        admin_keys: others for what is for admins alone.
        closed: paths that need a key although they are open elsewhere.
    """

    def __init__(
        self,
        app: ASGIApp,
        ring: KeyRing,
        counts: Counts,
        keys: Iterable[str] = (),
        admin_keys: Iterable[str] = (),
        closed: Collection[str] = (),
    ) -> None:
        self.app = app
        self.ring, self.counts, self.closed = ring, counts, closed
        self.others = [sha256(key.encode()).digest() for key in keys]
        self.admins = [sha256(key.encode()).digest() for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_open(path := path_of(scope), self.closed):
            await self.app(scope, receive, send)
            return
        digests = digests_of(scope)
        if is_for_admins(path) and are_among(digests, self.admins):
            await self.app(scope, receive, send)
            return
        entry, is_other = self.ring.find(digests), are_among(digests, self.others)
        if entry is None and not is_other:
            await refused(path)(scope, receive, send)
        elif is_for_admins(path) and not (entry and entry.admin):
            error = ApiError(403, "This is for keys of admins", "PermissionDeniedError")
            await error_response(error, path)(scope, receive, send)
        elif entry is None:
            await self.app(scope, receive, send)
        else:
            await self._count(entry, scope, receive, send)

    async def _count(self, entry: KeyEntry, scope: Scope, receive: Receive, send: Send) -> None:
        verdict = await self.counts.take(entry)
        headers = [(name.encode(), value.encode()) for name, value in verdict.headers.items()]

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        if verdict.refusal is not None:
            error = ApiError(429, verdict.refusal, "RateLimitError")
            reply = error_response(error, path_of(scope), retry_after(verdict.retry_after))
            await reply(scope, receive, send_with_limits)
            return
        meter = Meter(self.counts, entry.name)
        token = METER.set(meter)
        try:
            await self.app(scope, receive, send_with_limits)
        finally:
            METER.reset(token)
            meter.report()
            self.counts.give(entry.name)


def answers_of(counts: LocalCounts) -> Answers:
    """What the first API process tells the others."""
    return {"take": counts.taken, "give": counts.give, "spend": counts.spend}
