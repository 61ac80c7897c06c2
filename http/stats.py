"""A line in the log every few seconds while there is work, as people know it from vLLM."""

from __future__ import annotations

import asyncio
import logging

from paged.http.engine import Engine
from paged.runtime.messages import EngineStats

logger = logging.getLogger(__name__)


async def log_stats(engine: Engine, interval: float = 10.0) -> None:
    """Log for ever: while requests run, and once more when the last has ended."""
    before, was_busy = engine.stats(), False
    while True:
        await asyncio.sleep(interval)
        after = engine.stats()
        busy = after.num_running + after.num_waiting > 0 or after.num_steps > before.num_steps
        if busy or was_busy:
            logger.info("%s", describe(before, after, interval))
        before, was_busy = after, busy


def describe(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """What happened between two snapshots; the hit rate is that since the start."""
    prompt = (after.prompt_tokens - before.prompt_tokens) / seconds
    generation = (after.generation_tokens - before.generation_tokens) / seconds
    hit_rate = after.prefix_cache_hits / max(after.prefix_cache_queries, 1)
    return (
        f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generation:.1f} tokens/s, "
        f"Running: {after.num_running} reqs, Waiting: {after.num_waiting} reqs, "
        f"GPU KV cache usage: {after.kv_cache_usage:.1%}, "
        f"Prefix cache hit rate: {hit_rate:.1%}"
    )
