"""The flags of `paged tune`; cheap to import."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from paged.runtime.bench.options import count, positive
from paged.runtime.flags import option

_LIMIT = re.compile(r"(?P<name>ttft|tpot|e2el)[=:](?P<number>\d+(?:\.\d+)?)(?P<unit>ms|s|)")


def limits(text: str) -> tuple[tuple[str, float], ...]:
    """Goals as `ttft=500ms,tpot=30ms`: pairs of a time's name and its limit in milliseconds."""
    found = [_LIMIT.fullmatch(each.strip()) for each in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(
            f"must be limits of ttft, tpot or e2el such as ttft=500ms,tpot=30ms, got {text!r}"
        )
    goals = {
        each["name"]: float(each["number"]) * (1000 if each["unit"] == "s" else 1)
        for each in found
        if each
    }
    return tuple(goals.items())


def share(text: str) -> float:
    """A number of at least 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 0 and below 1, got {text!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    """What is tuned for, and for how long."""

    workload: str | None = option(
        None,
        "Requests to tune for: a file of JSON lines, each with prompt (or input_tokens), "
        "output_tokens and perhaps arrival in seconds, as `paged bench` reads them.",
        metavar="FILE",
    )
    slo: tuple[tuple[str, float], ...] = option(
        (),
        "Goals of each request, as ttft=500ms,tpot=30ms or e2el=5s: what counts is the requests "
        "per second that meet all. Without goals it is output tokens per second.",
        type=limits,
        metavar="GOALS",
    )
    max_concurrency: int | None = option(
        None, "Requests in flight at most; default as they arrive.", type=count
    )
    request_rate: float | None = option(
        None, "Requests per second (Poisson), instead of the file's arrivals.", type=positive
    )
    output_dir: str = option(
        "tuning",
        "Folder for the evidence and what comes of it; a tune that was stopped goes on there.",
        metavar="FOLDER",
    )
    max_runs: int = option(
        40,
        "Try nothing more after so many runs of the workload; what was begun is ended.",
        type=count,
    )
    margin: float = option(
        0.03, "Gain below which a change is not worth a flag, as a share.", type=share
    )
    keep_precision: bool = option(
        False,
        "Leave out the last steps, a KV cache and weights of fewer bits: they change answers.",
    )
    disable_tqdm: bool = option(False, "No progress bars.")
