"""`benchmarks/step_simulation.py`, and what it says of the buckets and the scheduler."""

import argparse

import numpy as np
import pytest

from benchmarks.step_simulation import Clock, StepCost, reports
from paged.runtime.buckets import Buckets
from paged.runtime.plan import Row, StepPlan
from paged.runtime.sequence import Sequence, SequenceLimits


def arguments(**changes: object) -> argparse.Namespace:
    settings = {
        "streams": "",
        "workloads": "",
        "rounds": 4,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
    }
    return argparse.Namespace(**settings | changes)


def test_a_step_takes_the_time_of_its_bucket_and_of_its_contexts() -> None:
    cost = StepCost(tokens=(0, 100), dense=(5.0, 15.0), cached=0.5)
    assert (cost.of(50), cost.of(200)) == (10.0, 30.0)
    sequence = Sequence(0, [1] * 9, SequenceLimits(max_tokens=4))
    rows = (Row(sequence, 0, 8, 1, samples=True),) * 3
    clock = Clock(Buckets(decode=(4,), mixed=(4,), sampling=(4,)), cost)
    clock.run(StepPlan(rows, (), (), ()))
    assert clock.now == pytest.approx(5.4 + 3 * 9 * 0.5)
    assert clock.padding == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("load", "most"),
    [
        ({"streams": "8,64,128,256"}, 0.03),
        ({"workloads": "B1,B4"}, 0.05),
        ({"workloads": "B4@16,B4@64,B4@128,B4@256"}, 0.065),
    ],
)
def test_little_time_goes_into_padding(load: dict[str, str], most: float) -> None:
    for report in reports(arguments(**load)):
        assert report.padding < most, report.line()


def test_every_request_is_answered_in_full() -> None:
    [report] = reports(arguments(streams="16"))
    assert (report.num_requests, report.num_outputs) == (64, 64 * 128)
    assert len(report.first) == 64
    assert len(report.gaps) == 64 * 127
    assert np.percentile(report.gaps, 50) == pytest.approx(StepCost().of(16), rel=0.05)
