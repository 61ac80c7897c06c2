"""The command line: `paged serve`, `generate`, `chat`, `bench`, `plan`, `doctor`, `convert`, ...

Arguments are parsed before JAX or transformers are imported, so that help and mistakes are instant.
"""

from __future__ import annotations

import argparse
import difflib
import errno
import io
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import paged
from paged.http.arguments import HelpAction, group_names, json_flags, whole_json, with_dashes
from paged.http.config_file import (
    CONFIG_FLAG,
    MODELS,
    check_models,
    check_shared,
    flags_of,
    read_config,
)
from paged.http.options import (
    ALWAYS_ON,
    ConvertOptions,
    DoctorOptions,
    HashKeyOptions,
    ModelOptions,
    SamplingOptions,
    ServeOptions,
)
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.flags import add_flags
from paged.runtime.hints import flag_hint

_FLAG = re.compile(r"--[a-z][\w-]*")


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, a suggestion for an unknown flag, and values from a file.

    Attributes:
        takes_models: whether the file may list models.
    """

    takes_models = False

    def __init__(self, *, add_help: bool = True, **how: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, **how)
        if add_help:
            self.add_argument("-h", "--help", action=HelpAction)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = self._whole(args or ())
        values = read_config(args) if CONFIG_FLAG in self.format_help() else {}
        lists = self.takes_models and MODELS in values
        models = values.pop(MODELS) if lists else None
        if values:
            # What the namespace holds already is overridden by the command line.
            namespace, unknown = super().parse_known_args(self._whole(flags_of(values)), namespace)
            # A file holds flags alone, but one with a space in it reads as an argument.
            self._refuse([*unknown, *filter(None, [namespace.model_argument])])
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        if lists:
            namespace.models = self._models(namespace, models, [*flags_of(values), *args])
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def format_help(self) -> str:
        names = group_names(self)
        about = f"\n--help=GROUP shows one of {', '.join(names)}.\n" if len(names) > 1 else ""
        return super().format_help() + about

    def _whole(self, args: Sequence[str]) -> list[str]:
        try:
            return whole_json(args, json_flags(self._actions))
        except argparse.ArgumentTypeError as error:
            self.error(str(error))

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            self.error(f"unknown {_explained(unknown[0], _FLAG.findall(self.format_help()))}")

    def _models(
        self, shared: argparse.Namespace, models: Any, given: Sequence[str]
    ) -> list[argparse.Namespace]:
        """The arguments of each model in a list: what is shared, and over it what is its own."""
        entries = check_models(models)
        own = [*given, *(["--model"] if shared.model_argument is not None else [])]
        check_shared(own, len(entries))
        parsed = []
        for number, entry in enumerate(entries):
            parser = type(self)(prog=f"paged serve: {MODELS}[{number}]", add_help=False)
            _add_model_flags(parser)
            # None where the entry does not say it: each of several models must.
            values = vars(shared) | {"gpu_memory_utilization": None}
            parsed.append(parser.parse_args(flags_of(entry), argparse.Namespace(**values)))
        return parsed


class _Reader(_Parser):
    """The same for arguments that come from a program: a mistake is an error that it may catch."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _explained(argument: str, known: Sequence[str]) -> str:
    """An argument that is not known, with what may have been meant."""
    if not argument.startswith("-"):
        return f"argument {argument!r}"
    name = argument.partition("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    hint = flag_hint(name) or (f"did you mean {close[0]}?" if close else None)
    return f"flag {name}" + (f": {hint}" if hint else "")


@dataclass(frozen=True)
class _Command:
    """A word after `paged`; `run` is "module:function", imported when it is wanted."""

    help: str
    run: str
    add_arguments: Callable[[argparse.ArgumentParser], None]


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """The model, as an argument or a flag, and every other field of `EngineConfig`."""
    parser.usage = "%(prog)s [MODEL] [flags]"
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="Same as --model.")
    parser.add_argument(CONFIG_FLAG, metavar="FILE", help="YAML file with more flags.")
    add_flags(parser, EngineConfig, "model")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, _Parser)
    parser.takes_models = True
    parser.set_defaults(models=[])
    add_flags(parser, ServeOptions, "server")
    add_flags(parser, ModelOptions, "answers")
    _add_flags_without_effect(parser)
    add_engine_flags(parser)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, DoctorOptions, "doctor")
    add_engine_flags(parser)
    _add_door_flags(parser)


def _add_flags_without_effect(parser: argparse.ArgumentParser) -> None:
    for flag in ("--disable-log-requests", *ALWAYS_ON):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What may be said of one model among several."""
    add_flags(parser, ModelOptions, "answers")
    add_flags(parser, EngineConfig, "model")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", nargs="+", metavar="TEXT", help="Texts to continue; default standard input."
    )
    add_flags(parser, SamplingOptions, "sampling")
    add_engine_flags(parser)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="What the model is told first.")
    add_flags(parser, SamplingOptions, "sampling")
    add_engine_flags(parser)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from paged.runtime.bench.arguments import add_arguments

    add_arguments(parser, add_engine_flags)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    from paged.runtime.planning.options import PlanOptions

    add_flags(parser, PlanOptions, "plan")
    add_engine_flags(parser)
    _add_door_flags(parser)


def _add_door_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `paged serve` that say nothing about the engine: a command line of it is taken
    as it is, with another word in front."""
    doors = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_flags(doors, ServeOptions, "server")
    add_flags(doors, ModelOptions, "model")
    _add_flags_without_effect(doors)
    for action in doors._actions:
        action.help = argparse.SUPPRESS
        parser._add_action(action)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    from paged.runtime.simulation import options

    parser.usage = "%(prog)s [flags]"
    add_flags(parser, options.FleetOptions, "fleet")
    add_flags(parser, options.EngineOptions, "engine")
    add_flags(parser, options.TraceOptions, "trace")
    add_flags(parser, options.ScalingOptions, "scaling")
    add_flags(parser, options.OutputOptions, "output")


