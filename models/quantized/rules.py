"""Which projections of a model are quantised, and by which scheme."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paged.models.weights import Dense, Linear


class Scheme(Protocol):
    """A way to store weights, which can be told of a plain projection."""

    def describe(self, weight: Dense) -> Linear:
        """The description of a projection stored in this way, from that in full precision.

        Raises:
            ConfigError: its shape does not go with the scheme.
        """
        ...


@dataclass(frozen=True)
class Rule:
    """A scheme and the names of the projections that it is for, as regular expressions."""

    scheme: Scheme
    names: tuple[str, ...]

    def is_for(self, module: str) -> bool:
        """Whether a projection is among them."""
        return _matches(self.names, module)


@dataclass(frozen=True)
class NamesRule:
    """A scheme and the names of the projections that it is for."""

    scheme: Scheme
    names: frozenset[str]

    def is_for(self, module: str) -> bool:
        """Whether a projection is among them."""
        return module in self.names


@dataclass(frozen=True)
class Quantization:
    """How the projections of a model are stored.

    Attributes:
        name: of the method, for people.
        rules: of which the first that is for a projection counts.
        excluded: names of projections in full precision, as regular expressions.
        made_on_load: of weights in full precision. What cannot be quantised then stays; where the
            checkpoint is quantised, it is refused.
    """

    name: str
    rules: tuple[Rule | NamesRule, ...]
    excluded: tuple[str, ...] = ()
    made_on_load: bool = False

    def without(self, patterns: Iterable[str]) -> Quantization:
        """The same but for what patterns, as of files, name."""
        return replace(self, excluded=(*self.excluded, *map(from_glob, patterns)))

    def schemes(self, modules: Sequence[str]) -> list[Scheme | None]:
        """The scheme of each of the projections that are joined in one weight.

        None is for full precision, in which all stay of which one is excluded from what is made on
        load.
        """
        schemes = [self.scheme(module) for module in modules]
        mixed = self.made_on_load and len(set(schemes)) > 1
        return [None] * len(schemes) if mixed else schemes

    def scheme(self, module: str) -> Scheme | None:
        """That of one projection."""
        if _matches(self.excluded, module):
            return None
        return next((rule.scheme for rule in self.rules if rule.is_for(module)), None)


def _matches(names: Iterable[str], module: str) -> bool:
    return any(re.fullmatch(name, module) for name in names)


def from_glob(pattern: str) -> str:
    """The expression for names by a pattern as of files: "lm_head", "*.layers.0.*"."""
    return fnmatch.translate(pattern)


def from_part(name: str) -> str:
    """The expression for modules that have `name` for one or more whole parts of their path."""
    return rf"(.*\.)?{re.escape(name)}(\..*)?"


def unmatched(patterns: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Of patterns as of files, those that name none of the modules."""
    names = tuple(modules)
    return [each for each in patterns if not any(map(re.compile(from_glob(each)).match, names))]


def modules_of(weight: Dense) -> tuple[str, ...]:
    """Names of the projections that are joined in a description, one for each of its parts."""
    parts = weight.kernel.parts  # type: ignore[attr-defined]
    return tuple(part.name.removesuffix(".weight") for part in parts)
