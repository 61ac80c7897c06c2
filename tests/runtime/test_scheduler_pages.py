"""What the scheduler does with pages: preemption, the prefix cache, forks and copy-on-write."""

from typing import Any

import pytest

from paged.pool import PagePool, of_group
from paged.prefix import page_hash
from paged.runtime import page_tables
from paged.runtime.plan import StepPlan
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import FinishReason, Sequence, SequenceLimits, Status
from tests.runtime.test_scheduler import preempt_all

PAGE_SIZE = 4


def make_scheduler(
    num_pages: int = 64, caching: bool = True, num_host_pages: int = 0, **changes: Any
) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
    } | changes
    pool = PagePool(num_pages + 1, PAGE_SIZE, caching, num_host_pages)
    return Scheduler(SchedulerConfig(**settings), pool)


def add(scheduler: Scheduler, number: int, prompt: list[int], **fields: Any) -> Sequence:
    limits = SequenceLimits(max_tokens=fields.pop("max_tokens", 32 - len(prompt)))
    sequence = Sequence(number, prompt, limits, **fields)
    scheduler.add(sequence)
    return sequence


def tokens(number: int, length: int) -> list[int]:
    """A prompt that has nothing in common with that of another number."""
    return [100 * number + i for i in range(length)]


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def read(scheduler: Scheduler, plan: StepPlan, token: int = 7) -> list[FinishReason | None]:
    events = scheduler.update(plan, [token] * len(plan.rows))
    scheduler.pool.check()
    return [event.finish_reason for event in events]


