"""What the scheduler decides: batching, running ahead, ends of sequences, aborts, limits."""

from typing import Any

import pytest

from paged.pool import PagePool
from paged.runtime.order import PRIORITY_SECONDS
from paged.runtime.plan import StepPlan, TokenEvent
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import FinishReason, Sequence, SequenceLimits, Status

TOKEN = 7


def make_scheduler(num_pages: int = 64, page_size: int = 4, **changes: Any) -> Scheduler:
    settings: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
    } | changes
    return Scheduler(SchedulerConfig(**settings), PagePool(num_pages + 1, page_size))


def add(scheduler: Scheduler, number: int, prompt_length: int, **fields: Any) -> Sequence:
    """Add a sequence whose prompt has nothing in common with that of another number."""
    limits = SequenceLimits(**{"max_tokens": 8} | fields.pop("limits", {}))
    prompt = [100 * number + i for i in range(prompt_length)]
    sequence = Sequence(number, prompt, limits, **fields)
    scheduler.add(sequence)
    return sequence


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def rows(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    """Sequence number, start, length and whether it samples, row by row."""
    return [(row.sequence.sequence_id, row.start, row.length, row.samples) for row in plan.rows]


def read(scheduler: Scheduler, plan: StepPlan, token: int = TOKEN) -> list[TokenEvent]:
    """Let every row of the plan sample the same token."""
    events = scheduler.update(plan, [token] * len(plan.rows))
    scheduler.pool.check()
    return events


def step(scheduler: Scheduler, token: int = TOKEN) -> list[tuple[int, int, int, bool]]:
    """One step, scheduled and read."""
    plan = schedule(scheduler)
    read(scheduler, plan, token)
    return rows(plan)


def preempt_all(scheduler: Scheduler) -> None:
    """Take all pages from running sequences."""
    while sequence := scheduler._running.last:
        scheduler._preempt(sequence)


# Batching


def test_a_prompt_is_computed_and_then_one_token_after_the_other() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 5)
    assert step(scheduler) == [(1, 0, 5, True)]
    assert step(scheduler) == [(1, 5, 1, True)]
    assert step(scheduler) == [(1, 6, 1, True)]
    assert sequence.outputs == [TOKEN] * 3


def test_a_long_prompt_is_cut_into_chunks_and_samples_after_the_last() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add(scheduler, 1, 37)
    assert step(scheduler) == [(1, 0, 16, False)]
    assert step(scheduler) == [(1, 16, 16, False)]
    assert step(scheduler) == [(1, 32, 5, True)]


def test_prompts_fill_what_the_decodes_leave_and_stand_behind_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16)
    add(scheduler, 1, 20)
    step(scheduler)
    add(scheduler, 2, 1)
    add(scheduler, 3, 30)
    assert step(scheduler) == [(2, 0, 1, True), (1, 16, 4, True), (3, 0, 11, False)]
    assert step(scheduler) == [(1, 20, 1, True), (2, 1, 1, True), (3, 11, 14, False)]


def test_a_prompt_leaves_a_token_for_every_sequence_behind_it() -> None:
    scheduler = make_scheduler(policy="priority", max_num_batched_tokens=8)
    add(scheduler, 1, 3)
    add(scheduler, 2, 4)
    step(scheduler)
    add(scheduler, 3, 20, priority=-1)
    assert step(scheduler) == [(1, 3, 1, True), (2, 4, 1, True), (3, 0, 6, False)]
    assert step(scheduler) == [(1, 4, 1, True), (2, 5, 1, True), (3, 6, 6, False)]


def test_a_threshold_cuts_long_prompts_so_that_others_fit_beside_them() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, long_prefill_token_threshold=6)
    add(scheduler, 1, 14)
    add(scheduler, 2, 9)
    assert step(scheduler) == [(1, 0, 6, False), (2, 0, 6, False)]
    assert step(scheduler) == [(1, 6, 6, False), (2, 6, 3, True)]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(enable_chunked_prefill=False, max_num_batched_tokens=64)
    add(scheduler, 1, 40)
    add(scheduler, 2, 30)
    add(scheduler, 3, 10)
    assert step(scheduler) == [(1, 0, 40, True)]
    assert step(scheduler) == [(1, 40, 1, True), (2, 0, 30, True), (3, 0, 10, True)]


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_pages=16)
    add(scheduler, 1, 12)
    add(scheduler, 2, 56)
    add(scheduler, 3, 1)
    assert step(scheduler) == [(1, 0, 12, True)]  # 2 needs 14 pages of the 13 left
    assert step(scheduler) == [(1, 12, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)


def test_slots_limit_the_running_sequences_and_are_used_again_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 1, 1, limits={"max_tokens": 1})
    add(scheduler, 2, 1)
    third = add(scheduler, 3, 1)
    first_plan = schedule(scheduler)
    assert [row.slot for row in first_plan.rows] == [0, 1]
    read(scheduler, first_plan)
    plan = schedule(scheduler)
    assert plan.admitted == (third,)
    assert [(row.sequence.sequence_id, row.slot) for row in plan.rows] == [(2, 1), (3, 0)]


