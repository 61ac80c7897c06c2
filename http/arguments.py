"""A command line as people write it: underscores for dashes, `--flag.key value` for a flag's JSON,
`--help=WORD` for a part of the help.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from paged.runtime.flags import json_object


def with_dashes(arg: str) -> str:
    """Flags may be written with underscores; what stands behind a dot is a key of JSON."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value


def json_flags(actions: Iterable[argparse.Action]) -> set[str]:
    """The flags whose value is an object in JSON."""
    return {name for each in actions if each.type is json_object for name in each.option_strings}


def whole_json(args: Sequence[str], flags: Collection[str]) -> list[str]:
    """The same with all `--flag.key value` of a flag as one `--flag=JSON`, at the end.

    Args:
        flags: those that take JSON.

    Raises:
        ArgumentTypeError: a flag that is also given whole, two keys that exclude each other,
            or one without a name.
    """
    rest: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    waiting = iter(args)
    for arg in waiting:
        name, equals, value = arg.partition("=")
        flag, _, path = name.partition(".")
        if not path or flag not in flags:
            rest.append(arg)
        elif equals:
            _put(objects.setdefault(flag, {}), path.split("."), value, name)
        elif (text := next(waiting, "--")).startswith("--"):
            rest += [flag, text]  # no value, which the parser will say
        else:
            _put(objects.setdefault(flag, {}), path.split("."), text, name)
    for flag in objects:
        if any(arg.partition("=")[0] == flag for arg in rest):
            raise argparse.ArgumentTypeError(f"{flag} and {flag}.KEY are both given: use one")
    return rest + [f"{flag}={json.dumps(value)}" for flag, value in objects.items()]


def _put(value: dict[str, Any], path: Sequence[str], text: str, name: str) -> None:
    *parents, last = path
    if "" in path:
        raise argparse.ArgumentTypeError(f"{name} has a key without a name")
    for key in parents:
        value = value.setdefault(key, {})
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"{name} goes into what has a value already")
    if isinstance(value.get(last), dict):
        raise argparse.ArgumentTypeError(f"{name} would replace what was given for keys below it")
    value[last] = _value(text)


def _value(text: str) -> Any:
    """What JSON means by `text`, or the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


class HelpAction(argparse.Action):
    """`--help` tells everything, `--help=WORD` what there is about a group, a flag or a word."""

    def __init__(self, option_strings: Sequence[str], **how: Any) -> None:
        super().__init__(
            option_strings,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs="?",
            metavar="WORD",
            help="Show all flags, or those of a group, or one, or all that mention a word.",
        )

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        whole = values in (None, "all")
        text = parser.format_help() if whole else help_about(parser, values)
        if text is None:
            names = ", ".join(group_names(parser))
            where = f"the groups are {names}" if names else f"{option_string} alone shows all"
            parser.error(f"{option_string}={values}: no group, flag or help has that word; {where}")
        sys.stdout.write(text)
        parser.exit()


def groups(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """The groups of a parser's flags, by their names."""
    return {
        str(group.title): shown
        for group in parser._action_groups
        if (shown := [each for each in group._group_actions if _is_shown(each)])
    }


def group_names(parser: argparse.ArgumentParser) -> list[str]:
    """Those that Paged has named, and not argparse."""
    return [name for name in groups(parser) if name not in ("options", "positional arguments")]


def _is_shown(action: argparse.Action) -> bool:
    return action.help is not argparse.SUPPRESS


def help_about(parser: argparse.ArgumentParser, word: str) -> str | None:
    """The help of a group, of a flag, or of all flags that mention a word; None if none does."""
    word = word.lower()
    name = word.strip("-").replace("_", "-")
    known = groups(parser)
    actions = [each for members in known.values() for each in members]
    named = [each for each in actions if {f"-{name}", f"--{name}"} & {*each.option_strings}]
    shown = known.get(name) or named or [each for each in actions if _mentions(each, name, word)]
    if not shown:
        return None
    formatter = parser.formatter_class(prog=parser.prog)
    formatter.start_section(name)
    formatter.add_arguments(shown)
    formatter.end_section()
    return formatter.format_help()


def _mentions(action: argparse.Action, name: str, word: str) -> bool:
    return (
        any(name in spelling for spelling in action.option_strings)
        or word in (action.help or "").lower()
    )