def step(scheduler: Scheduler, token: int = 7) -> StepPlan:
    plan = schedule(scheduler)
    read(scheduler, plan, token)
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Sequence number, start and length, row by row."""
    return [(row.sequence.sequence_id, row.start, row.length) for row in plan.rows]


# Preemption


def two_in_a_small_pool(
    caching: bool = True, **changes: Any
) -> tuple[Scheduler, Sequence, Sequence]:
    """Eight pages, three of them the first sequence's and three the second's.

    Both take a fourth page for their first output, and in step 6 both want a fifth.
    """
    scheduler = make_scheduler(num_pages=8, caching=caching, **changes)
    first, second = (add(scheduler, number, tokens(number, 12)) for number in (1, 2))
    step(scheduler)
    assert scheduler.num_running == 2
    return scheduler, first, second


def run_until_preempted(scheduler: Scheduler, sequence: Sequence) -> StepPlan:
    """The plan for which the sequence had to go."""
    while sequence.status is not Status.PREEMPTED:
        plan = step(scheduler)
    return plan


def test_the_last_in_line_gives_its_pages_to_those_before_it() -> None:
    scheduler, first, second = two_in_a_small_pool()
    assert rows(run_until_preempted(scheduler, second)) == [(1, 16, 1)]
    assert (second.slot, second.page_tables) == (None, [])
    assert len(first.page_tables[0]) == 5
    assert (scheduler.num_preemptions, second.num_preemptions) == (1, 1)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    scheduler, _, second = two_in_a_small_pool()
    third = add(scheduler, 3, tokens(3, 2), arrival=-1.0)  # first in line, and small
    assert run_until_preempted(scheduler, second).admitted == ()
    assert step(scheduler).admitted == (third,)


def test_the_preempted_comes_back_before_all_that_arrived_later() -> None:
    scheduler, _, second = two_in_a_small_pool()
    third = add(scheduler, 3, tokens(3, 2))
    run_until_preempted(scheduler, second)
    assert step(scheduler).admitted == ()
    scheduler.abort([1])
    assert schedule(scheduler).admitted == (second, third)


def test_the_preempted_computes_prompt_and_outputs_again() -> None:
    scheduler, _, second = two_in_a_small_pool(caching=False)
    run_until_preempted(scheduler, second)
    scheduler.abort([1])
    assert second.outputs == [7] * 5
    assert rows(step(scheduler)) == [(2, 0, 17)]
    assert rows(step(scheduler)) == [(2, 17, 1)]


def test_the_prefix_cache_spares_the_preempted_most_of_it() -> None:
    scheduler, _, second = two_in_a_small_pool()
    run_until_preempted(scheduler, second)  # of its four full pages the last one was taken
    scheduler.abort([1])
    assert rows(step(scheduler)) == [(2, 12, 5)]
    assert second.num_cached == 0, "counted at the first admission"
    assert scheduler.prefix_hits == 0


def test_who_waits_for_room_is_not_hashed_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, _, second = two_in_a_small_pool()
    run_until_preempted(scheduler, second)  # and has left a page that is not full
    hashed = []

    def spy(parent: bytes, content: list[int]) -> bytes:
        hashed.append(content)
        return page_hash(parent, content)

    monkeypatch.setattr(page_tables, "page_hash", spy)
    scheduler.abort([2])
    add(scheduler, 3, tokens(3, 20))
    assert step(scheduler).admitted == ()
    assert hashed == []


def test_tokens_in_flight_of_the_preempted_still_count() -> None:
    scheduler, _, second = two_in_a_small_pool()
    plans = [schedule(scheduler) for _ in range(5)]
    assert second.status is Status.PREEMPTED
    scheduler.abort([1])
    for count in range(1, 5):
        assert scheduler.schedule() is None, "its newest tokens are still on the way"
        read(scheduler, plans[count - 1], token=count)
    assert second.outputs == [7, 1, 2, 3, 4]
    assert rows(schedule(scheduler)) == [(2, 12, 5)]
    assert read(scheduler, plans[4]) == []


@pytest.mark.parametrize("leaves", ["preempted", "aborted", "running"])
@pytest.mark.parametrize("windows", [(None,), (None, 8)])
def test_what_led_to_no_number_is_found_nowhere(leaves: str, windows: tuple[int | None]) -> None:
    """Though its pages are others' by now, on the host, or in the cache."""
    scheduler = make_scheduler(10 * len(windows), num_host_pages=64, windows=windows)
    pool = scheduler.pool
    forgotten: list[bytes] = []
    pool.on_forget = forgotten.extend
    sequence = add(scheduler, 2, tokens(2, 13))
    step(scheduler)
    add(scheduler, 1, tokens(1, 12), arrival=-1.0)
    step(scheduler)
    plan = schedule(scheduler)
    if leaves == "preempted":
        scheduler._running.remove(sequence)
        scheduler._running.add(sequence)
        scheduler._preempt(sequence)
    elif leaves == "aborted":
        scheduler.abort([2])
    pool.release(pool.allocate(pool.num_available // 2))  # some go on to the host
    scheduler.update(plan, [-1 if row.sequence is sequence else 7 for row in plan.rows])
    pool.check()
    assert sequence.status is Status.FINISHED
    assert sequence.finish_reason is (
        FinishReason.ABORT if leaves == "aborted" else FinishReason.ERROR
    )
    names = [*sequence.page_hashes]
    parts = [scheduler._tables._part_hash(sequence, end) for end in sequence.part_ends]
    assert len(names) == 3
    assert len(parts) == (leaves != "running")
    for name in (*names, *parts):
        for group in range(len(windows)):
            assert pool.find(name, group, on_host=True) is None
            assert of_group(name, group) in forgotten
    again = add(scheduler, 3, tokens(2, 13), arrival=-2.0)
    step(scheduler)
    assert again.num_cached == 0


def test_the_preempted_may_end_while_it_waits() -> None:
    scheduler, _, second = two_in_a_small_pool()
    second.limits = SequenceLimits(max_tokens=5)
    plans = [schedule(scheduler) for _ in range(5)]
    assert second.status is Status.PREEMPTED
    reasons = [reason for plan in plans for reason in read(scheduler, plan)]
    assert reasons == [None] * 7 + [FinishReason.LENGTH, None]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 0)


def test_the_last_in_line_may_have_to_preempt_itself() -> None:
    scheduler = make_scheduler(num_pages=8)
    first = add(scheduler, 1, tokens(1, 14))
    second = add(scheduler, 2, tokens(2, 8))
    assert rows(run_until_preempted(scheduler, second)) == [(1, 18, 1)]
    assert second.num_tokens == 8 + 5
    while not first.finished:
        assert rows(step(scheduler))[0][0] == 1
        assert second.status is Status.PREEMPTED
    assert rows(step(scheduler))[0][0] == 2


def test_priority_decides_who_is_preempted() -> None:
    scheduler = make_scheduler(num_pages=8, policy="priority")
    first = add(scheduler, 1, tokens(1, 12), priority=1)
    add(scheduler, 2, tokens(2, 12))
    assert rows(run_until_preempted(scheduler, first)) == [(2, 16, 1)]


def test_an_admission_leaves_pages_for_the_next_steps_of_the_running() -> None:
    """With pages of 4 tokens, 8 steps of one sequence take 2 pages."""
    for num_pages, admitted in ((7, False), (8, True)):
        scheduler = make_scheduler(num_pages=num_pages, max_model_len=28, growth_steps=8)
        add(scheduler, 1, tokens(1, 12), max_tokens=8)
        second = add(scheduler, 2, tokens(2, 12), max_tokens=8)
        assert (second in schedule(scheduler).admitted) is admitted


def test_a_lone_sequence_gets_as_long_as_the_pool_allows() -> None:
    scheduler = make_scheduler(num_pages=8, max_model_len=32)
    sequence = add(scheduler, 1, tokens(1, 5))
    while scheduler.has_work:
        step(scheduler)
    assert sequence.num_tokens == 32
    assert scheduler.num_preemptions == 0


def test_a_reset_is_refused_while_pages_are_held() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, tokens(1, 9))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    preempt_all(scheduler)
    assert scheduler.reset_prefix_cache()
    assert scheduler.pool.num_free == 64
    assert rows(step(scheduler)) == [(1, 0, 10)]
    assert sequence.outputs == [7, 7]


