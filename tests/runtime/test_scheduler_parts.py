"""Pages that were left before they were full: who goes on from there copies them."""

from __future__ import annotations

import pytest

from paged.pool import NULL_PAGE, PagePool
from paged.runtime.plan import PageCopy
from paged.runtime.scheduler import Scheduler, SchedulerConfig
from paged.runtime.sequence import FinishReason
from tests.runtime.test_scheduler_pages import (
    add,
    make_scheduler,
    read,
    rows,
    schedule,
    step,
    tokens,
)


def run(scheduler: Scheduler, number: int, prompt: list[int], **fields: object) -> list[int]:
    """Add a sequence, let it sample one token, and tell what pages it had."""
    sequence = add(scheduler, number, prompt, max_tokens=1, **fields)
    plan = schedule(scheduler)
    pages = list(sequence.page_tables[0])
    read(scheduler, plan)
    return pages


def test_a_prompt_goes_on_within_a_page() -> None:
    scheduler = make_scheduler()
    pages = run(scheduler, 1, tokens(0, 7))
    second = add(scheduler, 2, [*tokens(0, 7), 50, 51])
    plan = schedule(scheduler)
    assert rows(plan) == [(2, 7, 2)]
    assert second.page_tables[0][0] == pages[0]
    assert plan.copies == (PageCopy(pages[1], second.page_tables[0][1]),)
    assert (second.num_cached, scheduler.prefix_hits) == (7, 7)
    assert scheduler.pool._references[pages[1]] == 0
    read(scheduler, plan)


def test_several_go_on_from_one_page() -> None:
    """As beams do: one token is left to each."""
    scheduler = make_scheduler()
    pages = run(scheduler, 1, tokens(0, 7))
    beams = [add(scheduler, number, [*tokens(0, 7), number], max_tokens=1) for number in (2, 3, 4)]
    plan = schedule(scheduler)
    assert rows(plan) == [(2, 7, 1), (3, 7, 1), (4, 7, 1)]
    targets = [beam.page_tables[0][1] for beam in beams]
    assert plan.copies == tuple(PageCopy(pages[1], target) for target in targets)
    assert len({pages[1], *targets}) == 4
    read(scheduler, plan)
    assert scheduler.pool.num_used == 0
    add(scheduler, 5, [*tokens(0, 7), 3, 9])
    assert rows(schedule(scheduler)) == [(5, 8, 1)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9])
def test_the_last_token_is_computed_in_any_case(length: int) -> None:
    scheduler = make_scheduler()
    run(scheduler, 1, tokens(0, length))
    add(scheduler, 2, tokens(0, length))
    start = (length - 1) // 4 * 4
    assert rows(schedule(scheduler)) == [(2, start, length - start)]


def test_the_longest_part_is_found() -> None:
    scheduler = make_scheduler()
    for number, length in enumerate((5, 6, 7)):
        run(scheduler, number, [*tokens(0, length), 90])
    add(scheduler, 4, [*tokens(0, 6), 90, 91])
    assert rows(schedule(scheduler)) == [(4, 7, 1)]
    add(scheduler, 5, [*tokens(0, 6), 80])
    assert rows(schedule(scheduler))[-1] == (5, 4, 3)


def test_a_page_is_not_taken_in_the_step_that_copies_it() -> None:
    """Where no other is left it is overwritten, and what it held computed again."""
    scheduler = make_scheduler(num_pages=8, growth_steps=0)
    [page] = run(scheduler, 1, tokens(0, 3))
    add(scheduler, 2, tokens(2, 27))
    step(scheduler)
    assert (scheduler.pool.num_available, scheduler.pool.num_cached) == (1, 1)
    third = add(scheduler, 3, [*tokens(0, 3), 9], max_tokens=1)
    plan = schedule(scheduler)
    assert rows(plan) == [(2, 27, 1), (3, 0, 4)]
    assert plan.copies == ()
    assert third.page_tables == [[page]]


def test_salts_keep_parts_apart() -> None:
    scheduler = make_scheduler()
    run(scheduler, 1, tokens(0, 3), cache_salt="a")
    for number, (salt, start) in enumerate({"": 0, "b": 0, "a": 3}.items(), start=2):
        add(scheduler, number, [*tokens(0, 3), 9], max_tokens=1, cache_salt=salt)
        assert rows(step(scheduler)) == [(number, start, 4 - start)]


def test_tokens_past_the_end_are_no_part() -> None:
    """A stop is read while steps beyond it have written tokens that nobody knows."""
    scheduler = make_scheduler()
    first = add(scheduler, 1, tokens(1, 5), max_tokens=8)
    plans = [schedule(scheduler) for _ in range(3)]
    read(scheduler, plans[0])
    assert (first.num_computed, first.num_tokens) == (7, 6)
    scheduler.finish([1], FinishReason.STOP)
    for plan in plans[1:]:
        read(scheduler, plan)
    add(scheduler, 2, [*tokens(1, 5), 7, 7, 7])
    assert rows(schedule(scheduler)) == [(2, 6, 2)]


def test_nothing_is_left_where_nothing_is_cached() -> None:
    scheduler = make_scheduler(caching=False)
    run(scheduler, 1, tokens(0, 7))
    assert scheduler.pool.num_cached == 0


def test_all_groups_go_on_from_the_same_token() -> None:
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32, windows=(None, 6)
    )
    scheduler = Scheduler(config, PagePool(65, 4))
    first = add(scheduler, 1, tokens(0, 15), max_tokens=1)
    plan = schedule(scheduler)
    whole, window = (list(table) for table in first.page_tables)
    read(scheduler, plan)
    second = add(scheduler, 2, [*tokens(0, 15), 50])
    plan = schedule(scheduler)
    assert rows(plan) == [(2, 15, 1)]
    assert plan.copies == tuple(
        PageCopy(table[3], own[3])
        for table, own in zip((whole, window), second.page_tables, strict=True)
    )
    assert second.page_tables[1][:2] == [NULL_PAGE] * 2
    assert second.page_tables[1][2] == window[2]
    read(scheduler, plan)


def test_parts_do_not_go_on_in_host_memory() -> None:
    pool = PagePool(6, 4, num_host_pages=8)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=16)
    scheduler = Scheduler(config, pool)
    run(scheduler, 1, tokens(0, 7))
    pool.release(pool.allocate(pool.num_available))
    [move] = pool.take_moves()
    assert move.to_host
    pool.check()
    add(scheduler, 3, tokens(0, 8), max_tokens=1)
    assert rows(schedule(scheduler)) == [(3, 4, 4)]
