"""Scheduler and pool against a device of the mind, under random traffic.

The device keeps, for each token place of each page, a fingerprint of all tokens up to there, and
the group of layers that wrote it; so does the host for pages that moved there. It knows page tables
from page updates alone, and before it samples for a row it checks that what each group sees of the
row's context stands in the pages that the group's table names. The token it samples follows from
the sequence's own history. So whatever the chunks, windows, preemptions, hits, moves, forks and
steps in flight, each sequence must come out exactly as if it had run alone.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paged.groups import Windows, most_entries, most_pages
from paged.pool import NULL_PAGE, PagePool
from paged.runtime.lanes import Lanes
from paged.runtime.load_costs import FREE, LoadCosts
from paged.runtime.plan import Row, StepPlan, TokenEvent
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import FinishReason, Sequence, SequenceLimits
from tests.runtime.test_scheduler import preempt_all

VOCABULARY = 3  # few tokens, so that prompts often begin alike
STOP, EOS = 1, 2


@dataclass
class Story:
    """What a sequence says when nothing disturbs it: its tokens, without end.

    Attributes:
        tokens: as far as anybody asked.
        fingerprints: of the salt and the tokens up to each position.
    """

    sequence: Sequence
    tokens: list[int] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.sequence.prompt)

    def fingerprint(self, position: int) -> int:
        while len(self.fingerprints) <= position:
            before = self.fingerprints[-1] if self.fingerprints else len(self.sequence.cache_salt)
            token = self.token(len(self.fingerprints))
            self.fingerprints.append(hash((before, token)))
        return self.fingerprints[position]

    def token(self, position: int) -> int:
        while len(self.tokens) <= position:
            history = self.fingerprint(len(self.tokens) - 1)
            self.tokens.append(hash((history, self.sequence.sequence_id)) % VOCABULARY)
        return self.tokens[position]

    def ending(self) -> tuple[list[int], FinishReason, int | None]:
        """Outputs, finish reason and stop reason."""
        limits = self.sequence.limits
        outputs: list[int] = []
        while len(outputs) < limits.max_tokens:
            token = self.token(len(self.sequence.prompt) + len(outputs))
            outputs.append(token)
            if token in limits.stop_token_ids and len(outputs) >= limits.min_tokens:
                return outputs, FinishReason.STOP, None if token == EOS else token
        return outputs, FinishReason.LENGTH, None


Content = tuple[int, int]
"""What a place of a page holds: the group of layers that wrote it, and a fingerprint."""


class Device:
    """Runs plans in order, and checks what they rely on.

    What it samples is there for the step that comes as many steps later as it has stages.
    """

    def __init__(self, config: SchedulerConfig, page_size: int) -> None:
        self.config, self.page_size = config, page_size
        self.tables: dict[tuple[int, int], int] = {}  # by table and index
        self.places: dict[tuple[int, int], Content] = {}  # by page and offset
        self.host: dict[tuple[int, int], Content] = {}  # by host page and offset
        self.newest: dict[int, int] = {}  # sampled token, by slot
        self.late: deque[dict[int, int]] = deque()  # those of steps in later stages

    def run(self, plan: StepPlan, stories: dict[Sequence, Story]) -> list[int]:
        for page, host_page, to_host, _ in plan.moves:
            for offset in range(self.page_size):
                if to_host:
                    self.host[host_page, offset] = self.places[page, offset]
                else:
                    self.places[page, offset] = self.host[host_page, offset]
        for slot, index, page in plan.page_updates:
            self.tables[slot, index] = page
        for source, target in plan.copies:
            for offset in range(self.page_size):
                self.places[target, offset] = self.places.get((source, offset), (-1, 0))
        for sequence in plan.admitted:
            assert sequence.slot is not None
            self.newest.pop(sequence.slot, None)
        written = [place for row in plan.rows for place in self._write(row, stories[row.sequence])]
        assert len(set(written)) == len(written), "a place is written twice"
        tokens = [self._attend(row, stories[row.sequence]) for row in plan.rows]
        pairs = zip(plan.rows, tokens, strict=True)
        self.late.append({row.slot: token for row, token in pairs if row.samples})
        self.take(self.config.num_stages - 1)
        return tokens

    def take(self, num_left: int = 0) -> None:
        """Have the newest tokens of all but so many steps come to the first stage."""
        while len(self.late) > num_left:
            self.newest |= self.late.popleft()

    def place(self, group: int, slot: int, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.page_size)
        page = self.tables[group * self.config.max_num_seqs + slot, index]
        assert page != NULL_PAGE
        return page, offset

    def _write(self, row: Row, story: Story) -> list[tuple[int, int]]:
        """Store the row's tokens in each group's pages; return the places."""
        positions = range(row.start, row.start + row.length)
        for position in positions:
            is_known = position < row.sequence.num_tokens
            [token] = (
                row.sequence.tokens(position, position + 1) if is_known else [self.newest[row.slot]]
            )
            assert token == story.token(position)
        written = []
        for group in range(len(self.config.windows)):
            for position in positions:
                written.append(self.place(group, row.slot, position))
                self.places[written[-1]] = group, story.fingerprint(position)
        return written

    def _attend(self, row: Row, story: Story) -> int:
        """Check the row's context; return the token after it, or nonsense if none is wanted."""
        end = row.start + row.length
        story.fingerprint(end)
        for group, window in enumerate(self.config.windows):
            first = 0 if window is None else max(row.start - window + 1, 0)
            seen = range(first, end)
            found = [self.places[self.place(group, row.slot, position)] for position in seen]
            expected = [(group, story.fingerprints[position]) for position in seen]
            assert found == expected, f"{row} does not find its own tokens in group {group}"
        return story.token(end) if row.samples else -1


