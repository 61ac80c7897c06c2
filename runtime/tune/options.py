"""The flags of `paged tune`; cheap to import."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from paged.runtime.bench.options import count, goals_option, positive
from paged.runtime.flags import number, option


def share(text: str) -> float:
    """A number of at least 0 and below 1."""
    value = number(text)
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
    goodput: Sequence[tuple[str, float]] = goals_option(
        "those per second that meet all are what counts. Without goals it is output tokens.",
        also=("--slo",),
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
