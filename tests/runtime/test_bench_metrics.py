"""Report arithmetic, against cases worked out by hand."""

import math

import numpy as np
import pytest

from paged.runtime.bench.load import arrival_times
from paged.runtime.bench.metrics import RequestRecord, ServeSummary, Spread
from paged.runtime.bench.options import ArrivalOptions, LoadOptions, ReportOptions
from paged.runtime.bench.report import report_json, report_lines
from paged.runtime.errors import ConfigError


def record(start: float, *chunks: float, tokens: int, inputs: int = 10) -> RequestRecord:
    return RequestRecord(
        start=start,
        num_input_tokens=inputs,
        num_output_tokens=tokens,
        chunk_times=list(chunks),
        text="x",
        counted=True,
    )


# Two that worked, on a clock that began at 100; one that was refused.
FIRST = record(100.0, 100.5, 100.75, 101.25, tokens=4)
SECOND = record(100.25, 101.0, tokens=1, inputs=20)
REFUSED = RequestRecord(start=100.25, num_input_tokens=5, error="HTTP 400: too long")
SUMMARY = ServeSummary([FIRST, SECOND, REFUSED], duration=2.0)


def test_times_of_one_request() -> None:
    assert (FIRST.ttft, FIRST.e2el) == (0.5, 1.25)
    assert FIRST.itls == [0.25, 0.5]
    assert FIRST.tpot == 0.75 / 3  # four tokens in three chunks
    assert SECOND.tpot == 0.0
    assert REFUSED.ttft == REFUSED.e2el == 0.0


def test_totals_count_only_what_worked() -> None:
    assert SUMMARY.completed == [FIRST, SECOND]
    assert SUMMARY.failures == {"HTTP 400: too long": 1}
    assert (SUMMARY.num_input_tokens, SUMMARY.num_output_tokens) == (30, 5)
    assert SUMMARY.request_throughput == 1.0
    assert SUMMARY.output_throughput == 2.5
    assert SUMMARY.total_token_throughput == 17.5


def test_peaks() -> None:
    # First second: FIRST's chunks at 0.5 and 0.75 hold 4/3 tokens each. Second one: 4/3 + 1.
    assert SUMMARY.peak_output_throughput == pytest.approx(8 / 3)
    assert SUMMARY.peak_concurrency == 2
    in_turn = ServeSummary([record(0.0, 1.0, tokens=1), record(1.0, 2.0, tokens=1)], 2.0)
    assert in_turn.peak_concurrency == 1


@pytest.mark.parametrize(
    ("goals", "met"),
    [
        ([("ttft", 500.0)], 1),
        ([("ttft", 750.0)], 2),
        ([("ttft", 750.0), ("tpot", 249.0)], 1),
        ([("e2el", 700.0)], 0),
    ],
)
def test_goodput_needs_every_goal(goals: list[tuple[str, float]], met: int) -> None:
    assert ServeSummary(SUMMARY.records, 2.0, goals).request_goodput == met / 2.0
    assert SUMMARY.request_goodput is None


def test_spread_in_milliseconds() -> None:
    spread = Spread.of([0.001, 0.002, 0.003, 0.006], (50.0, 99.0))
    assert (spread.mean, spread.median) == (3.0, 2.5)
    assert spread.std == pytest.approx(math.sqrt(3.5))
    assert spread.percentiles == {50.0: 2.5, 99.0: pytest.approx(5.91)}


def test_spread_of_each_metric() -> None:
    assert SUMMARY.spread("ttft", ()).mean == 625.0
    assert SUMMARY.spread("tpot", ()).mean == 250.0  # a single token has no time after the first
    assert SUMMARY.spread("itl", ()).mean == 375.0
    assert SUMMARY.spread("e2el", ()).mean == 1000.0


def test_nothing_worked() -> None:
    failed = ServeSummary([REFUSED], duration=1.0)
    assert failed.peak_output_throughput == failed.output_throughput == 0.0
    assert failed.peak_concurrency == 0
    assert failed.spread("ttft", (99.0,)).percentiles == {99.0: 0.0}
    assert "Failed requests:                         1         " in list(
        report_lines(failed, LoadOptions(), ReportOptions())
    )


