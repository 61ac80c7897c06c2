"""When requests are sent."""

from __future__ import annotations

import asyncio

from paged.runtime.bench.load import send_all
from paged.runtime.bench.metrics import RequestRecord
from paged.runtime.bench.workloads import BenchRequest


def test_requests_are_sent_in_the_order_of_their_times_and_told_in_their_own() -> None:
    requests = [BenchRequest([1] * size, size, 1) for size in (1, 2, 3, 4)]
    sent: list[int] = []

    async def send(request: BenchRequest) -> RequestRecord:
        sent.append(request.num_input_tokens)
        return RequestRecord(start=0.0, num_input_tokens=request.num_input_tokens)

    times = [0.02, 0.0, 0.0, 0.01]
    load = send_all(requests, times, send, max_concurrency=None, on_done=lambda: None)
    summary = asyncio.run(load)
    assert sent == [2, 3, 4, 1]
    assert [record.num_input_tokens for record in summary.records] == [1, 2, 3, 4]
