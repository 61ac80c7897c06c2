"""Which of several replicas of an engine gets a request.

A replica has the pages of what it computed, so a request is best sent where the longest part of its
prompt was sent before, unless too much runs there already. The router knows what it was told, no
more: which prefixes it sent where, and how many requests are open at each replica. Host code alone:
the same class routes real requests and simulated ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

Policy = Literal["prefix", "least_loaded", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)

_RememberedPages = OrderedDict[bytes, None]  # least recently sent first


@dataclass(frozen=True)
class Overload:
    """When a replica is too busy to be sent what it has the prefix of.

    It is with more open requests than `share` times the mean of all, and `spare` more than that: a
    prefix that everybody wants so spreads over as many replicas as it keeps busy.
    """

    share: float = 1.25
    spare: float = 4.0

    def __post_init__(self) -> None:
        if self.share < 1 or self.spare < 0:
            raise ValueError(
                f"overload needs a share of at least 1 and a spare of at least 0, got {self}: with "
                f"less, every replica of an even fleet is overloaded"
            )

    def bound(self, mean: float) -> float:
        """Open requests that a replica may have, by the mean of all."""
        return self.share * mean + self.spare


class Router:
    """Chooses replicas for requests; one thread uses it.

    A request is told by the hashes of the full pages of its prompt (`paged.prefix.extend_hashes`),
    a chain, each over all before it. They need not be those of the replicas' own pages: every
    eighth of them names prefixes as well and costs the router less, and the bytes of a text do
    where tokens are not known.

        router.add("a", num_pages=10_000)
        replica = router.choose(hashes)
        router.sent(hashes, replica)
        ...
        router.ended(replica)

    `choose` changes nothing that later choices depend on (but the seed's sequence), so that who is
    turned down by a replica may ask again, with the others in `among`. Where several routers send
    to the same replicas, none sees all of their requests: `report` what the replicas say.

    Args:
        policy: "prefix" as said above; "least_loaded", the replica with the fewest open requests,
            among equals the one that was longest sent nothing; or "random".
        seed: of "random".
    """

    def __init__(
        self, policy: Policy = "prefix", overload: Overload | None = None, *, seed: int = 0
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
        self.policy = policy
        self.overload = overload or Overload()
        self._random = Random(seed)
        self._ranks: dict[str, tuple[int, int]] = {}  # open requests, when it was last sent one
        self._num_open = 0
        self._num_sent = 0
        self._capacity: dict[str, int] = {}
        self._pages: dict[str, _RememberedPages] = {}
        self._holders: dict[bytes, set[str]] = {}  # the same by page

    @property
    def replicas(self) -> Collection[str]:
        """Those that may be sent requests."""
        return self._ranks.keys()

    def num_open(self, replica: str) -> int:
        """Requests running and waiting there, as far as is known."""
        return self._ranks[replica][0]

    def add(self, replica: str, num_pages: int) -> None:
        """There is a new replica, and nothing in its pages.

        Args:
            num_pages: how many of its pages, of the size that hashes are made for, to remember:
                the least recently sent are taken for evicted. The size of its pool is right.
        """
        if replica in self._ranks:
            raise ValueError(f"replica {replica!r} is there already: remove it first")
        if num_pages < 1:
            raise ValueError(f"a replica has at least 1 page, got {num_pages}")
        self._ranks[replica] = (0, 0)
        self._capacity[replica] = num_pages
        self._pages[replica] = OrderedDict()

    def remove(self, replica: str) -> None:
        """It takes no more requests: it drains, or is gone. Its open ones may still end."""
        self._num_open -= self._ranks.pop(replica)[0]
        del self._capacity[replica]
        for page in self._pages.pop(replica):
            self._drop_holder(page, replica)

    def report(self, replica: str, num_open: int) -> None:
        """The replica itself says how many requests run and wait there."""
        before, sent_at = self._ranks[replica]
        self._ranks[replica] = (num_open, sent_at)
        self._num_open += num_open - before

    def choose(self, hashes: Sequence[bytes], among: Collection[str] | None = None) -> str:
        """The replica for a request.

        Args:
            hashes: of the full pages of its prompt, from the first.
            among: the replicas that are asked for; by default all. Others than those that were
                added do not count.

        Raises:
            ValueError: there is none.
        """
        known = self._ranks.keys()
        candidates: Set[str] = known if among is None else known & among
        if not candidates:
            raise ValueError("no replica may be sent requests: add one, or ask among others")
        if self.policy == "random":
            return self._random.choice(sorted(candidates))
        holders = self._best_holders(hashes, candidates) if self.policy == "prefix" else None
        return min(holders or candidates, key=self._ranks.__getitem__)

    def sent(self, hashes: Sequence[bytes], replica: str) -> None:
        """A request went to the replica: it is open there, and its pages are to be found there."""
        self._num_sent += 1
        self._num_open += 1
        self._ranks[replica] = (self._ranks[replica][0] + 1, self._num_sent)
        pages, capacity = self._pages[replica], self._capacity[replica]
        # The last first: so a page is never forgotten before those that follow it.
        for page in reversed(hashes[:capacity]):
            if page in pages:
                pages.move_to_end(page)
            else:
                pages[page] = None
                self._holders.setdefault(page, set()).add(replica)
        while len(pages) > capacity:
            self._drop_holder(pages.popitem(last=False)[0], replica)

    def ended(self, replica: str) -> None:
        """A request that went to the replica is open no more. One that was removed may be named."""
        if replica in self._ranks:
            num_open, sent_at = self._ranks[replica]
            if num_open:  # none may be left by a report that came between
                self._ranks[replica] = (num_open - 1, sent_at)
                self._num_open -= 1

    def _best_holders(self, hashes: Sequence[bytes], candidates: Set[str]) -> list[str]:
        """Those candidates that have the longest part of a chain, of all not overloaded."""
        bound = self.overload.bound(self._num_open / len(self._ranks))
        for holders in self._holders_of(hashes):
            free = [each for each in holders if self._ranks[each][0] < bound]
            if best := [each for each in free if each in candidates]:
                return best
        return []

    def _holders_of(self, hashes: Sequence[bytes]) -> Iterator[set[str]]:
        """Who has the longest part of a chain, then those that have less, and so on."""
        # Whoever has a page has those before it, so that those which anybody has come first.
        known = bisect_left(hashes, True, key=lambda page: page not in self._holders)
        named: set[str] = set()
        for page in reversed(hashes[:known]):
            if new := self._holders[page] - named:
                yield new
                named |= new

    def _drop_holder(self, page: bytes, replica: str) -> None:
        holders = self._holders[page]
        holders.discard(replica)
        if not holders:
            del self._holders[page]