class Simulation:
    """A scheduler with a device, and up to `depth` steps that have run but were not read."""

    def __init__(self, config: SchedulerConfig, pool: PagePool, depth: int) -> None:
        self.config, self.pool, self.depth = config, pool, depth
        self.scheduler = Scheduler(config, pool)
        self.device = Device(config, pool.page_size)
        self.stories: dict[Sequence, Story] = {}
        self.in_flight: deque[tuple[StepPlan, list[int]]] = deque()
        self.num_events: dict[Sequence, int] = {}
        self.num_steps = 0

    @property
    def alive(self) -> list[Sequence]:
        return [sequence for sequence in self.stories if not sequence.finished]

    def add(
        self, prompt: list[int], num_forks: int = 0, max_tokens: int = 8, **fields: Any
    ) -> None:
        """Add a sequence and its forks, cut to the longest that the scheduler takes."""
        prompt = prompt[: self.config.max_model_len - 1]
        max_tokens = min(max_tokens, self.config.max_model_len - len(prompt))
        stops = frozenset({STOP, EOS})
        limits = SequenceLimits(max_tokens, fields.pop("min_tokens", 0), stops, frozenset({EOS}))
        parent = None
        for _ in range(num_forks + 1):
            number, arrival = len(self.stories), 10.0 * self.num_steps
            sequence = Sequence(number, prompt, limits, arrival=arrival, parent=parent, **fields)
            self.stories[sequence] = Story(sequence)
            self.num_events[sequence] = 0
            self.scheduler.add(sequence)
            parent = parent or sequence

    def step(self) -> None:
        """Schedule and run a step, and read the oldest once more than `depth` are in flight."""
        plan = self.scheduler.schedule()
        if plan is None:
            self.device.take()
            if not self.in_flight:  # what was read may have been asked for too early
                plan = self.scheduler.schedule()
        self.pool.check()
        if plan is not None:
            self.check_plan(plan)
            self.in_flight.append((plan, self.device.run(plan, self.stories)))
            self.num_steps += 1
        if plan is None or len(self.in_flight) > self.depth:
            assert self.in_flight or not self.scheduler.has_work, "stuck"
            self.read()

    def read(self) -> None:
        if self.in_flight:
            for event in self.scheduler.update(*self.in_flight.popleft()):
                self.check_event(event)
            self.pool.check()

    def drain(self) -> None:
        """Run until nothing is left; the pool must then be as it was at the beginning."""
        num_tokens = sum(self.config.max_model_len for _ in self.alive)
        patience = self.num_steps + 10 * num_tokens + 100
        while self.scheduler.has_work or self.in_flight:
            self.step()
            assert self.num_steps < patience, "going round in circles"
        for sequence, story in self.stories.items():
            if sequence.finish_reason is not FinishReason.ABORT:
                found = sequence.outputs, sequence.finish_reason, sequence.stop_reason
                assert found == story.ending()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert (self.scheduler.backlog, self.scheduler.num_waiting_long) == ([0, 0], 0)
        assert self.pool.num_used == 0
        assert self.scheduler.reset_prefix_cache()
        assert self.pool.num_free == self.pool.num_pages - 1
        assert self.pool.host.num_used == 0

    def check_plan(self, plan: StepPlan) -> None:
        config, lengths = self.config, [row.length for row in plan.rows]
        assert 0 < plan.num_tokens <= config.max_num_batched_tokens
        assert min(lengths) > 0
        assert sorted(lengths, key=lambda length: length > 1) == lengths
        slots = {row.slot for row in plan.rows}
        assert len(slots) == len(plan.rows)
        assert slots <= set(range(config.max_num_seqs))
        if config.long_prefill_token_threshold and config.enable_chunked_prefill:
            assert max(lengths) <= config.long_prefill_token_threshold
        if not config.enable_chunked_prefill:
            assert all(row.samples for row in plan.rows)
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {copy.source for copy in plan.copies}
        self.check_writes(plan)
        self.check_held(plan)

    def check_writes(self, plan: StepPlan) -> None:
        """No row writes to a page that a sequence of an earlier step reads too."""
        older = [row.sequence for row in plan.rows if row.sequence not in plan.admitted]
        for row in plan.rows:
            first, last = row.start, row.start + row.length - 1
            indices = slice(first // self.pool.page_size, last // self.pool.page_size + 1)
            written = {page for table in row.sequence.page_tables for page in table[indices]}
            assert NULL_PAGE not in written
            assert all(
                written.isdisjoint(table)
                for sequence in older
                if sequence is not row.sequence
                for table in sequence.page_tables
            )

    def check_held(self, plan: StepPlan) -> None:
        """No sequence holds more pages than its windows and a chunk need."""
        config, page_size = self.config, self.pool.page_size
        for row in plan.rows:
            for window, table in zip(config.windows, row.sequence.page_tables, strict=True):
                held = [page for page in table if page != NULL_PAGE]
                length = max(row.sequence.num_total, row.sequence.num_computed)
                assert len(held) <= most_entries(window, length, config.longest_chunk, page_size)
                if row.length == 1 and window is not None:
                    # Two more: one that is filled in part, and one token's that forks may need.
                    assert len(held) <= window // page_size + 2

    def check_event(self, event: TokenEvent) -> None:
        sequence = event.sequence
        self.num_events[sequence] += 1
        assert len(sequence.outputs) == self.num_events[sequence], "a token without an event"
        outputs, reason, _ = self.stories[sequence].ending()
        assert sequence.outputs == outputs[: len(sequence.outputs)]
        assert event.token == outputs[len(sequence.outputs) - 1]
        assert event.finish_reason == (reason if sequence.outputs == outputs else None)


WINDOWS: list[Windows] = [
    *[(None,)] * 4,
    *((1,), (2,), (3,), (7,), (30,)),
    *((None, 3), (None, 5, 5), (None, 1, 9), (None, None, 4), (2, 6)),
]


def least_pages(config: SchedulerConfig, page_size: int) -> int:
    """Pages that the scheduler asks for at least."""
    return most_pages(config.windows, config.max_model_len, config.longest_chunk, page_size)


def random_simulation(random: Random) -> Simulation:
    """Mostly pools too small for their traffic."""
    page_size, max_num_seqs = random.choice((1, 2, 3, 4)), random.randint(1, 6)
    max_model_len = random.randint(2, 40)
    chunked = random.random() < 0.8
    least = max_num_seqs if chunked else max(max_num_seqs, max_model_len)
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=least + random.choice((0, 1, 5, 30)),
        max_model_len=max_model_len,
        policy=random.choice(("fcfs", "priority", "lanes" if chunked else "fcfs")),
        enable_chunked_prefill=chunked,
        long_prefill_token_threshold=random.choice((0, 0, 1, 3, 9)),
        growth_steps=random.choice((0, 0, 8)),
        windows=random.choice(WINDOWS),
        load_costs=random.choice((*[FREE] * 3, LoadCosts(per_page=page_size, latency=1))),
        lanes=Lanes(
            long_prompt=random.choice((1, 4, 10)),
            share=random.choice((0.5, 0.9)),
            most_long=random.choice((1, 2)),
            alone=random.choice((1, 5, 50)),
        ),
        num_stages=random.choice((1, 1, 2, 3)),
        step_sizes=((), (2, 5, 9, 40))[max_model_len % 2],
    )
    num_pages = least_pages(config, page_size) + random.choice((0, 1, 2, 4, 20))
    caching, num_host_pages = random.random() < 0.8, random.choice((0, 2, 9, 40))
    pool = PagePool(num_pages + 1, page_size, caching, num_host_pages)
    depth = config.num_stages - 1 + random.choice((0, 1, 1, 2, 3))
    return Simulation(config, pool, depth)


