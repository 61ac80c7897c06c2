"""Command-line flags from dataclasses: each is declared once, as a field with its help.

Engine, server and benchmarks are told what they need through such dataclasses. Importing this is
cheap: a command line must be understood before anything heavy is loaded.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, field, fields
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SUFFIXES = {"": 1, "k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
_STORED = ("awq", "awq_marlin", "compressed-tensors", "gptq", "gptq_marlin")
_FILES = ("gguf", "safetensors")
_MOST_QUOTED = 100
_MOST_DIGITS = 40  # of a number that a message may repeat
_SIZE = re.compile(r"(?P<number>-?\d+(?:\.\d+)?)(?P<suffix>[kKmMgG]?)")


def option(
    default: Any, help: str, *, also: tuple[str, ...] = (), begins: str | None = None, **how: Any
) -> Any:
    """A field of a dataclass that becomes a flag.

    Args:
        also: other spellings of the flag.
        begins: the name of a group of flags whose first this is.
        how: what `add_argument` should know beyond what the field's type says.
    """
    metadata = {"help": help, "also": also, "begins": begins, "how": how}
    return field(default=default, metadata=metadata)


def same_option(config: type[Any], name: str) -> Any:
    """A field that is declared in another dataclass, for a command that needs it too."""
    [known] = [each for each in fields(config) if each.name == name]
    return field(default=known.default, metadata={**known.metadata, "begins": None})


def add_flags(parser: argparse.ArgumentParser, config: type[Any], title: str) -> None:
    """One flag for each field, in a group of that title, or in one that begins with a field."""
    group = parser.add_argument_group(title)
    hints = get_type_hints(config)
    for each in fields(config):
        if each.metadata["begins"]:
            group = parser.add_argument_group(each.metadata["begins"])
        name = f"--{each.name.replace('_', '-')}"
        names = (name, *each.metadata["also"])
        action = group.add_argument(*names, dest=each.name, **_how(each, hints[each.name]))
        action.help = _help(each)


def choices_of(hint: Any) -> tuple[Any, ...]:
    """The values that a field's type lists, None among them where it may be left out."""
    others = (None,) if NoneType in get_args(hint) else ()
    kind = _without_none(hint)
    return (*get_args(kind), *others) if get_origin(kind) is Literal else ()


def keywords(each: Field[Any]) -> tuple[str, ...]:
    """The names of a field in Python: its own, and its flag's other spellings."""
    others = (spelling.lstrip("-").replace("-", "_") for spelling in each.metadata["also"])
    return each.name, *others


def read_flags[T](config: type[T], args: argparse.Namespace) -> T:
    """The dataclass that parsed flags describe."""
    values = {each.name: getattr(args, each.name) for each in fields(config)}  # type: ignore[arg-type]
    return config(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def size(text: str) -> int:
    """A whole number, perhaps with a suffix: 1k is 1,000 and 1K is 1,024; likewise m, M, g, G."""
    match = _SIZE.fullmatch(text) if len(text) <= _MOST_DIGITS else None
    value = Decimal(match["number"]) * _SUFFIXES[match["suffix"]] if match else Decimal("NaN")
    if value != value.to_integral_value():
        raise argparse.ArgumentTypeError(
            "must be a whole number in digits such as 4096, 4k (4,000) or 4K (4,096), got "
            f"{_quoted(text)}"
        )
    return int(value)


def number(text: str) -> float:
    """A finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a number such as 0.5, got {_quoted(text)}")
    return value


def size_or_auto(text: str) -> int:
    """A whole number, or -1 for "auto"."""
    return -1 if text == "auto" else size(text)


def json_object(text: str) -> dict[str, Any]:
    """An object in JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {_quoted(text)}")
    return value


def kv_cache_dtype(text: str) -> str:
    """An element type of the KV cache, which others call by other names."""
    if text == "int8_per_token_head":
        raise argparse.ArgumentTypeError(f"{text!r} is called int8 here, and means the same")
    return text


def load_format(text: str) -> str:
    """Where weights come from, which nobody needs to say of files."""
    if text in _FILES:
        raise argparse.ArgumentTypeError(f"that files are {text}, they say; drop the flag")
    return text


def quantization(text: str) -> str:
    """A way to quantize weights as they are loaded, which is not how a checkpoint is stored."""
    if text in _STORED:
        raise argparse.ArgumentTypeError(
            f"{text!r} is how checkpoints are stored, which their config.json says; drop the flag"
        )
    return text


def port(text: str) -> int:
    """A number that a port may have."""
    value = size(text)
    if not 0 <= value < 2**16:
        raise argparse.ArgumentTypeError(f"must be between 0 and 65535, got {text!r}")
    return value


def _quoted(text: str) -> str:
    """As much of what somebody typed as a message has room for."""
    return repr(text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}...")


def _help(each: Field[Any]) -> str:
    text = each.metadata["help"].replace("%", "%%")
    silent = each.default in (None, "", MISSING) or isinstance(each.default, tuple)
    return text if silent else f"{text} (default: {_as_typed(each.default)})"


def _as_typed(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _how(each: Field[Any], hint: Any) -> dict[str, Any]:
    """What `add_argument` must know of a field: what it says itself, or else what its type says."""
    how: dict[str, Any] = {"default": each.default, **each.metadata["how"]}
    kind = _without_none(hint)
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)} | how
    if "type" in how or "choices" in how:
        return how
    if kind is bool:
        return how | {"action": argparse.BooleanOptionalAction}
    how = {"metavar": each.name.rpartition("_")[2].upper()} | how
    if get_origin(kind) is tuple:
        return how | {"nargs": "+"}
    readers: dict[type, Callable[[str], Any]] = {int: size, float: number, str: str}
    return how | {"type": readers[kind]}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):  # of a Literal it is the one, of a class the other
        [hint] = [kind for kind in get_args(hint) if kind is not NoneType]
    return hint
