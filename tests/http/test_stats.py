"""The line in the log: while there is work, once at its end, then quiet."""

import asyncio
import logging

import msgspec
import pytest

from paged.http.stats import describe, log_stats
from tests.http.fakes import FakeEngine

IDLE = FakeEngine().stats()


def test_the_line() -> None:
    after = msgspec.structs.replace(
        IDLE, num_running=3, num_waiting=1, prompt_tokens=500, generation_tokens=25
    )
    assert describe(IDLE, after, seconds=10) == (
        "Engine 000: Avg prompt throughput: 50.0 tokens/s, "
        "Avg generation throughput: 2.5 tokens/s, Running: 3 reqs, Waiting: 1 reqs, "
        "GPU KV cache usage: 25.0%, Prefix cache hit rate: 75.0%"
    )


def test_it_is_quiet_when_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    running = msgspec.structs.replace(IDLE, num_running=1)
    stepped = msgspec.structs.replace(IDLE, num_steps=IDLE.num_steps + 1)
    snapshots = iter([IDLE, IDLE, running, running, IDLE, IDLE, stepped, stepped, stepped])
    engine = FakeEngine()
    monkeypatch.setattr(engine, "stats", lambda: next(snapshots))
    caplog.set_level(logging.INFO, "paged.http")

    async def until_out_of_snapshots() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await log_stats(engine, interval=0.001)

    asyncio.run(until_out_of_snapshots())
    states = ["Running: 1" in record.message for record in caplog.records]
    assert states == [True, True, False, False, False]