def random_traffic(simulation: Simulation, random: Random, num_steps: int) -> None:
    load = random.choice((0.1, 0.3, 0.8))
    for _ in range(num_steps):
        if random.random() < load:
            prompt = random_prompt(simulation, random)
            simulation.add(
                prompt,
                num_forks=random.choice((0, 0, 0, 1, 3)),
                max_tokens=random.choice((1, 3, 10, 40)),
                min_tokens=random.choice((0, 5, 40)),
                priority=random.randint(-1, 1),
                cache_salt=random.choice(("", "", "", "salt")),
                reads_prefix_cache=random.random() < 0.9,
            )
        if random.random() < 0.05 and simulation.alive:
            simulation.scheduler.abort([random.choice(simulation.alive).sequence_id])
        if random.random() < 0.01:
            if random.random() < 0.5:
                preempt_all(simulation.scheduler)
            simulation.scheduler.reset_prefix_cache()
        simulation.step()


def random_prompt(simulation: Simulation, random: Random) -> list[int]:
    """Something new, or another turn after what an earlier sequence said."""
    new = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 12))]
    if random.random() < 0.5 or not simulation.stories:
        return new
    earlier = random.choice(list(simulation.stories))
    said = earlier.prompt + earlier.outputs
    return said[: random.randint(0, len(said))] + new


