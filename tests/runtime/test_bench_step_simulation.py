"""`benchmarks/step_simulation.py`, and what it says of the buckets and the scheduler."""

import argparse

import numpy as np
import pytest

from benchmarks.step_simulation import ENGINE, reports


def arguments(**changes: object) -> argparse.Namespace:
    settings = {
        "streams": "",
        "workloads": "",
        "rounds": 4,
        "max_num_seqs": 1024,
        "max_num_batched_tokens": 8192,
        "max_model_len": 8192,
        "page_size": ENGINE.page_size,
        "num_pages": ENGINE.num_pages,
    }
    return argparse.Namespace(**settings | changes)


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


@pytest.mark.parametrize("pages", [{}, {"page_size": 128, "num_pages": 65}], ids=["16", "128"])
def test_every_request_is_answered_in_full(pages: dict[str, int]) -> None:
    [report] = reports(arguments(streams="16", **pages))
    assert 0 < report.host < report.seconds
    assert (report.num_requests, report.num_outputs) == (64, 64 * 128)
    assert len(report.first) == 64
    assert len(report.gaps) == 64 * 127
    assert 1e3 * np.percentile(report.gaps, 50) == pytest.approx(
        ENGINE.step_times().of(16), rel=0.05
    )
