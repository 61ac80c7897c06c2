"""Step times: what is fitted is what was measured, and padding is counted."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged.runtime.buckets import Buckets
from paged.runtime.errors import ConfigError
from paged.runtime.plan import Row, StepPlan
from paged.runtime.sequence import Sequence, SequenceLimits
from paged.runtime.simulation.measured import MEASURED
from paged.runtime.simulation.shared_pages import SharedPages
from paged.runtime.simulation.step_times import MeasuredStep, StepClock, StepTimes, fit

TRUE = StepTimes(tokens=(1, 64, 512), dense=(4.0, 5.0, 12.0), context=3e-5, pairs=2e-6, again=1e-5)


def row_of(*pages: int, start: int = 8) -> Row:
    """That decodes a sequence with these pages of 4 tokens."""
    sequence = Sequence(0, [1] * 9, SequenceLimits(max_tokens=4), page_tables=[list(pages)])
    return Row(sequence, 0, start, 1, samples=True)


def plan_of(*rows: Row) -> StepPlan:
    return StepPlan(rows, (), (), ())


def steps_of(times: StepTimes, noise: float, seed: int = 0) -> list[MeasuredStep]:
    rng = np.random.default_rng(seed)
    steps = []
    for tokens in (1, 16, 64, 128, 512, 1024):
        for length in (0, 100, 1000):
            factor = 1 + noise * rng.standard_normal()
            context, pairs = float(tokens * length), 0.0
            if tokens > 64:
                context, pairs = pairs, context
            ms = times.of(tokens, context, pairs) * factor
            steps.append(MeasuredStep(tokens, context, pairs, ms))
    return steps


def test_it_is_linear_between_and_beyond_the_knots() -> None:
    assert [TRUE.of(n) for n in (1, 32.5, 64, 288, 512, 960)] == [4.0, 4.5, 5.0, 8.5, 12.0, 19.0]
    assert TRUE.of(64, context=1e5, pairs=1e6) == pytest.approx(5 + 3 + 2)
    assert TRUE.of(64, context=1e5, again=5e4) == pytest.approx(5 + 1.5 + 0.5)
    assert TRUE.of(0) == 4.0


def test_a_fit_finds_what_made_the_steps() -> None:
    found = fit(steps_of(TRUE, noise=0.0), knots=(1, 64, 512))
    assert found.tokens == TRUE.tokens
    np.testing.assert_allclose(found.dense, TRUE.dense)
    np.testing.assert_allclose((found.context, found.pairs), (3e-5, 2e-6))
    assert found.again == found.context, "nothing was shared"


def test_a_fit_finds_what_sharing_saves() -> None:
    shared = [
        MeasuredStep(64, 64_000.0, 0.0, TRUE.of(64, 64_000.0, again=part), part)
        for part in (30_000.0, 60_000.0)
    ]
    steps = [*steps_of(TRUE, noise=0.0), *shared]
    found = fit(steps, knots=(1, 64, 512))
    np.testing.assert_allclose((found.context, found.again), (3e-5, 1e-5))
    np.testing.assert_allclose(found.errors(steps), 0, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.3))
def test_no_step_is_quicker_for_having_more_to_do(seed: int, noise: float) -> None:
    found = fit(steps_of(TRUE, noise, seed))
    assert found.context >= 0 and found.pairs >= 0  # noqa: PT018
    assert list(found.dense) == sorted(found.dense)
    assert min(found.dense) >= 0


def test_steps_that_were_held_up_count() -> None:
    """One in ten takes ten times as long, as on a machine that does other things too."""
    rng = np.random.default_rng(0)
    steps = [
        step._replace(milliseconds=step.milliseconds * (10 if rng.random() < 0.1 else 1))
        for step in steps_of(TRUE, noise=0.0) * 200
    ]
    found = fit(steps, knots=(1, 64, 512))
    expected = sum(found.of(*step[:3]) for step in steps)
    assert expected == pytest.approx(sum(step.milliseconds for step in steps), rel=0.03)


def test_steps_of_one_size_tell_too_little() -> None:
    with pytest.raises(ConfigError, match="about 8 tokens: measure more sizes"):
        fit([MeasuredStep(8, 0, 0, 1.0), MeasuredStep(9, 0, 0, 1.0)], knots=(8,))
    with pytest.raises(ConfigError, match="about 0 tokens"):
        fit([])


@pytest.mark.parametrize("name", MEASURED)
def test_what_ships_is_near_to_what_was_measured(name: str) -> None:
    engine = MEASURED[name]
    assert np.abs(engine.step_times().errors(engine.steps)).max() < 0.06


def test_a_step_takes_the_time_of_its_bucket_and_of_its_contexts() -> None:
    times = StepTimes(tokens=(0, 100), dense=(5.0, 15.0), context=0.5, pairs=0.25, again=0.1)
    clock = StepClock(Buckets(decode=(4,), mixed=(4, 16), sampling=(4,)), times, page_size=4)
    rows = [row_of(page, page + 10) for page in (1, 2, 3)]
    assert 1e3 * clock.seconds(plan_of(*rows)) == pytest.approx(5.4 + 12)
    assert clock.padding == pytest.approx(0.1)
    chunk = Row(rows[1].sequence, 0, 2, 6, samples=True)
    assert 1e3 * clock.seconds(plan_of(rows[0], chunk)) == pytest.approx(6.6 + 4 + 7.5)
    assert clock.padding == pytest.approx(0.1 + 0.9)
    assert clock.used == {(4, True), (16, False)}


def test_pages_are_read_again_by_all_rows_but_the_first() -> None:
    shared = SharedPages(page_size=4, cached_tokens=100)
    a, b, c = row_of(1, 2, 3), row_of(1, 2, 4), row_of(1, 5, 6)
    assert shared.again(plan_of(a)) == 0
    assert shared.again(plan_of(a, b)) == 8
    assert shared.again(plan_of(a, b, c)) == 12
    assert shared.again(plan_of(b, c)) == 4
    assert shared.again(plan_of(c)) == 0
    chunk = Row(a.sequence, 0, 0, 8, samples=False)
    assert shared.again(plan_of(c, chunk)) == 0, "chunks are counted by their pairs"


def test_a_page_that_is_not_full_is_a_row_s_own() -> None:
    shared = SharedPages(page_size=4, cached_tokens=100)
    assert shared.again(plan_of(row_of(1, 2, start=7), row_of(1, 2, start=7))) == 4


def test_a_cache_holds_so_many_pages_and_no_more() -> None:
    shared = SharedPages(page_size=4, cached_tokens=4)
    assert shared.again(plan_of(row_of(1, 2), row_of(1, 2))) == 4
    alone = SharedPages(page_size=4, cached_tokens=4)
    assert alone.again(plan_of(row_of(1, 2), row_of(1, 3))) == 4


def test_rows_that_share_a_prefix_take_less_time_on_what_ships() -> None:
    """256 that share 2,048 tokens and have 64 of their own and as many to generate."""
    times = MEASURED["h200-llama-3.1-8b-bf16"].step_times()
    apart, together = (times.of(256, 256 * 2143, again=again) for again in (0, 255 * 2048))
    assert together / apart == pytest.approx(2 / 3, abs=0.03)