def run_randomly(first_seed: int, least_steps: int) -> tuple[int, int, int, int]:
    """Steps, preemptions, tokens found in prefix caches and pages loaded from the host.

    Over many small simulations.
    """
    num_steps = num_preemptions = num_hits = num_loaded = 0
    seed = first_seed
    while num_steps < least_steps:
        random = Random(seed)
        simulation = random_simulation(random)
        random_traffic(simulation, random, num_steps=60)
        simulation.drain()
        num_steps += simulation.num_steps
        num_preemptions += simulation.scheduler.num_preemptions
        num_hits += simulation.scheduler.prefix_hits
        num_loaded += simulation.pool.num_loaded
        seed += 1
    return num_steps, num_preemptions, num_hits, num_loaded


def test_every_sequence_comes_out_as_if_it_had_run_alone() -> None:
    num_steps, num_preemptions, num_hits, num_loaded = run_randomly(
        first_seed=0, least_steps=100_000
    )
    assert num_steps >= 100_000
    assert num_preemptions > 2_000, "the pools were too large to test anything"
    assert num_hits > 40_000, "the prompts had too little in common to test anything"
    assert num_loaded > 1_500, "the host had too little of use to test anything"


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(100_000, 1_000_000, 100_000))
def test_every_sequence_comes_out_as_if_it_had_run_alone_for_long(first_seed: int) -> None:
    run_randomly(first_seed, least_steps=300_000)


