"""`paged simulate`: fleets of engines on a clock of their own, and what they would do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path

from tqdm import tqdm

from paged.runtime.bench.publish import check_writable, write_text
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.simulation.autoscaling import Autoscaling
from paged.runtime.simulation.fleet import EngineShape, Fleet
from paged.runtime.simulation.inputs import describe, engine_of, shape_of, trace_of
from paged.runtime.simulation.options import (
    EngineOptions,
    FleetOptions,
    OutputOptions,
    ScalingOptions,
    TraceOptions,
)
from paged.runtime.simulation.page import fleet_page
from paged.runtime.simulation.report import Summary, fleet_table, summarize, what_more_buys
from paged.runtime.simulation.traces import Tree, num_turns


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; returns 0.

    Raises:
        ConfigError: what was asked for cannot be.
    """
    engine_options, trace_options = read_flags(EngineOptions, args), read_flags(TraceOptions, args)
    output = read_flags(OutputOptions, args)
    check_writable(output.output_json, output.html)
    engine = engine_of(engine_options)
    _check_scaling(read_flags(ScalingOptions, args), read_flags(FleetOptions, args).replicas)
    shape, trace = shape_of(engine, engine_options), trace_of(trace_options)
    about = describe(engine, trace, trace_options)
    _write((*about, ""))
    sys.stdout.flush()
    summaries = list(_simulate(shape, trace, args, output))
    _write(fleet_table(summaries).lines())
    _tell(summaries, about, output)
    return 0


def _simulate(
    shape: EngineShape, trace: Sequence[Tree], args: argparse.Namespace, output: OutputOptions
) -> Iterator[Summary]:
    """Each number of replicas under each routing."""
    fleet, seconds = read_flags(FleetOptions, args), read_flags(TraceOptions, args).seconds
    scaling = read_flags(ScalingOptions, args)
    sizes = fleet.replicas
    if len(sizes) == 1 and fleet.next_replica and scaling.max_replicas is None:
        sizes = (sizes[0], sizes[0] + 1)
    total = sum(num_turns(each.first) for each in trace)
    for routing, size in product(fleet.routing, sizes):
        rule = _rule(scaling, size)
        title = f"{size} replicas, {routing}"
        with tqdm(total=total, desc=title, disable=output.disable_tqdm, unit="req") as bar:
            simulated = Fleet(
                shape, size, routing, scaling=rule, seed=args.seed, on_done=bar.update
            )
            outcome = simulated.run(trace, until=seconds)
        yield summarize(
            outcome,
            size,
            routing,
            gpus=fleet.gpus_per_replica,
            warmup=output.warmup,
            goals=output.goodput,
        )


def _check_scaling(options: ScalingOptions, sizes: Sequence[int]) -> None:
    if options.max_replicas is not None and options.max_replicas < max(sizes):
        raise ConfigError(
            f"--max-replicas must be at least --replicas ({max(sizes)}), got {options.max_replicas}"
        )


def _rule(options: ScalingOptions, least: int) -> Autoscaling | None:
    if options.max_replicas is None:
        return None
    return Autoscaling(
        least=least,
        most=options.max_replicas,
        target=options.target_open_requests,
        up_delay=options.upscale_delay,
        down_delay=options.downscale_delay,
        start_seconds=options.start_seconds,
    )


def _write(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def _tell(summaries: Sequence[Summary], about: Sequence[str], output: OutputOptions) -> None:
    if bought := [*what_more_buys(summaries)]:
        _write(("", *bought))
    if output.output_json is not None:
        found = {"about": about, "runs": [each.as_json() for each in summaries]}
        write_text(Path(output.output_json), json.dumps(found, indent=2) + "\n")
    if output.html is not None:
        write_text(Path(output.html), fleet_page(summaries, about))