# Prefix cache


def test_a_known_prefix_is_shared_and_not_computed() -> None:
    scheduler = make_scheduler()
    prefix = tokens(0, 8)
    first = add(scheduler, 1, prefix + tokens(1, 3))
    step(scheduler)
    second = add(scheduler, 2, prefix + tokens(2, 3))
    assert rows(schedule(scheduler)) == [(1, 11, 1), (2, 8, 3)]
    assert second.page_tables[0][:2] == first.page_tables[0][:2]
    assert (first.num_cached, second.num_cached) == (0, 8)
    assert (scheduler.prefix_queries, scheduler.prefix_hits) == (22, 8)


def test_a_prefix_is_found_in_the_step_that_computes_it() -> None:
    """Each layer writes the keys and values of all rows before any row attends."""
    scheduler = make_scheduler()
    prefix = tokens(0, 8)
    add(scheduler, 1, prefix + tokens(1, 3))
    add(scheduler, 2, prefix + tokens(2, 3))
    assert rows(schedule(scheduler)) == [(1, 0, 11), (2, 8, 3)]


def test_at_least_one_token_of_a_known_prompt_is_computed() -> None:
    scheduler = make_scheduler()
    for number in (1, 2):
        add(scheduler, number, tokens(0, 8), max_tokens=1)
        plan = step(scheduler)
    assert rows(plan) == [(2, 4, 4)]
    assert plan.copies == ()


def test_generated_pages_are_found_once_their_tokens_are_read() -> None:
    scheduler = make_scheduler()
    first = add(scheduler, 1, tokens(1, 6), max_tokens=7)
    plans = [schedule(scheduler) for _ in range(7)]
    assert scheduler.pool.match(first.page_hashes) == first.page_tables[0][:1]
    for plan in plans:
        read(scheduler, plan)
    add(scheduler, 2, [*first.prompt, *first.outputs, 1])
    assert rows(schedule(scheduler)) == [(2, 12, 2)]


def test_tokens_past_the_end_are_never_cached() -> None:
    """A stop is read while two steps beyond it have filled the page with tokens unknown."""
    scheduler = make_scheduler()
    first = add(scheduler, 1, tokens(1, 6), max_tokens=8)
    plans = [schedule(scheduler) for _ in range(4)]
    assert first.num_computed == 9
    read(scheduler, plans[0])
    scheduler.finish([1], FinishReason.STOP)
    for plan in plans[1:]:
        read(scheduler, plan)
    assert scheduler.pool.match(first.page_hashes) == [1]
    assert len(first.page_hashes) == 1