class SchedulerMachine(RuleBasedStateMachine):
    """The same simulation in the hands of hypothesis, which looks for the shortest way to fail."""

    simulation: Simulation

    @initialize(
        page_size=st.integers(1, 4),
        spare_pages=st.integers(0, 8),
        caching=st.booleans(),
        depth=st.integers(0, 2),
        max_num_seqs=st.integers(1, 4),
        spare_budget=st.integers(0, 12),
        max_model_len=st.integers(2, 24),
        policy=st.sampled_from(["fcfs", "priority", "lanes"]),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 1, 3]),
        growth_steps=st.sampled_from([0, 8]),
        windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3),
        num_host_pages=st.integers(0, 8),
        num_stages=st.integers(1, 3),
        step_sizes=st.sampled_from([(), (2, 5, 16)]),
    )
    def start(
        self, page_size: int, spare_pages: int, caching: bool, depth: int, **limits: Any
    ) -> None:
        max_num_seqs, max_model_len = limits["max_num_seqs"], limits["max_model_len"]
        least_budget = max(max_num_seqs, 0 if limits["chunked"] else max_model_len)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=least_budget + limits["spare_budget"],
            max_model_len=max_model_len,
            policy=limits["policy"] if limits["chunked"] else "fcfs",
            lanes=Lanes(long_prompt=4, share=0.5, alone=3),
            enable_chunked_prefill=limits["chunked"],
            long_prefill_token_threshold=limits["threshold"],
            growth_steps=limits["growth_steps"],
            windows=tuple(limits["windows"]),
            num_stages=limits["num_stages"],
            step_sizes=limits["step_sizes"],
        )
        num_pages = least_pages(config, page_size) + spare_pages
        pool = PagePool(num_pages + 1, page_size, caching, limits["num_host_pages"])
        self.simulation = Simulation(config, pool, config.num_stages - 1 + depth)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        num_forks=st.integers(0, 2),
        max_tokens=st.integers(1, 12),
        min_tokens=st.sampled_from([0, 12]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from(["", "salt"]),
        reads_prefix_cache=st.booleans(),
    )
    def add(self, **request: Any) -> None:
        self.simulation.add(**request)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.simulation.step()

    @rule()
    def read(self) -> None:
        self.simulation.read()

    @precondition(lambda self: self.simulation.alive)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [sequence.sequence_id for sequence in self.simulation.alive]
        self.simulation.scheduler.abort(data.draw(st.lists(st.sampled_from(alive), max_size=2)))

    @rule(preempts=st.booleans())
    def reset(self, preempts: bool) -> None:
        scheduler = self.simulation.scheduler
        if preempts:
            preempt_all(scheduler)
        assert scheduler.reset_prefix_cache() == (scheduler.num_running == 0)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "simulation"):
            scheduler = self.simulation.scheduler
            self.simulation.pool.check()
            assert scheduler.num_running + scheduler.num_waiting == len(self.simulation.alive)
            assert 0 <= scheduler.kv_waste < 1
            assert min(scheduler.backlog) >= 0

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()


class LongSchedulerMachine(SchedulerMachine):
    """The same, with more time."""


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestSchedulerForLong = pytest.mark.slow(LongSchedulerMachine.TestCase)
TestSchedulerForLong.settings = settings(TestScheduler.settings, max_examples=2_000)
