"""Structural tags: forms of several parts, such as free text in which calls have a schema.

They are written as in xgrammar, whose notation OpenAI-compatible servers share, and become rules in
Lark's notation. A text that is a special token, or holds one, stands for the token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Format = Mapping[str, Any]
Grammar = dict[str, Any]
"""One of the list that the library reads, in which they refer to each other by name."""

_RULE = "TEXT: /(?s:.*)/"


class TagWriter:
    """Writes the rules of one structural tag.

    Args:
        part_of: the grammar of a kind of `StructuredOutputsParams` and its text.
        special: ids of special tokens by their text.

    Attributes:
        parts: grammars that the rules refer to.
    """

    def __init__(self, part_of: Callable[[str, str], Grammar], special: Mapping[str, int]) -> None:
        self._part_of = part_of
        self._special = special
        names = sorted(map(re.escape, special), key=len, reverse=True)
        self._any_special = re.compile(f"({'|'.join(names)})") if names else None
        self._rules = [_RULE]
        self.parts: list[Grammar] = []

    def write(self, tag: Any) -> str:
        """The rules, of which the first is to be followed.

        Raises:
            ValueError: it is no structural tag, or has parts that are not known.
        """
        start = self._structural_tag(_object(tag, "the structural tag"), "structural_tag")
        return "\n".join([f"start: {start}", *self._rules])

    def _expression(self, value: Any, where: str) -> str:
        kind = _object(value, where).get("type")
        if not isinstance(kind, str) or kind not in _WRITERS:
            allowed = ", ".join(_WRITERS)
            raise ValueError(f"{where}.type must be one of {allowed}, got {kind!r:.100}")
        return _WRITERS[kind](self, value, where)

    def _structural_tag(self, format: Format, where: str) -> str:
        inner = format["format"] if "format" in format else _of_structures(format, where)
        return self._expression(inner, f"{where}.format")

    def _const_string(self, format: Format, where: str) -> str:
        return self._literal(_text(format, "value", where))

    def _any_text(self, format: Format, where: str) -> str:
        excluded = _texts(format, "excludes", where) if format.get("excludes") else []
        if not excluded:
            return "TEXT"
        words = _choice([json.dumps(word, ensure_ascii=False) for word in excluded])
        return self._rule("TEXT", f"TEXT & ~(TEXT {words} TEXT)")

    def _json_schema(self, format: Format, where: str) -> str:
        if "json_schema" not in format:
            raise ValueError(f"{where}.json_schema is required")
        return self._part("json", json.dumps(format["json_schema"]))

    def _regex(self, format: Format, where: str) -> str:
        return self._part("regex", _text(format, "pattern", where))

    def _grammar(self, format: Format, where: str) -> str:
        return self._part("grammar", _text(format, "grammar", where))

    def _sequence(self, format: Format, where: str) -> str:
        expressions = self._elements(format, where)
        for i, element in enumerate(format["elements"][:-1]):
            _check_ends(element, f"{where}.elements[{i}]")
        return " ".join(expressions)

    def _or(self, format: Format, where: str) -> str:
        return _choice(self._elements(format, where))

    def _optional(self, format: Format, where: str) -> str:
        return f"({self._content(format, where)})?"

    def _star(self, format: Format, where: str) -> str:
        return f"({self._plus(format, where)})?"

    def _plus(self, format: Format, where: str) -> str:
        expression = self._content(format, where)
        _check_ends(format["content"], f"{where}.content")
        return f"({expression})+"

    def _tag(self, format: Format, where: str) -> str:
        return self._tag_after("", format, where)

    def _triggered_tags(self, format: Format, where: str) -> str:
        """Free text in which a trigger begins a tag; the first comes at once if it must come."""
        if format.get("excludes"):
            raise ValueError(f"{where}.excludes is not supported beside triggers")
        tags = self._by_trigger(format, where)
        first = _choice([f"{self._literal(each)} {_choice(tags[each])}" for each in tags])
        later = _choice([f"{self._until(each)} {_choice(tags[each])}" for each in tags])
        later = self._rule("tags", later)
        if format.get("at_least_one"):
            return first if format.get("stop_after_first") else f"{first} {later}* TEXT"
        return f"({later} | TEXT)" if format.get("stop_after_first") else f"{later}* TEXT"

    def _by_trigger(self, format: Format, where: str) -> dict[str, list[str]]:
        """What follows each trigger that tags begin with, in the order of the triggers."""
        tags, triggers = _list(format, "tags", where), _texts(format, "triggers", where)
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(tags):
            path = f"{where}.tags[{i}]"
            begin = _text(_object(tag, path), "begin", path)
            fitting = [trigger for trigger in triggers if begin.startswith(trigger)]
            if len(fitting) != 1:
                found = f"has {len(fitting)} of the triggers at its beginning, not one"
                raise ValueError(f"{path}.begin {found}")
            by_trigger[fitting[0]].append(self._tag_after(fitting[0], tag, path))
        return {trigger: tags for trigger, tags in by_trigger.items() if tags}

    def _tags_with_separator(self, format: Format, where: str) -> str:
        paths = [f"{where}.tags[{i}]" for i in range(len(_list(format, "tags", where)))]
        tags = [
            self._tag(_object(*each), each[1]) for each in zip(format["tags"], paths, strict=True)
        ]
        tag = self._rule("tag", _choice(tags))
        separator = self._literal(_text(format, "separator", where))
        several = tag if format.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return several if format.get("at_least_one") else f"({several})?"

    def _tag_after(self, trigger: str, tag: Format, where: str) -> str:
        """A tag of which `trigger` has been written."""
        begin = self._literal(_text(tag, "begin", where).removeprefix(trigger))
        one = isinstance(tag.get("end"), str)
        ends = [tag["end"]] if one else _texts(tag, "end", where)
        inner, content = self._content(tag, where), tag["content"]
        if content["type"] == "any_text" and all(ends):
            return f"{begin} {_choice([self._until(end, inner) for end in ends])}"
        if any(ends):
            _check_ends(content, f"{where}.content")
        return f"{begin} ({inner}) {_choice([self._literal(end) for end in ends])}"

    def _elements(self, format: Format, where: str) -> list[str]:
        elements = enumerate(_list(format, "elements", where))
        return [f"({self._expression(each, f'{where}.elements[{i}]')})" for i, each in elements]

    def _content(self, format: Format, where: str) -> str:
        return self._expression(format.get("content"), f"{where}.content")

    def _literal(self, text: str) -> str:
        return " ".join(self._pieces(text)) or '""'

    def _pieces(self, text: str) -> list[str]:
        """A text, its special tokens as tokens."""
        pieces = self._any_special.split(text) if self._any_special else [text]
        return [
            f"<[{self._special[piece]}]>"
            if piece in self._special
            else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]

    def _until(self, end: str, free: str = "TEXT") -> str:
        """Free text to the first time that `end` comes, and this. A token ends text by itself."""
        first, *rest = self._pieces(end)
        if first.startswith("<["):
            return " ".join([free, first, *rest])
        return " ".join([self._rule("until", f"{free} {first}", "[lazy]"), *rest])

    def _part(self, kind: str, text: str) -> str:
        name = f"part_{len(self.parts)}"
        self.parts.append({**self._part_of(kind, text), "name": name})
        return f"@{name}"

    def _rule(self, name: str, expression: str, how: str = "") -> str:
        name = f"{name}_{len(self._rules)}"
        self._rules.append(f"{name}{how}: {expression}")
        return name


_WRITERS: Mapping[str, Callable[[TagWriter, Format, str], str]] = {
    "const_string": TagWriter._const_string,
    "any_text": TagWriter._any_text,
    "json_schema": TagWriter._json_schema,
    "regex": TagWriter._regex,
    "grammar": TagWriter._grammar,
    "sequence": TagWriter._sequence,
    "or": TagWriter._or,
    "optional": TagWriter._optional,
    "star": TagWriter._star,
    "plus": TagWriter._plus,
    "tag": TagWriter._tag,
    "triggered_tags": TagWriter._triggered_tags,
    "tags_with_separator": TagWriter._tags_with_separator,
    "structural_tag": TagWriter._structural_tag,
}
"""What writes each type."""


def _check_ends(format: Format, where: str) -> None:
    """Refuse free text in front of something that nothing tells apart from it."""
    if _is_open(format):
        raise ValueError(f"{where} is free text without an end, which nothing can follow")


def _is_open(format: Format) -> bool:
    match format["type"]:
        case "any_text":
            return True
        case "triggered_tags":
            return not (format.get("stop_after_first") and format.get("at_least_one"))
        case "structural_tag":
            return "format" not in format or _is_open(format["format"])
        case "sequence":
            return _is_open(format["elements"][-1])
        case "or":
            return any(map(_is_open, format["elements"]))
        case "optional" | "star" | "plus":
            return _is_open(format["content"])
        case "tag":
            return not format["end"] and _is_open(format["content"])
    return False


def _of_structures(tag: Format, where: str) -> Format:
    """The older form, in which every tag holds JSON."""
    if "structures" not in tag:
        raise ValueError(f'{where} must hold a "format", or "structures" and "triggers"')
    tags = []
    for i, each in enumerate(_list(tag, "structures", where)):
        path = f"{where}.structures[{i}]"
        tags.append({**_object(each, path), "content": _schema(each, path)})
    triggers = _texts(tag, "triggers", where)
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _schema(structure: Format, where: str) -> Format:
    if "schema" not in structure:
        raise ValueError(f"{where}.schema is required")
    return {"type": "json_schema", "json_schema": structure["schema"]}


def _choice(alternatives: Sequence[str]) -> str:
    return f"({' | '.join(alternatives)})"


def _object(value: Any, where: str) -> Format:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, got {value!r:.100}")
    return value


def _text(format: Format, name: str, where: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where}.{name} must be a text, got {value!r:.100}")
    return value


def _list(format: Format, name: str, where: str) -> list[Any]:
    value = format.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}.{name} must be a list that is not empty, got {value!r:.100}")
    return value


def _texts(format: Format, name: str, where: str) -> list[str]:
    value = _list(format, name, where)
    if not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"{where}.{name} must hold texts that are not empty")
    return value
