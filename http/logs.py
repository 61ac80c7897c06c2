"""What the command line logs: which lines, and how busy the engine is; and what it leaves out."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from paged.http.engine import AnyEngine
from paged.http.paths import STATUS_PATH
from paged.runtime.logs import LogFormat, log_to_stderr
from paged.runtime.messages import EngineStats

logger = logging.getLogger(__name__)

# What uvicorn gives for a line on an HTTP request; the path has its query.
_ACCESS = ("client", "method", "path", "http_version", "status")


def configure_logging(level: str, log_format: LogFormat = "text") -> None:
    """Log our own and the HTTP server's lines from `level` up, and others' warnings."""
    log_to_stderr(level.upper(), "paged", "uvicorn", log_format=log_format)
    access = logging.getLogger("uvicorn.access")
    access.addFilter(_is_no_poll)
    access.addFilter(_with_fields)
    # uvicorn tells of start and stop, which we do too, under a name that looks like trouble.
    logging.getLogger("uvicorn.error").addFilter(_is_no_chatter)


def _is_no_chatter(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO


def _is_no_poll(record: logging.LogRecord) -> bool:
    """Whether a line is of more than a status page that asks again, once a second."""
    args = record.args
    if not isinstance(args, tuple) or len(args) != len(_ACCESS):
        return True
    return not (str(args[2]).endswith(STATUS_PATH) and args[4] == HTTPStatus.OK)


def _with_fields(record: logging.LogRecord) -> bool:
    """Give a line on an HTTP request its parts, for logs in JSON."""
    if isinstance(record.args, tuple) and len(record.args) == len(_ACCESS):
        record.fields = dict(zip(_ACCESS, record.args, strict=True))
    return True


def leave_out(paths: str) -> None:
    """Log no HTTP request for these paths, given as /health,/metrics."""
    quiet = frozenset(path.strip() for path in paths.split(","))

    def wanted(record: logging.LogRecord) -> bool:
        args = record.args
        path = str(args[2]) if isinstance(args, tuple) and len(args) > 2 else ""
        return path.partition("?")[0] not in quiet

    logging.getLogger("uvicorn.access").addFilter(wanted)


async def log_stats(engine: AnyEngine, name: str = "000", interval: float = 10.0) -> None:
    """Log a line on an engine every `interval` seconds, as people know it from vLLM, for ever.

    It is there while requests run, and once more when the last has ended.
    """
    before, was_busy = engine.stats(), False
    while True:
        await asyncio.sleep(interval)
        after = engine.stats()
        busy = after.num_running + after.num_waiting > 0 or after.num_steps > before.num_steps
        if busy or was_busy:
            logger.info("Engine %s: %s", name, describe(before, after, interval))
        before, was_busy = after, busy


def describe(before: EngineStats, after: EngineStats, seconds: float) -> str:
    """What happened between two snapshots; the hit rate is that since the start."""
    prompt = (after.prompt_tokens - before.prompt_tokens) / seconds
    generation = (after.generation_tokens - before.generation_tokens) / seconds
    hit_rate = after.prefix_cache_hits / max(after.prefix_cache_queries, 1)
    return (
        f"Avg prompt throughput: {prompt:.1f} tokens/s, "
        f"Avg generation throughput: {generation:.1f} tokens/s, "
        f"Running: {after.num_running} reqs, Waiting: {after.num_waiting} reqs, "
        f"GPU KV cache usage: {after.kv_cache_usage:.1%}, "
        f"Prefix cache hit rate: {hit_rate:.1%}"
    )
