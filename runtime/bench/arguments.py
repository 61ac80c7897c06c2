"""`paged bench COMMAND` on the command line; cheap to import."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from paged.runtime.bench.options import (
    LatencyOptions,
    LoadOptions,
    MixedOptions,
    PrefixOptions,
    ProfileOptions,
    ReportOptions,
    SamplingOptions,
    ServerOptions,
    StepOptions,
    ThroughputOptions,
    WorkloadOptions,
)
from paged.runtime.errors import ConfigError
from paged.runtime.flags import add_flags

_COMMANDS = ("throughput", "latency", "profile", "steps", "serve", "prefix", "mixed")

AddFlags = Callable[[argparse.ArgumentParser], None]


def add_arguments(parser: argparse.ArgumentParser, add_engine_flags: AddFlags) -> None:
    """Declare what there is under `paged bench`.

    Args:
        add_engine_flags: declares a flag for each field of `EngineConfig`.
    """
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A.json", "B.json"),
        help="Tell what differs between two results that --output-json wrote.",
    )
    parser.add_argument("--html", metavar="FILE", help="Write the comparison as a page, too.")
    kinds = parser.add_subparsers(dest="bench", metavar="|".join(_COMMANDS))
    _add_throughput(kinds, add_engine_flags)
    _add_latency(kinds, add_engine_flags)
    _add_profile(kinds, add_engine_flags)
    _add_steps(kinds, add_engine_flags)
    _add_serve(kinds)
    _add_prefix(kinds, add_engine_flags)
    _add_mixed(kinds, add_engine_flags)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; returns the exit status.

    Raises:
        ConfigError, InvalidRequest: what was asked for cannot be.
    """
    if args.bench is None:
        if args.compare is None:
            raise ConfigError(
                f"Say what to measure: `paged bench {'|'.join(_COMMANDS)}`, or `paged bench "
                "--compare A.json B.json`"
            )
        from paged.runtime.bench.compare import run_compare

        return run_compare(args.compare, args.html)
    return args.run_bench(args)


def _add_throughput(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser(
        "throughput", help="tokens per second, offline, everything submitted at once"
    )
    add_flags(parser, WorkloadOptions, "workload")
    add_flags(parser, ThroughputOptions, "run")
    add_engine_flags(parser)
    parser.set_defaults(run_bench=_run_throughput, seed=None)


def _add_latency(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser("latency", help="seconds that one batch takes")
    add_flags(parser, LatencyOptions, "run")
    add_engine_flags(parser)
    # Every run sends the same prompts: with a prefix cache only the first would be prefilled.
    parser.set_defaults(run_bench=_run_latency, enable_prefix_caching=False)


def _add_profile(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser("profile", help="where the time of a step goes, kernel by kernel")
    add_flags(parser, ProfileOptions, "run")
    add_engine_flags(parser)
    parser.set_defaults(run_bench=_run_profile)


def _add_steps(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser("steps", help="each compiled step: its time, bytes and operations")
    add_flags(parser, StepOptions, "run")
    add_engine_flags(parser)
    parser.set_defaults(run_bench=_run_steps)


def _add_serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve", usage="%(prog)s [flags]", help="load on any server that speaks the OpenAI API"
    )
    add_flags(parser, ServerOptions, "server")
    add_flags(parser, WorkloadOptions, "workload")
    add_flags(parser, LoadOptions, "load")
    add_flags(parser, SamplingOptions, "sampling")
    add_flags(parser, ReportOptions, "report")
    parser.set_defaults(run_bench=_run_serve)


def _add_prefix(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser("prefix", help="shared prefixes, without and with a prefix cache")
    add_flags(parser, WorkloadOptions, "workload")
    add_flags(parser, PrefixOptions, "run")
    add_engine_flags(parser)
    parser.set_defaults(
        run_bench=_run_prefix, seed=None, dataset_name="prefix_tree", num_prompts=100
    )


def _add_mixed(kinds: Any, add_engine_flags: AddFlags) -> None:
    parser = kinds.add_parser(
        "mixed", help="short requests alone and among long ones, under each scheduling policy"
    )
    add_flags(parser, MixedOptions, "run")
    add_engine_flags(parser)
    parser.set_defaults(run_bench=_run_mixed)


def _run_throughput(args: argparse.Namespace) -> int:
    from paged.runtime.bench.throughput import run_throughput

    return run_throughput(args)


def _run_latency(args: argparse.Namespace) -> int:
    from paged.runtime.bench.latency import run_latency

    return run_latency(args)


def _run_profile(args: argparse.Namespace) -> int:
    from paged.runtime.bench.step_profile import run_profile

    return run_profile(args)


def _run_steps(args: argparse.Namespace) -> int:
    from paged.runtime.bench.step_times import run_steps

    return run_steps(args)


def _run_serve(args: argparse.Namespace) -> int:
    from paged.runtime.bench.serve import run_serve

    return run_serve(args)


def _run_prefix(args: argparse.Namespace) -> int:
    from paged.runtime.bench.prefix import run_prefix

    return run_prefix(args)


def _run_mixed(args: argparse.Namespace) -> int:
    from paged.runtime.bench.mixed import run_mixed

    return run_mixed(args)