def test_salts_keep_sequences_apart() -> None:
    scheduler = make_scheduler()
    for number, salt in enumerate(("", "a", "b", "a")):
        add(scheduler, number, tokens(0, 9), max_tokens=1, cache_salt=salt)
    assert [start for _, start, _ in rows(step(scheduler))] == [8, 0, 0, 0]


@pytest.mark.parametrize(("caching", "reads"), [(True, False), (False, True)])
def test_nothing_is_looked_up_where_that_is_not_wanted(caching: bool, reads: bool) -> None:
    scheduler = make_scheduler(caching=caching)
    add(scheduler, 1, tokens(0, 9), max_tokens=1)
    step(scheduler)
    queries = scheduler.prefix_queries
    second = add(scheduler, 2, tokens(0, 9), max_tokens=1, reads_prefix_cache=reads)
    assert rows(step(scheduler)) == [(2, 0, 9)]
    assert second.num_cached == 0
    assert scheduler.prefix_queries == queries


def test_shared_pages_make_room_for_a_prompt_that_would_not_fit_alone() -> None:
    scheduler = make_scheduler(num_pages=8, growth_steps=0)
    add(scheduler, 1, tokens(0, 24))
    step(scheduler)
    add(scheduler, 2, tokens(0, 24) + tokens(2, 1))
    assert [number for number, *_ in rows(schedule(scheduler))] == [1, 2]


@pytest.mark.parametrize(("num_free", "admitted"), [(2, False), (3, True)])
def test_pages_revived_by_a_hit_are_not_counted_as_room(num_free: int, admitted: bool) -> None:
    """The third needs a page of its own and two to spare, beside the four that it revives."""
    scheduler = make_scheduler(num_pages=4 + 4 + num_free, growth_steps=8)
    add(scheduler, 1, tokens(0, 16), max_tokens=1)
    step(scheduler)
    add(scheduler, 2, tokens(2, 13))
    step(scheduler)
    third = add(scheduler, 3, tokens(0, 17), max_tokens=1)
    assert (scheduler.pool.num_cached, scheduler.pool.num_free) == (4, num_free)
    assert (third in schedule(scheduler).admitted) is admitted


# Forks


def fork(scheduler: Scheduler, number: int, parent: Sequence, **fields: Any) -> Sequence:
    return add(scheduler, number, parent.prompt, parent=parent, **fields)


def test_forks_wait_for_the_prompt_and_then_compute_its_last_token_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent = add(scheduler, 1, tokens(1, 10))
    forks = [fork(scheduler, 2, parent), fork(scheduler, 3, parent)]
    assert rows(step(scheduler)) == [(1, 0, 8)]
    assert rows(step(scheduler)) == [(1, 8, 2)], "copies come before writes: not in this step"
    plan = step(scheduler)
    assert rows(plan) == [(1, 10, 1), (2, 9, 1), (3, 9, 1)]
    assert all(row.samples for row in plan.rows)
    assert plan.admitted == tuple(forks)
    assert [sequence.num_cached for sequence in forks] == [9, 9]


def test_forks_share_full_pages_and_copy_the_one_they_write_to() -> None:
    scheduler = make_scheduler()
    parent = add(scheduler, 1, tokens(1, 10))
    child = fork(scheduler, 2, parent)
    step(scheduler)
    plan = step(scheduler)
    assert child.page_tables[0][:2] == parent.page_tables[0][:2]
    assert plan.copies == ((parent.page_tables[0][2], child.page_tables[0][2]),)
    assert plan.page_updates == tuple((1, i, page) for i, page in enumerate(child.page_tables[0]))
    held = [
        scheduler.pool._references[page] for page in (*parent.page_tables[0], *child.page_tables[0])
    ]
    assert held == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("prompt_length", "num_copies"), [(1, 0), (2, 1), (4, 1), (5, 0), (8, 1), (9, 0), (11, 1)]
)
def test_a_page_is_copied_only_if_it_holds_tokens_before_the_last(
    prompt_length: int, num_copies: int
) -> None:
    scheduler = make_scheduler()
    parent = add(scheduler, 1, tokens(1, prompt_length))
    fork(scheduler, 2, parent)
    step(scheduler)
    plan = step(scheduler)
    assert rows(plan)[1] == (2, prompt_length - 1, 1)
    assert len(plan.copies) == num_copies


