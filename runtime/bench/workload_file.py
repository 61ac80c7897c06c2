"""Workloads as files: JSON lines of one request each, which may say when it comes.

    {"prompt": "Why is the sky blue?", "output_tokens": 64, "arrival": 0.25, "kind": "short"}
    {"prompt": [7, 8, 9], "output_tokens": 3}
    {"input_tokens": 300, "output_tokens": 128, "arrival": 1.5, "priority": 1}

`prompt` is text or token ids. Where only a length is known, `input_tokens` stands in its place, and
random ids are drawn, seeded. `arrival` is in seconds after the start (0 if absent), `kind` groups
requests in reports, a lower `priority` goes first under the policies that know any.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from paged.runtime.bench.datasets import Encode, enough, records
from paged.runtime.bench.options import MOST
from paged.runtime.bench.workloads import BenchRequest, IdRange
from paged.runtime.errors import ConfigError


def read_workload(
    path: Path,
    num_requests: int | None = None,
    *,
    encode: Encode | None = None,
    ids: IdRange | None = None,
    seed: int = 0,
    output_len: int | None = None,
) -> list[BenchRequest]:
    """The requests of a file, in the order of its lines.

    Args:
        num_requests: only the first ones; None for all.
        encode: counts the tokens of texts; without it a text counts 0 until it has run.
        ids: from which prompts are drawn that are lengths alone.
        output_len: tokens to generate instead of output_tokens, or where a line has none.

    Raises:
        ConfigError: a line that is no request, or too few lines.
    """
    rng, ids = np.random.default_rng(seed), ids or IdRange()
    requests = []
    for number, record in enumerate(islice(records(path), num_requests), 1):
        where = f"{path}: request {number}"
        prompt = _prompt(record, rng, ids, where)
        if isinstance(prompt, str):
            num_input = len(encode(prompt)) if encode else 0
        else:
            num_input = len(prompt)
        num_output = _num_output(record, output_len, where)
        more = _when_and_what(record, where)
        requests.append(BenchRequest(prompt, num_input, num_output, **more))
    return enough(requests, num_requests or 1, path)


def write_workload(path: Path, requests: Iterable[BenchRequest]) -> None:
    """Write requests so that `read_workload` gives them back."""
    lines = []
    for each in requests:
        line: dict[str, Any] = {"prompt": each.prompt, "output_tokens": each.num_output_tokens}
        line |= {"arrival": each.arrival} if each.arrival else {}
        line |= {"kind": each.kind} if each.kind else {}
        line |= {"priority": each.priority} if each.priority else {}
        lines.append(json.dumps(line) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def read_log(
    path: Path, num_requests: int | None = None, *, ids: IdRange, seed: int
) -> list[BenchRequest]:
    """The requests that a server's log tells of: when they came, and how long they were.

    That is a log of `paged serve --enable-log-requests --log-format json`. What the prompts were it
    does not say: random ids are drawn, of which as many are shared as were cached.

    Raises:
        ConfigError: it tells of too few requests.
    """
    rng = np.random.default_rng(seed)
    lines = [each for each in _log_lines(path) if _is_request(each)]
    if not lines:
        raise ConfigError(
            f"{path} tells of no request: start the server with --enable-log-requests and "
            "--log-format json"
        )
    arrivals = [_came(each) for each in lines]
    order = sorted(range(len(lines)), key=arrivals.__getitem__)
    longest = max(each["cached_tokens"] for each in lines)
    shared, first = ids.draw(rng, longest), arrivals[order[0]]
    requests = [
        _logged(lines[number], arrivals[number] - first, shared, rng, ids)
        for number in order[:num_requests]
    ]
    return enough(requests, num_requests or 1, path)


def _prompt(
    record: dict[str, Any], rng: np.random.Generator, ids: IdRange, where: str
) -> str | list[int]:
    prompt, num_input = record.get("prompt"), record.get("input_tokens")
    if prompt and (_is_text(prompt) or _are_ids(prompt)):
        return prompt
    if prompt is None and type(num_input) is int and num_input > 0:
        return ids.draw(rng, num_input)
    raise ConfigError(f'{where} needs "prompt" (text or token ids) or "input_tokens" (at least 1)')


def _is_text(value: Any) -> TypeGuard[str]:
    """Half a surrogate pair is a string in JSON, and no text."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _num_output(record: dict[str, Any], output_len: int | None, where: str) -> int:
    num_output = output_len or record.get("output_tokens")
    if type(num_output) is not int or not 1 <= num_output <= MOST:
        raise ConfigError(
            f'{where} needs "output_tokens" (from 1 to {MOST:,}, or --output-len for all), '
            f"got {num_output!r:.60}"
        )
    return num_output


def _when_and_what(record: dict[str, Any], where: str) -> dict[str, Any]:
    arrival, priority = record.get("arrival", 0.0), record.get("priority", 0)
    if not isinstance(arrival, int | float) or not 0 <= arrival < np.inf:
        raise ConfigError(f'{where} needs an "arrival" of at least 0 seconds, got {arrival!r}')
    if type(priority) is not int:
        raise ConfigError(f'{where} needs a whole number as "priority", got {priority!r}')
    kind = str(record.get("kind", ""))
    return {"arrival": float(arrival), "kind": kind, "priority": priority}


def _log_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a log that are JSON objects; libraries write others between them."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _is_request(record: dict[str, Any]) -> bool:
    """Whether a line is of a request that was answered; programs beside ours have names like it."""
    kinds: dict[str, Any] = {
        "time": str,
        "prompt_tokens": int,
        "cached_tokens": int,
        "total_ms": int | float,
    }
    generated = record.get("generated_tokens")
    is_ours = all(isinstance(record.get(name), kind) for name, kind in kinds.items())
    if not is_ours or not 0 <= record["total_ms"] < np.inf:
        return False
    is_prompt = 0 <= record["cached_tokens"] <= record["prompt_tokens"]
    is_whole = is_prompt and _is_date(record["time"])
    return is_whole and _are_ids(generated) and sum(generated) > 0


def _is_date(text: str) -> bool:
    with suppress(ValueError):
        datetime.fromisoformat(text)
        return True
    return False


def _came(record: dict[str, Any]) -> float:
    """Seconds since 1970: a line is written when its request has ended."""
    ended = datetime.fromisoformat(record["time"]).timestamp()
    return float(ended - record["total_ms"] / 1e3)


def _logged(
    record: dict[str, Any],
    arrival: float,
    shared: Sequence[int],
    rng: np.random.Generator,
    ids: IdRange,
) -> BenchRequest:
    num_prompt, num_cached = record["prompt_tokens"], record["cached_tokens"]
    prompt = [*shared[:num_cached], *ids.draw(rng, num_prompt - num_cached)]
    num_output = max(record["generated_tokens"])
    return BenchRequest(prompt, num_prompt, num_output, arrival=round(arrival, 3))
