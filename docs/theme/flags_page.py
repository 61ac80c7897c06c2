"""The page of all flags, from their declarations; `python -m docs.theme.flags_page` writes it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from paged.http.arguments import groups
from paged.http.cli import parsers
from paged.http.options import ALWAYS_ON
from paged.runtime.config import EngineConfig
from paged.runtime.hints import FLAGS, VARIABLES

PAGE = Path(__file__).parents[1] / "flags.md"
_DEFAULT = re.compile(r" \(default: (.*)\)$", re.DOTALL)
_ENGINE = {each.name for each in fields(EngineConfig)}
_ENGINE_GROUPS = {"model", *(each.metadata["begins"] for each in fields(EngineConfig))}
_EVERYWHERE = (argparse.SUPPRESS, "config")  # the first is --help
_Group = tuple[str, list[argparse.Action]]
_HEAD = """\
# Flags

Every flag of every command, as `--help` tells it. This page is written from the declarations in
the code (`python -m docs.theme.flags_page`), and a test holds it to them.

- **Dashes or underscores**: `--max-model-len` and `--max_model_len` are the same.
- **Switches** have a negation: `--no-enable-prefix-caching`.
- **Whole numbers** take suffixes: `32k` is 32,000 and `32K` is 32,768; likewise `m`, `M`, `g`,
  `G`, and `25.6k`.
- **JSON** goes in whole or key by key:
  `--default-chat-template-kwargs '{"enable_thinking": false}'` or
  `--default-chat-template-kwargs.enable_thinking false`.
- **A file**: `--config flags.yaml` holds `flag: value` lines. The command line goes before it.
- **The model** is the first argument or `--model`.
- **Parts of the help**: `--help=memory` shows one group, `--help=max-num-seqs` one flag,
  `--help=prefix` whatever mentions the word.
- **In Python** the flags of the [engine](#the-engine) are the keywords of `LLM` and `AsyncEngine`:
  `LLM("org/name", max_model_len=8192)`.

A mistake is one line that says what is known, and exit status 2.
"""


def flags_page() -> str:
    """The whole page, in Markdown."""
    known = {parser.prog: parser for parser in parsers()}
    serve = known.pop("paged serve")
    with_engine = [prog for prog, parser in known.items() if any(_groups(parser, engine=True))]
    also = ", ".join(f"`{prog}`" for prog in with_engine)
    accepted = ", ".join(f"`{flag}`" for flag in sorted((*ALWAYS_ON, "--disable-log-requests")))
    parts = [
        _HEAD,
        "## paged serve\n\nBeside the flags of the [engine](#the-engine):\n",
        _grouped(serve, engine=False),
        f"{accepted} are accepted and change nothing: what they ask for is always so.\n",
        f"## The engine\n\nFlags of `paged serve`, {also}, and keywords of `LLM`.\n",
        _grouped(serve, engine=True),
        *(_command(parser) for parser in known.values()),
        _others(),
    ]
    return "\n".join(parts)


def _groups(parser: argparse.ArgumentParser, *, engine: bool) -> Iterator[_Group]:
    """The groups of a parser that are the engine's, or the others."""
    for name, actions in groups(parser).items():
        is_engine = name in _ENGINE_GROUPS and all(each.dest in _ENGINE for each in actions)
        shown = [each for each in actions if each.option_strings and each.dest not in _EVERYWHERE]
        if shown and is_engine == engine:
            yield name, shown


def _command(parser: argparse.ArgumentParser) -> str:
    """The flags of a command that are not the engine's."""
    has_engine = any(_groups(parser, engine=True))
    named = [each for each in parser._actions if not each.option_strings]
    lines = [
        f"- `{each.metavar or each.dest}`: {_prose(each.help or '')}"
        for each in named
        if each.dest != "model_argument"
    ]
    beside = "Beside the flags of the [engine](#the-engine):" if has_engine else ""
    own = [each for _, actions in _groups(parser, engine=False) for each in actions]
    parts = [f"## {parser.prog}", "\n".join(lines), beside, _table(own)]
    return "\n\n".join(filter(None, parts)) + "\n"


def _grouped(parser: argparse.ArgumentParser, *, engine: bool) -> str:
    """Tables of the groups, each under its name."""
    tables = [
        f"### {name.capitalize()}\n\n{_table(actions)}\n"
        for name, actions in _groups(parser, engine=engine)
    ]
    return "\n".join(tables)


def _table(actions: Iterable[argparse.Action]) -> str:
    rows = [_row(action) for action in actions]
    return "\n".join(["| flag | default | meaning |", "| --- | --- | --- |", *rows])


def _row(action: argparse.Action) -> str:
    text = action.help or ""
    default = _DEFAULT.search(text)
    meaning = _prose(_DEFAULT.sub("", text).replace("%%", "%"))
    if action.choices and not isinstance(action, argparse.BooleanOptionalAction):
        meaning += f" One of {', '.join(f'`{each}`' for each in action.choices)}."
    shown = f"`{default[1]}`" if default else ""
    return f"| {_spelled(action)} | {shown} | {meaning} |"


def _spelled(action: argparse.Action) -> str:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return f"{names} `{action.metavar}`" if isinstance(action.metavar, str) else names


def _prose(text: str) -> str:
    """Help in Markdown: marks of its own are letters, and flags are code."""
    text = re.sub(r"([|*<])", r"\\\1", text)
    return re.sub(r"(?<![`\w-])(--[a-z][\w-]*)", r"`\1`", text)


def _others() -> str:
    """What flags and variables of other engines are answered with."""
    flags = "".join(f"| `{name}` | {_prose(hint)} |\n" for name, hint in FLAGS.items())
    variables = "".join(f"| `{name}` | {_prose(hint)} |\n" for name, hint in VARIABLES.items())
    return (
        "## Flags of other engines\n\nWhat `paged` answers to flags that are known elsewhere, and "
        "`LLM` to such keywords. They are refused: a flag that was ignored would be believed.\n\n"
        f"| flag | answer |\n| --- | --- |\n{flags}\n"
        "## Environment\n\n`PAGED_API_KEY`, or `VLLM_API_KEY`, is the key that requests must bring "
        "where `--api-key` names none. `HF_TOKEN` opens models behind a licence. "
        "`CUDA_VISIBLE_DEVICES` and `JAX_PLATFORMS` choose devices. For variables of other engines "
        "a server that starts says in a line each that they are not read, and what to use:\n\n"
        f"| variable | in its place |\n| --- | --- |\n{variables}"
    )


if __name__ == "__main__":
    PAGE.write_text(flags_page(), encoding="utf-8")