def _add_tune(parser: argparse.ArgumentParser) -> None:
    from paged.runtime.tune.options import TuneOptions

    add_flags(parser, TuneOptions, "tuning")
    add_engine_flags(parser)


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Folder, GGUF file or hub id of the model.")
    parser.add_argument("out", metavar="OUT", help="Folder to make; `paged serve OUT` serves it.")
    add_flags(parser, ConvertOptions, "conversion")


def _add_hash_key(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, HashKeyOptions, "key")


_COMMANDS = {
    "serve": _Command("serve a model over the OpenAI API", "paged.http.serve:run", _add_serve),
    "generate": _Command("continue prompts", "paged.http.terminal:generate", _add_generate),
    "chat": _Command("talk to a model", "paged.http.terminal:chat", _add_chat),
    "bench": _Command("measure speed", "paged.runtime.bench.arguments:run", _add_bench),
    "plan": _Command(
        "tell what fits a GPU, and how fast it is", "paged.runtime.planning.command:run", _add_plan
    ),
    "doctor": _Command(
        "tell what keeps a model from being served here", "paged.http.doctor:run", _add_doctor
    ),
    "simulate": _Command(
        "plan a fleet without a device", "paged.runtime.simulation.command:run", _add_simulate
    ),
    "tune": _Command("find the flags for a workload", "paged.runtime.tune.command:run", _add_tune),
    "hash-key": _Command(
        "make an entry of --api-keys-file", "paged.http.keys:hash_key", _add_hash_key
    ),
    "convert": _Command("make a model load faster", "paged.http.convert:run", _add_convert),
}


def parsers() -> Iterator[argparse.ArgumentParser]:
    """What reads each command, and each kind of those that have several."""
    for name, command in _COMMANDS.items():
        parser = _Parser(prog=f"paged {name}")
        command.add_arguments(parser)
        kinds = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
        yield from [kind for each in kinds for kind in each.choices.values()] or [parser]


# What others call them.
_OTHER_COMMANDS = {"collect-env": "doctor", "complete": "generate", "profile": "bench profile"}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command that `argv` begins with; exits with a line for a mistake."""
    argv = [with_dashes(arg) for arg in argv] or ["--help"]
    parser = _Parser(
        prog="paged",
        description="LLM inference and serving over a paged KV cache.",
        epilog="`paged COMMAND --help` tells all about a command.",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show what commands there are.")
    parser.add_argument("--version", action="version", version=f"paged {paged.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if argv[:1] == [name]:
            command.add_arguments(subparser)
    if meant := _OTHER_COMMANDS.get(argv[0]):
        parser.error(f"unknown command {argv[0]}: did you mean paged {meant}?")
    args = parser.parse_args(argv)
    if "model_argument" in args:
        args.model = _only_model(args, argv)
    return args


def parse_serve(flags: Sequence[str], *more: type[Any]) -> argparse.Namespace:
    """The arguments that `paged serve` reads from these flags. Raises ConfigError for a mistake.

    Args:
        more: dataclasses whose fields are flags, too.
    """
    parser = _Reader(prog="paged serve", add_help=False)
    _add_serve(parser)
    for config in more:
        add_flags(parser, config, "more")
    args = parser.parse_args(flags)
    args.model = _only_model(args, flags)
    return args


def _only_model(args: argparse.Namespace, argv: Sequence[str]) -> str | None:
    named = [arg for arg in argv if arg == "--model" or arg.startswith("--model=")]
    if len(named) + (args.model_argument is not None) > 1:
        raise ConfigError(
            "The command line names one model; a --config file may list several under `models`"
        )
    model: str | None = args.model if args.model_argument is None else args.model_argument
    if model and " " in model and args.command == "generate" and not Path(model).exists():
        raise ConfigError(f"{model!r} stands where a model may: put a text behind --prompt")
    return model


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for what the caller can put right."""
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # at Python's exit nobody could say what is wrong
    except BrokenPipeError:  # whoever read the output has seen enough, as `head` does
        status = 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        sys.stderr.write(f"paged: error: {error}: make room on the disk, or write elsewhere\n")
        status = 2
    sys.stdout = io.StringIO()  # what is left in the other would fail again
    return status


def _run(argv: Sequence[str] | None) -> int:
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        module, _, function = _COMMANDS[args.command].run.partition(":")
        status: int = getattr(import_module(module), function)(args)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        # What Paged raises itself is written for its user; the rest is a bug and shows where.
        if not type(error).__module__.startswith("paged."):
            raise
        sys.stderr.write(f"paged: error: {error}\n")
        return 1 if isinstance(error, EngineDead) else 2
    return status
