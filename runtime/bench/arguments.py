"""`paged bench COMMAND` on the command line; cheap to import."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
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

AddFlags = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class _Command:
    """A word after `paged bench`.

    Attributes:
        run: "module:function" in this package, imported when it is wanted.
        groups: dataclasses of flags, by the title of their group.
        has_engine: whether it starts an engine, and takes its flags.
        defaults: of flags, where they are others than usual.
    """

    help: str
    run: str
    groups: Mapping[str, type[Any]]
    has_engine: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)


_COMMANDS = {
    "throughput": _Command(
        "tokens per second, offline, everything submitted at once",
        "throughput:run_throughput",
        {"workload": WorkloadOptions, "run": ThroughputOptions},
        defaults={"seed": None},
    ),
    "latency": _Command(
        "seconds that one batch takes",
        "latency:run_latency",
        {"run": LatencyOptions},
        # Every run sends the same prompts: with a prefix cache only the first would be prefilled.
        defaults={"enable_prefix_caching": False},
    ),
    "profile": _Command(
        "where the time of a step goes, kernel by kernel",
        "step_profile:run_profile",
        {"run": ProfileOptions},
    ),
    "steps": _Command(
        "each compiled step: its time, bytes and operations",
        "step_times:run_steps",
        {"run": StepOptions},
    ),
    "serve": _Command(
        "load on any server that speaks the OpenAI API",
        "serve:run_serve",
        {
            "server": ServerOptions,
            "workload": WorkloadOptions,
            "load": LoadOptions,
            "sampling": SamplingOptions,
            "report": ReportOptions,
        },
        has_engine=False,
    ),
    "prefix": _Command(
        "shared prefixes, without and with a prefix cache",
        "prefix:run_prefix",
        {"workload": WorkloadOptions, "run": PrefixOptions},
        defaults={"seed": None, "dataset_name": "prefix_tree", "num_prompts": 100},
    ),
    "mixed": _Command(
        "short requests alone and among long ones, under each scheduling policy",
        "mixed:run_mixed",
        {"run": MixedOptions},
    ),
}


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
    parser.add_argument(
        "--html", dest="page", metavar="FILE", help="Write the comparison as a page, too."
    )
    kinds = parser.add_subparsers(dest="bench", metavar="|".join(_COMMANDS))
    for name, command in _COMMANDS.items():
        usage = None if command.has_engine else "%(prog)s [flags]"
        subparser = kinds.add_parser(name, help=command.help, usage=usage)
        for title, options in command.groups.items():
            add_flags(subparser, options, title)
        if command.has_engine:
            add_engine_flags(subparser)
        subparser.set_defaults(**command.defaults)


def run(args: argparse.Namespace) -> int:
    """Do what the parsed arguments ask; returns the exit status.

    Raises:
        ConfigError, InvalidRequest: what was asked for cannot be.
    """
    if args.bench is not None:
        if args.compare is not None or args.page is not None:
            raise ConfigError(
                f"--compare, and --html before {args.bench}, are of `paged bench --compare A.json "
                f"B.json`: leave them out, or {args.bench}"
            )
        from paged.runtime.bench.publish import check_writable

        check_writable(args.output_json, getattr(args, "html", None))
        module, _, function = _COMMANDS[args.bench].run.partition(":")
        status: int = getattr(import_module(f"paged.runtime.bench.{module}"), function)(args)
        return status
    if args.compare is None:
        raise ConfigError(
            f"Say what to measure: `paged bench {'|'.join(_COMMANDS)}`, or `paged bench --compare "
            "A.json B.json`"
        )
    from paged.runtime.bench.compare import run_compare

    return run_compare(args.compare, args.page)