def test_page_tables_are_sent_whole_on_admission_and_then_by_what_is_new() -> None:
    scheduler = make_scheduler(page_size=4, max_num_batched_tokens=8)
    sequence = add(scheduler, 1, 12)
    plan = schedule(scheduler)
    assert plan.page_updates == ((0, 0, 1), (0, 1, 2), (0, 2, 3))
    read(scheduler, plan)
    assert schedule(scheduler).page_updates == ()
    assert schedule(scheduler).page_updates == ((0, 3, 4),)
    assert sequence.page_tables[0] == [1, 2, 3, 4]


def test_arrival_decides_first_come_first_served() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 1, 1, arrival=2.0)
    add(scheduler, 2, 1, arrival=1.0, priority=5)
    assert step(scheduler) == [(2, 0, 1, True)]


def test_a_level_of_priority_is_worth_so_many_seconds_of_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=3, policy="priority")
    add(scheduler, 1, 1, arrival=0.0)
    add(scheduler, 2, 1, arrival=PRIORITY_SECONDS - 1, priority=-1)
    add(scheduler, 3, 1, arrival=PRIORITY_SECONDS + 1, priority=-1)
    assert [number for number, *_ in step(scheduler)] == [2, 1, 3]


# Running ahead of the device


def test_steps_are_scheduled_before_earlier_ones_are_read() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    sequence = add(scheduler, 1, 6)
    plans = [schedule(scheduler) for _ in range(4)]
    assert [rows(plan) for plan in plans] == [
        [(1, 0, 4, False)],
        [(1, 4, 2, True)],
        [(1, 6, 1, True)],
        [(1, 7, 1, True)],
    ]
    assert (sequence.num_computed, sequence.num_tokens, sequence.num_pending) == (8, 6, 3)
    events = [read(scheduler, plan, token=i) for i, plan in enumerate(plans)]
    assert [len(event) for event in events] == [0, 1, 1, 1]
    assert sequence.outputs == [1, 2, 3]
    assert sequence.num_pending == 0


def test_stages_share_out_those_that_decode() -> None:
    scheduler = make_scheduler(num_stages=2, max_num_batched_tokens=8)
    for number in range(4):
        add(scheduler, number, 2)
    assert rows(schedule(scheduler)) == [(number, 0, 2, True) for number in range(4)]
    assert scheduler.schedule() is None, "their tokens are not back"
    steps = [[number for number, *_ in rows(schedule(scheduler))] for _ in range(4)]
    assert steps == [[0, 1], [2, 3]] * 2


def test_a_prompt_goes_on_while_its_last_part_is_in_another_stage() -> None:
    scheduler = make_scheduler(num_stages=3, max_num_batched_tokens=4)
    add(scheduler, 1, 10)
    assert [rows(schedule(scheduler)) for _ in range(3)] == [
        [(1, 0, 4, False)],
        [(1, 4, 4, False)],
        [(1, 8, 2, True)],
    ]
    assert scheduler.schedule() is None
    assert rows(schedule(scheduler)) == [(1, 10, 1, True)]


def test_a_newcomer_begins_between_the_steps_of_another() -> None:
    scheduler = make_scheduler(num_stages=3)
    add(scheduler, 1, 2)
    schedule(scheduler)
    add(scheduler, 2, 2)
    assert rows(schedule(scheduler)) == [(2, 0, 2, True)]
    assert scheduler.schedule() is None
    assert rows(schedule(scheduler)) == [(1, 2, 1, True)]


def test_no_more_tokens_are_sampled_than_are_wanted() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 3, limits={"max_tokens": 2})
    plans = [schedule(scheduler), schedule(scheduler)]
    assert scheduler.schedule() is None
    assert scheduler.has_work
    for plan in plans:
        read(scheduler, plan)
    assert sequence.finished
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_what_runs_past_the_end_leaves_no_trace() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 3, limits={"stop_token_ids": frozenset({9})})
    other = add(scheduler, 2, 3)
    plans = [schedule(scheduler) for _ in range(3)]
    assert [event.finish_reason for event in read(scheduler, plans[0], token=9)] == [
        FinishReason.STOP,
        None,
    ]
    for plan in plans[1:]:
        assert [event.sequence for event in read(scheduler, plan)] == [other]
    assert sequence.outputs == [9]
    assert sequence.num_pending == 0


