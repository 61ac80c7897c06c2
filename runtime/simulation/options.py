"""What `paged simulate` can be told: each flag declared once, with its default and its help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paged.runtime.bench.options import ArrivalOptions, at_least_0, count, finite, goals_option
from paged.runtime.bench.options import OutputOptions as BenchOutput
from paged.runtime.bench.options import seed as seed_of
from paged.runtime.config import EngineConfig
from paged.runtime.flags import option, same_option
from paged.runtime.routing import POLICIES, Policy

RECORDED = ("file", "log")
TRACES = ("chat", "agents", "random", *RECORDED)
_MOST_REPLICAS = 100_000  # a thousand take minutes
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def counts(text: str) -> tuple[int, ...]:
    """Numbers of replicas, as 8, 1,2,4 or 1-8."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not 1 <= first <= last <= _MOST_REPLICAS:
            raise argparse.ArgumentTypeError(
                f"must be counts as 8, 1,2,4 or 1-8, of at most {_MOST_REPLICAS:,}, got {text!r}"
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def policies(text: str) -> tuple[Policy, ...]:
    """Comma-separated ways to choose a replica."""
    names = tuple(each for name in text.split(",") for each in POLICIES if each == name)
    if len(names) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"knows {', '.join(POLICIES)}, got {text!r}")
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """The replicas, and who sends them requests."""

    replicas: tuple[int, ...] = option(
        (1,),
        "How many engines: one number, or several to be simulated in turn (1,2,4 or 1-8); default "
        "1.",
        type=counts,
        metavar="COUNTS",
    )
    next_replica: bool = option(
        True, "After one number, simulate one replica more, and tell what it buys."
    )
    routing: tuple[Policy, ...] = option(
        ("prefix",),
        "How a replica is chosen: 'prefix' where the longest part of the prompt was sent before, "
        "unless that replica is overloaded; 'least_loaded'; or 'random'. Several are simulated in "
        "turn (prefix,random); default prefix.",
        type=policies,
        metavar="POLICIES",
    )
    gpus_per_replica: int = option(1, "GPUs that an engine has, for the GPU hours.", type=count)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """One replica. What is left out is as in the measured engine."""

    step_times: str = option(
        "h200-llama-3.1-8b-bf16",
        "What steps take: the name of a measured engine, or a file that `paged bench steps "
        "--output-json` wrote for yours; that needs --num-pages too.",
    )
    num_pages: int | None = option(None, "KV pages of a replica, as its start logs.", type=count)
    block_size: int | None = option(None, "Tokens per KV page.", type=count)
    max_num_seqs: int | None = option(None, "Most sequences in a step.", type=count)
    max_num_batched_tokens: int | None = option(None, "Most tokens in a step.", type=count)
    max_model_len: int | None = option(
        None, "Most tokens of a sequence; longer requests are left out, and counted.", type=count
    )
    enable_prefix_caching: bool = same_option(EngineConfig, "enable_prefix_caching")
    scheduling_policy: Literal["fcfs", "priority", "lanes"] = same_option(
        EngineConfig, "scheduling_policy"
    )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """What comes, and when."""

    trace: str = option(
        "chat",
        "'chat': conversations with the lengths that ShareGPT's have; 'agents': long shared "
        "prompts, many steps, and helpers that begin with all that was said; 'random': requests "
        "of one size, nothing shared; or a recorded trace, from a 'file' of JSON lines with "
        "arrivals or the 'log' of a server.",
        choices=TRACES,
    )
    trace_path: str | None = option(None, "File of the recorded trace.")
    seconds: float = option(
        120.0, "For how long requests come; of a recorded trace, its beginning.", type=finite
    )
    request_rate: float = option(
        5.0,
        "Requests per second to the whole fleet, on average; a recorded trace has its own.",
        type=finite,
    )
    burstiness: float = same_option(ArrivalOptions, "burstiness")
    burst_factor: float = option(
        1.0, "Rate in bursts, as a multiple of the mean; 1 for no bursts.", type=finite
    )
    burst_seconds: float = option(10.0, "How long a burst lasts.", type=finite)
    burst_every: float = option(60.0, "From one burst to the next, seconds.", type=finite)
    input_len: int = option(1024, "Prompt tokens of random requests.", type=count)
    output_len: int = option(128, "Tokens that random requests generate.", type=count)
    seed: int = option(0, "Of the trace and of random routing.", type=seed_of)


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """Replicas that come and go with the queue, as Ray Serve has them."""

    max_replicas: int | None = option(
        None, "Scale between --replicas and this many; default no scaling.", type=count
    )
    target_open_requests: float = option(
        64.0, "Requests, running or waiting, that each replica is to have.", type=finite
    )
    upscale_delay: float = option(30.0, "Seconds for which more must be wanted.", type=at_least_0)
    downscale_delay: float = option(
        600.0, "Seconds for which fewer must be wanted.", type=at_least_0
    )
    start_seconds: float = option(
        60.0, "From when a replica is wanted until it takes requests.", type=at_least_0
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What is told, and where."""

    warmup: float = option(
        0.0, "Seconds at the start whose requests do not count.", type=at_least_0
    )
    goodput: Sequence[tuple[str, float]] = goals_option("the share that meets all is told.")
    output_json: str | None = option(None, "Also write all figures to this file.")
    html: str | None = same_option(BenchOutput, "html")
    disable_tqdm: bool = same_option(BenchOutput, "disable_tqdm")