def test_report_keeps_labels_and_order() -> None:
    load = LoadOptions(max_concurrency=4, request_rate=10.0)
    summary = ServeSummary(SUMMARY.records, 2.0, [("ttft", 600.0)])
    lines = list(report_lines(summary, load, ReportOptions(percentile_metrics=("ttft", "e2el"))))
    values = [line.rsplit(maxsplit=1) for line in lines if ":" in line]
    assert [value for value in values if "by cause" not in value[0]][:19] == [
        ["Successful requests:", "2"],
        ["Failed requests:", "1"],
        ["Maximum request concurrency:", "4"],
        ["Request rate configured (RPS):", "10.00"],
        ["Benchmark duration (s):", "2.00"],
        ["Total input tokens:", "30"],
        ["Total generated tokens:", "5"],
        ["Request throughput (req/s):", "1.00"],
        ["Request goodput (req/s):", "0.50"],
        ["Output token throughput (tok/s):", "2.50"],
        ["Peak output token throughput (tok/s):", "2.67"],
        ["Peak concurrent requests:", "2"],
        ["Total token throughput (tok/s):", "17.50"],
        ["Mean TTFT (ms):", "625.00"],
        ["Median TTFT (ms):", "625.00"],
        ["P90 TTFT (ms):", "725.00"],
        ["P95 TTFT (ms):", "737.50"],
        ["P99 TTFT (ms):", "747.50"],
        ["Mean E2EL (ms):", "1000.00"],
    ]
    assert lines[-1] == "      1 x HTTP 400: too long"


def test_the_report_tells_of_streams_in_one_piece() -> None:
    summary = ServeSummary([record(0.0, 1.0, tokens=9)], 1.0)
    assert "1 requests brought all their tokens in one chunk" in "".join(
        report_lines(summary, LoadOptions(), ReportOptions())
    )


def test_json_has_the_keys_that_scripts_read() -> None:
    about = {"backend": "openai", "endpoint_type": "openai", "model_id": "m", "tokenizer_id": "m"}
    options = ReportOptions(
        save_detailed=True, metadata=[("gpu", "one")], metric_percentiles=(50.0, 99.9)
    )
    report = report_json(SUMMARY, LoadOptions(), options, about)
    assert report["request_rate"] == "inf"
    assert report["failures_by_cause"] == {"HTTP 400: too long": 1}
    assert report["gpu"] == "one"
    assert report["ttfts"] == [0.5, 0.75, 0.0]
    assert report["start_times"] == [0.0, 0.25, 0.25]
    assert report["itls"] == [[0.25, 0.5], [], []]
    assert report["errors"] == ["", "", "HTTP 400: too long"]
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99.9")} <= set(
            report
        )


def test_no_rate_sends_everything_at_once() -> None:
    assert arrival_times(3, ArrivalOptions(), None).tolist() == [0.0, 0.0, 0.0]


def test_arrivals_are_seeded_and_keep_their_rate() -> None:
    load = ArrivalOptions(request_rate=20.0)
    times = arrival_times(1000, load, 3)
    assert times.tolist() == arrival_times(1000, load, 3).tolist()
    assert times[-1] == pytest.approx(50.0)
    assert np.all(np.diff(times) >= 0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_burstiness_shapes_the_gaps(burstiness: float) -> None:
    """A gamma's coefficient of variation is one over the root of its shape."""
    load = ArrivalOptions(request_rate=10.0, burstiness=burstiness)
    gaps = np.diff(arrival_times(20_000, load, None))
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


@pytest.mark.parametrize(("strategy", "halfway"), [("linear", 55.0), ("exponential", 31.6)])
def test_a_ramp_grows_the_rate(strategy: str, halfway: float) -> None:
    load = ArrivalOptions(ramp_up_strategy=strategy, ramp_up_start_rps=10.0, ramp_up_end_rps=100.0)
    gaps = np.diff(arrival_times(20_001, load, None))
    assert 1 / gaps[:500].mean() == pytest.approx(10.0, rel=0.2)
    assert 1 / gaps[9_500:10_500].mean() == pytest.approx(halfway, rel=0.2)
    assert 1 / gaps[-500:].mean() == pytest.approx(100.0, rel=0.2)


def test_a_ramp_needs_both_rates() -> None:
    with pytest.raises(ConfigError, match="--ramp-up-start-rps"):
        arrival_times(2, ArrivalOptions(ramp_up_strategy="linear", ramp_up_start_rps=1.0), None)


def test_the_clients_own_share_is_told() -> None:
    busy = ServeSummary(SUMMARY.records, 2.0, client_seconds=1.6)
    assert busy.client_us_per_chunk == pytest.approx(400_000)
    lines = "\n".join(report_lines(busy, LoadOptions(), ReportOptions()))
    assert "took 400000.0 us a chunk, 80% of a core: it may have held the streams up." in lines
    assert report_json(busy, LoadOptions(), ReportOptions(), {})["client_load"] == 0.8
    idle = ServeSummary(SUMMARY.records, 2.0, client_seconds=0.2)
    assert "10% of a core." in "\n".join(report_lines(idle, LoadOptions(), ReportOptions()))