def test_what_was_in_flight_for_an_aborted_sequence_is_dropped() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 3)
    plan = schedule(scheduler)
    assert scheduler.abort([1, 1, 99]) == [sequence]
    assert scheduler.abort([1]) == []
    assert read(scheduler, plan) == []
    assert sequence.outputs == []


# Ends


def finish_with(token: int, **limits: Any) -> tuple[FinishReason | None, int | None]:
    """Finish reason and stop reason after the second output token, if that is `token`."""
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 3, limits=limits)
    step(scheduler)
    plan = schedule(scheduler)
    [event] = read(scheduler, plan, token)
    assert (event.sequence, event.row, event.token) == (sequence, 0, token)
    assert event.finish_reason == sequence.finish_reason
    return sequence.finish_reason, sequence.stop_reason


def test_a_stop_token_is_the_stop_reason() -> None:
    assert finish_with(9, stop_token_ids=frozenset({9})) == (FinishReason.STOP, 9)


def test_the_end_of_sequence_gives_no_stop_reason() -> None:
    ids = frozenset({9})
    assert finish_with(9, stop_token_ids=ids, eos_token_ids=ids) == (FinishReason.STOP, None)


def test_no_stop_token_ends_a_sequence_before_min_tokens() -> None:
    assert finish_with(9, stop_token_ids=frozenset({9}), min_tokens=3) == (None, None)
    assert finish_with(9, stop_token_ids=frozenset({9}), min_tokens=2) == (FinishReason.STOP, 9)


def test_length_ends_a_sequence_and_a_stop_at_the_last_token_counts_as_one() -> None:
    assert finish_with(5, max_tokens=2) == (FinishReason.LENGTH, None)
    assert finish_with(9, max_tokens=2, stop_token_ids=frozenset({9})) == (FinishReason.STOP, 9)


def test_a_finished_sequence_gives_everything_back() -> None:
    scheduler = make_scheduler()
    sequence = add(scheduler, 1, 9, limits={"max_tokens": 1})
    step(scheduler)
    assert sequence.status is Status.FINISHED
    assert (sequence.slot, sequence.page_tables) == (None, [])
    assert (scheduler.pool.num_used, scheduler.num_running, scheduler.has_work) == (0, 0, False)


def test_finishing_from_outside_works_in_every_state() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    running, preempted, waiting = (add(scheduler, number, 5) for number in (1, 2, 3))
    step(scheduler)
    assert scheduler.finish([1], FinishReason.STOP) == [running]
    assert running.finish_reason is FinishReason.STOP
    preempt_all(scheduler)
    scheduler.reset_prefix_cache()
    assert scheduler.abort([3, 2]) == [waiting, preempted]
    assert preempted.finish_reason is FinishReason.ABORT
    assert not scheduler.has_work
    assert scheduler.pool.num_used == 0


def test_a_failed_step_ends_all_and_its_pages_are_not_trusted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    sequences = [add(scheduler, 1, 9), add(scheduler, 2, 9)]
    plan = schedule(scheduler)
    assert scheduler.fail_all() == sequences
    assert {sequence.finish_reason for sequence in sequences} == {FinishReason.ERROR}
    assert scheduler.pool.num_free == 64
    assert read(scheduler, plan) == []


# Limits and numbers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be between 1 and .* got 0"),
        ({"max_num_seqs": 17}, r"max_num_batched_tokens \(16\).* got 17"),
        ({"enable_chunked_prefill": False}, r"\(16\) must be at least max_model_len \(64\)"),
        ({"policy": "lottery"}, "one of fcfs, priority, lanes, got 'lottery'"),
        ({"max_model_len": 257}, "257 takes 65 pages of 4 tokens, and the pool has 64"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scheduler(**changes)


@pytest.mark.parametrize(("prompt_length", "max_tokens"), [(0, 8), (57, 8), (64, 1)])
def test_sequences_that_could_not_end_are_refused(prompt_length: int, max_tokens: int) -> None:
    scheduler = make_scheduler(max_model_len=64)
    message = rf"\(64\); got {prompt_length} prompt tokens and max_tokens {max_tokens}"
    with pytest.raises(ValueError, match=message):
        add(scheduler, 1, prompt_length, limits={"max_tokens": max_tokens})
    assert not scheduler.has_work


def test_usage_and_waste_are_counted_in_token_places() -> None:
    scheduler = make_scheduler(num_pages=20, page_size=4)
    assert (scheduler.kv_usage, scheduler.kv_waste) == (0.0, 0.0)
    add(scheduler, 1, 5)
    add(scheduler, 2, 8)
    step(scheduler)
    assert scheduler.kv_usage == 4 / 20
    assert scheduler.kv_waste == 3 / 16
    step(scheduler)
    assert scheduler.kv_usage == 5 / 20
    assert scheduler.kv_waste == (2 + 3) / 20