def test_waiting_forks_hold_nobody_up() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, long_prefill_token_threshold=4)
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent)
    add(scheduler, 3, tokens(3, 4))
    assert rows(step(scheduler)) == [(1, 0, 4), (3, 0, 4)]
    assert scheduler.num_waiting == 1


def test_more_forks_than_slots_take_turns() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    parent = add(scheduler, 1, tokens(1, 6), max_tokens=3)
    forks = [fork(scheduler, number, parent, max_tokens=3) for number in range(2, 6)]
    while scheduler.has_work:
        step(scheduler)
    assert [sequence.outputs for sequence in forks] == [[7, 7, 7]] * 4


@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_whose_parent_is_gone_is_an_ordinary_prompt(caching: bool) -> None:
    scheduler = make_scheduler(caching=caching)
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent)
    plan = schedule(scheduler)
    scheduler.abort([1])
    start = 8 if caching else 0
    assert rows(schedule(scheduler)) == [(2, start, 10 - start)]
    assert read(scheduler, plan) == []


def test_a_fork_whose_parent_ended_before_it_was_queued_waits_for_nobody() -> None:
    scheduler = make_scheduler()
    parent = Sequence(1, tokens(1, 10), SequenceLimits(max_tokens=4))
    forks = [fork(scheduler, number, parent) for number in (2, 3)]
    assert scheduler.backlog == [20, 0]
    assert rows(step(scheduler)) == [(2, 0, 10), (3, 8, 2)]
    assert all(each.outputs for each in forks)


def test_a_fork_added_late_waits_for_the_rest_of_the_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent = add(scheduler, 1, tokens(1, 17))
    step(scheduler)
    fork(scheduler, 2, parent)
    assert [rows(step(scheduler)) for _ in range(3)] == [
        [(1, 8, 8)],
        [(1, 16, 1)],
        [(1, 17, 1), (2, 16, 1)],
    ]


def test_forks_do_not_wait_for_a_parent_that_ended_before_its_prompt_was_done() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent)
    step(scheduler)
    scheduler.abort([1])
    assert rows(step(scheduler)) == [(2, 8, 2)]


def test_forks_wait_for_a_parent_that_was_preempted_before_its_prompt_was_done() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent)
    step(scheduler)
    preempt_all(scheduler)
    scheduler.reset_prefix_cache()
    assert [rows(step(scheduler)) for _ in range(3)] == [
        [(1, 0, 8)],
        [(1, 8, 2)],
        [(1, 10, 1), (2, 9, 1)],
    ]


def test_a_preempted_fork_finds_its_own_outputs_in_the_prefix_cache() -> None:
    scheduler = make_scheduler(num_pages=14)
    add(scheduler, 0, tokens(0, 12))
    parent = add(scheduler, 1, tokens(1, 7))
    child = fork(scheduler, 2, parent)
    run_until_preempted(scheduler, child)
    scheduler.abort([0])
    assert rows(step(scheduler))[-1] == (2, 16, 1)


def test_no_page_is_copied_in_the_step_that_writes_it_again() -> None:
    """A parent that computes its prompt anew is not copied from before that has happened."""
    scheduler = make_scheduler(max_num_seqs=2)
    other = add(scheduler, 0, tokens(0, 2))
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent)
    step(scheduler)
    scheduler.abort([other.sequence_id])
    preempt_all(scheduler)
    scheduler.reset_prefix_cache()
    plan = step(scheduler)
    assert rows(plan) == [(1, 0, 11), (2, 8, 2)]
    assert plan.copies == ()


def test_a_waiting_fork_can_be_aborted() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    parent = add(scheduler, 1, tokens(1, 10))
    child = fork(scheduler, 2, parent)
    step(scheduler)
    assert scheduler.abort([2]) == [child]
    step(scheduler)
    assert rows(step(scheduler)) == [(1, 10, 1)]


def test_a_fork_that_must_compute_its_prompt_shares_nothing() -> None:
    scheduler = make_scheduler()
    parent = add(scheduler, 1, tokens(1, 10))
    fork(scheduler, 2, parent, reads_prefix_cache=False)
    step(scheduler)
    assert rows(step(scheduler)) == [(1, 10, 1), (2, 0, 10)]
