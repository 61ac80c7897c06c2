"""A fleet of replicas behind a router, event by event.

Schedulers, pools, prefix caches and the router are those that serve; a step's time comes from a
model, and so nothing waits but on the clock of this loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from paged.pool import PagePool
from paged.prefix import extend_hashes
from paged.runtime.buckets import Buckets
from paged.runtime.routing import Policy, Router
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.simulation.autoscaling import Autoscaler, Autoscaling
from paged.runtime.simulation.replica import Replica
from paged.runtime.simulation.step_times import StepClock, StepTimes
from paged.runtime.simulation.traces import Tree, Turn, tokens_of

# The router looks at every so many tokens: more would only cost it time.
_ROUTED_TOKENS = 128
# What turns add begins with a token from here on, which prompts that are given have none of.
_FIRST_OWN = 2**24


@dataclass(frozen=True)
class EngineShape:
    """One replica.

    Attributes:
        scheduling: its limits; `start` adds the shapes of its steps.
        step_times: of its steps.
        num_pages: of its pool, the null page included.
        page_size: tokens of a page.
        enable_prefix_caching: whether pages are kept for later prompts.
        fewest_rows: to which its steps are padded.
    """

    scheduling: SchedulerConfig
    step_times: StepTimes
    num_pages: int
    page_size: int = 16
    enable_prefix_caching: bool = True
    fewest_rows: int = 1

    def start(self) -> Replica:
        """A replica that has seen nothing yet."""
        limits = self.scheduling
        buckets = Buckets.make(
            limits.max_num_seqs, limits.max_num_batched_tokens, fewest_rows=self.fewest_rows
        )
        pool = PagePool(self.num_pages, self.page_size, self.enable_prefix_caching)
        clock = StepClock(buckets, self.step_times, self.page_size)
        scheduling = replace(limits, step_sizes=buckets.mixed)
        return Replica(Scheduler(scheduling, pool), clock.seconds)


class Served(NamedTuple):
    """A request that was answered. Times are seconds of the simulation's clock.

    Attributes:
        arrival, first, last: when it came, and its first and last token did.
        num_prompt, num_cached, num_output: tokens; cached ones were found in the prefix cache.
    """

    arrival: float
    first: float
    last: float
    num_prompt: int
    num_cached: int
    num_output: int


@dataclass
class Outcome:
    """What became of a trace.

    Attributes:
        served: requests, in the order in which they ended.
        num_too_long: turns that were left out, with all that follow them: they and their answers
            would be longer than the model takes.
        replica_seconds: for which replicas were there, added up.
        busy_seconds: for which their devices ran.
        num_steps, num_preemptions: of all replicas.
        sizes: (seconds, replicas, open requests), whenever the autoscaler looked.
    """

    served: list[Served] = field(default_factory=list)
    num_too_long: int = 0
    replica_seconds: float = 0.0
    busy_seconds: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0
    sizes: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        """Seconds of the last token."""
        return self.served[-1].last if self.served else 0.0


@dataclass(slots=True)
class _Member:
    """A replica in the fleet.

    Attributes:
        started: when it was wanted.
        num_open: requests that were sent to it and have not ended.
        is_leaving: it gets no more requests, and goes when the last has ended.
    """

    name: str
    replica: Replica
    started: float
    num_open: int = 0
    is_leaving: bool = False


@dataclass(slots=True)
class _Open:
    """A request on its way.

    Attributes:
        tokens: of its prompt.
        first: when its first token came.
    """

    member: _Member
    turn: Turn
    tokens: list[int]
    first: float = 0.0


class Timeline:
    """Things to do, each at its time; at the same time in the order in which they were put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something then."""
        heappush(self._heap, (seconds, next(self._numbers), action))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._heap:
            self.now, _, action = heappop(self._heap)
            action()


class Fleet:
    """Replicas, a router, and what comes to them; good for one run.

    Args:
        num_replicas: to begin with.
        scaling: None for as many to the end.
        on_done: called for each request that was answered.
    """

    def __init__(
        self,
        shape: EngineShape,
        num_replicas: int,
        policy: Policy = "prefix",
        *,
        scaling: Autoscaling | None = None,
        seed: int = 0,
        on_done: Callable[[], object] = lambda: None,
    ) -> None:
        self.outcome = Outcome()
        self._shape = shape
        self._stride = max(_ROUTED_TOKENS // shape.page_size, 1)
        self._router = Router(policy, seed=seed)
        self._scaler = Autoscaler(scaling) if scaling else None
        self._on_done = on_done
        self._timeline = Timeline()
        self._members: dict[str, _Member] = {}  # those that start or take requests
        self._open: dict[Sequence, _Open] = {}
        self._names, self._ids, self._pieces = count(), count(), count(_FIRST_OWN)
        self._num_to_come = 0  # turns and trees
        self._until = float("inf")
        for _ in range(num_replicas):
            self._join(self._new_member())

    def run(self, trees: Iterable[Tree], until: float = float("inf")) -> Outcome:
        """Serve trees, given in the order of their beginnings, to the last answer.

        Args:
            until: seconds from which on nobody asks anything more.
        """
        self._until = until
        self._plant(iter(trees))
        if self._scaler is not None:
            self._timeline.at(0.0, self._look)
        self._timeline.run()
        for member in list(self._members.values()):
            self._gone(member, self.outcome.end)
        return self.outcome

    def _plant(self, trees: Iterator[Tree]) -> None:
        """Have the next tree begin at its time, and then the one after it."""
        tree = next(trees, None)
        if tree is None:
            return
        self._num_to_come += 1

        def begin() -> None:
            self._ask(tree.first, tree.prompt, [])
            self._plant(trees)

        self._timeline.at(tree.seconds, begin)

    def _ask(self, turn: Turn, before: list[int], hashes: list[bytes]) -> None:
        """A turn comes, to what was said before, whose full pages have these hashes."""
        self._num_to_come -= 1
        if self._timeline.now >= self._until:
            return
        tokens = before + tokens_of(next(self._pieces), turn.num_new)
        if len(tokens) + turn.num_output > self._shape.scheduling.max_model_len:
            self.outcome.num_too_long += 1
            return
        page_size, now = self._shape.page_size, self._timeline.now
        hashes = hashes.copy()
        extend_hashes(hashes, tokens[len(hashes) * page_size :], page_size)
        member = self._route(hashes)
        limits = SequenceLimits(turn.num_output)
        sequence = Sequence(next(self._ids), tokens, limits, arrival=now, page_hashes=hashes)
        self._open[sequence] = _Open(member, turn, tokens)
        member.replica.add(sequence)
        if member.replica.is_idle:
            self._launch(member)

    def _route(self, hashes: list[bytes]) -> _Member:
        """Where a prompt with these page hashes is sent."""
        routed = hashes[self._stride - 1 :: self._stride]
        name = self._router.choose(routed)
        self._router.sent(routed, name)
        member = self._members[name]
        member.num_open += 1
        return member

    def _launch(self, member: _Member) -> None:
        end = member.replica.launch(self._timeline.now)
        if end is not None:
            self._timeline.at(end, partial(self._read, member))

    def _read(self, member: _Member) -> None:
        """The replica's oldest step is done."""
        for event in member.replica.read():
            if len(event.sequence.outputs) == 1:
                self._open[event.sequence].first = self._timeline.now
            if event.finish_reason is not None:
                self._answered(event.sequence)
        self._launch(member)

    def _answered(self, sequence: Sequence) -> None:
        request, now = self._open.pop(sequence), self._timeline.now
        member, num_prompt = request.member, len(request.tokens)
        tokens = (num_prompt, sequence.num_cached, len(sequence.outputs))
        self.outcome.served.append(Served(sequence.arrival, request.first, now, *tokens))
        self._on_done()
        self._router.ended(member.name)
        member.num_open -= 1
        if member.is_leaving and not member.num_open:
            self._gone(member, now)
        self._num_to_come += len(request.turn.then)
        said = request.tokens + sequence.outputs if request.turn.then else []
        for turn in request.turn.then:
            ask = partial(self._ask, turn, said, sequence.page_hashes)
            self._timeline.at(now + turn.pause, ask)

    def _new_member(self) -> _Member:
        member = _Member(f"replica-{next(self._names)}", self._shape.start(), self._timeline.now)
        self._members[member.name] = member
        return member

    def _join(self, member: _Member) -> None:
        """The replica takes requests from now on, unless it is not wanted any more."""
        if not member.is_leaving:
            pages = self._shape.num_pages // self._stride
            self._router.add(member.name, max(pages, 1))

    def _look(self) -> None:
        """Have as many replicas as the autoscaler wants, and look again later."""
        assert self._scaler is not None
        timeline, rule = self._timeline, self._scaler.rule
        staying = [each for each in self._members.values() if not each.is_leaving]
        wanted = self._scaler.wanted(timeline.now, len(staying), len(self._open))
        self.outcome.sizes.append((timeline.now, len(self._members), len(self._open)))
        for _ in range(wanted - len(staying)):
            member = self._new_member()
            timeline.at(timeline.now + rule.start_seconds, partial(self._join, member))
        # Those that take no requests yet go first: never the last that does.
        staying.sort(key=lambda each: (each.name in self._router.replicas, each.num_open))
        for member in staying[: max(len(staying) - wanted, 0)]:
            self._leave(member)
        if self._open or self._num_to_come:
            timeline.at(timeline.now + rule.interval, self._look)

    def _leave(self, member: _Member) -> None:
        """Send the replica nothing any more."""
        member.is_leaving = True
        if member.name in self._router.replicas:
            self._router.remove(member.name)
        if not member.num_open:
            self._gone(member, self._timeline.now)

    def _gone(self, member: _Member, now: float) -> None:
        """The replica is no more."""
        del self._members[member.name]
        outcome, replica = self.outcome, member.replica
        outcome.replica_seconds += max(now - member.started, 0.0)
        outcome.busy_seconds += replica.busy
        outcome.num_steps += replica.num_steps
        outcome.num_preemptions += replica.scheduler.num_preemptions
