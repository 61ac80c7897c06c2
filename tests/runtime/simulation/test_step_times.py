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
from paged.runtime.simulation.step_times import MeasuredStep, StepClock, StepTimes, fit

TRUE = StepTimes(tokens=(1, 64, 512), dense=(4.0, 5.0, 12.0), context=3e-5, pairs=2e-6)


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
    assert TRUE.of(0) == 4.0


def test_a_fit_finds_what_made_the_steps() -> None:
    found = fit(steps_of(TRUE, noise=0.0), knots=(1, 64, 512))
    assert found.tokens == TRUE.tokens
    np.testing.assert_allclose(found.dense, TRUE.dense)
    np.testing.assert_allclose((found.context, found.pairs), (3e-5, 2e-6))


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
    times = StepTimes(tokens=(0, 100), dense=(5.0, 15.0), context=0.5, pairs=0.25)
    clock = StepClock(Buckets(decode=(4,), mixed=(4, 16), sampling=(4,)), times)
    sequence = Sequence(0, [1] * 9, SequenceLimits(max_tokens=4))
    row = Row(sequence, 0, 8, 1, samples=True)
    assert 1e3 * clock.seconds(StepPlan((row,) * 3, (), (), ())) == pytest.approx(5.4 + 12)
    assert clock.padding == pytest.approx(0.1)
    chunk = Row(sequence, 0, 2, 6, samples=True)
    assert 1e3 * clock.seconds(StepPlan((row, chunk), (), (), ())) == pytest.approx(6.6 + 4 + 7.5)
    assert clock.padding == pytest.approx(0.1 + 0.9)
    assert clock.used == {(4, True), (16, False)}
