"""The command line: `paged serve`, `generate`, `chat`, `bench`, `convert`, `hash-key`.

Arguments are parsed before JAX or transformers are imported, so that help and mistakes are instant.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import paged
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
    HashKeyOptions,
    ModelOptions,
    SamplingOptions,
    ServeOptions,
)
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.flags import add_flags

# Flags of other engines, or of stories about them, and what to use here.
_HINTS = {
    "--batch-idle-timeout": "there is no idle timeout: every step takes whoever is waiting",
    "--batch-size": "did you mean --max-num-seqs?",
    "--collect-detailed-traces": "a span tells where a request's time went; drop it",
    "--convert": "did you mean --runner?",
    "--cudagraph-metrics": "every step is compiled ahead; see paged:step_seconds at /metrics",
    "--disable-custom-all-reduce": "XLA chooses how devices add up; see docs/tensor_parallel.md",
    "--distributed-executor-backend": "each host has one process, see --nnodes; drop it",
    "--enable-expert-parallel": "--tensor-parallel-size shares out experts whole already; drop it",
    "--enable-long-tail-optimization": "there is no such thing; see --long-prefill-token-threshold",
    "--enable-mfu-metrics": "see `paged bench profile` for where the time of a step goes; drop it",
    "--enable-lora": "there are no LoRA adapters yet",
    "--enforce-eager": "every step is compiled ahead; drop it",
    "--kv-cache-metrics": "see paged:num_cached_pages and the like at /metrics; drop it",
    "--limit-mm-per-prompt": "there are no multimodal models yet: prompts are text; drop it",
    "--lora-modules": "there are no LoRA adapters yet",
    "--max-batch-size": "did you mean --max-num-seqs?",
    "--max-batch-total-tokens": "did you mean --max-num-batched-tokens?",
    "--max-num-partial-prefills": "did you mean --max-long-partial-prefills, for the policy lanes?",
    "--max-num-queued-reqs": "did you mean --max-waiting, which counts those that wait alone?",
    "--max-num-batches": "did you mean --max-num-seqs or --max-num-batched-tokens?",
    "--models": "list them in a --config file, under `models`",
    "--num-gpu-blocks-util": "did you mean --gpu-memory-utilization?",
    "--pooler-config": "how vectors are made is read from the model's modules.json; drop it",
    "--speculative-config": "there is no speculative decoding yet; drop it",
    "--task": "did you mean --runner?",
    "--trust-remote-code": "a model's own code is never run; drop it",
}
_FLAG = re.compile(r"--[a-z][\w-]*")


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, a suggestion for an unknown flag, and values from a file.

    Attributes:
        takes_models: whether the file may list models.
    """

    takes_models = False

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = list(args or ())
        values = read_config(args) if CONFIG_FLAG in self.format_help() else {}
        lists = self.takes_models and MODELS in values
        models = values.pop(MODELS) if lists else None
        if values:
            # What the namespace holds already is overridden by the command line.
            namespace, unknown = super().parse_known_args(flags_of(values), namespace)
            # A file holds flags alone, but one with a space in it reads as an argument.
            self._refuse([*unknown, *filter(None, [namespace.model_argument])])
        namespace, unknown = super().parse_known_args(args, namespace)
        self._refuse(unknown)
        if lists:
            namespace.models = _models(namespace, models, [*flags_of(values), *args])
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _refuse(self, unknown: Sequence[str]) -> None:
        if unknown:
            self.error(f"unknown {_explained(unknown[0], _FLAG.findall(self.format_help()))}")


def _explained(argument: str, known: Sequence[str]) -> str:
    """An argument that is not known, with what may have been meant."""
    if not argument.startswith("-"):
        return f"argument {argument!r}"
    name = argument.partition("=")[0]
    close = difflib.get_close_matches(name, known, n=1)
    hint = _HINTS.get(name) or (f"did you mean {close[0]}?" if close else None)
    return f"flag {name}" + (f": {hint}" if hint else "")


def _models(
    shared: argparse.Namespace, models: Any, given: Sequence[str]
) -> list[argparse.Namespace]:
    """The arguments of each model in a list: what is shared, and over it what is its own."""
    entries = check_models(models)
    own = [*given, *(["--model"] if shared.model_argument is not None else [])]
    check_shared(own, len(entries))
    parsed = []
    for number, entry in enumerate(entries):
        parser = _Parser(prog=f"paged serve: {MODELS}[{number}]", add_help=False)
        _add_model_flags(parser)
        # None where the entry does not say it: each of several models must.
        values = vars(shared) | {"gpu_memory_utilization": None}
        parsed.append(parser.parse_args(flags_of(entry), argparse.Namespace(**values)))
    return parsed


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
    add_flags(parser, EngineConfig, "engine")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, _Parser)
    parser.takes_models = True
    parser.set_defaults(models=[])
    add_flags(parser, ServeOptions, "server")
    add_flags(parser, ModelOptions, "model")
    for flag in ("--disable-log-requests", *ALWAYS_ON):
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
    add_engine_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    """What may be said of one model among several."""
    add_flags(parser, ModelOptions, "model")
    add_flags(parser, EngineConfig, "engine")


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
    "hash-key": _Command(
        "make an entry of --api-keys-file", "paged.http.keys:hash_key", _add_hash_key
    ),
    "convert": _Command("make a model load faster", "paged.http.convert:run", _add_convert),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of the command that `argv` begins with; exits with a line for a mistake."""
    argv = [_with_dashes(arg) for arg in argv] or ["--help"]
    parser = _Parser(
        prog="paged",
        description="LLM inference and serving over a paged KV cache.",
        epilog="`paged COMMAND --help` tells all about a command.",
    )
    parser.add_argument("--version", action="version", version=f"paged {paged.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(name, help=command.help)
        if argv[:1] == [name]:
            command.add_arguments(subparser)
    args = parser.parse_args(argv)
    if "model_argument" in args:
        args.model = _only_model(args, argv)
    return args


def _with_dashes(arg: str) -> str:
    """Flags may be written with underscores."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value


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
