"""What a JSON schema asks for beyond what the library that follows grammars makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "default", "enum", "examples")

# The library lets every year have a 29th of February, and a year 0, which calendars do not know.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_REAL_DATE = {"pattern": f"^({_YEAR}-(0[13-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"}


def with_real_dates(schema: Any) -> Any:
    """The schema, allowing under the formats "date" and "date-time" days that there are."""
    return _each_object(schema, _with_real_date)


def without_others(schema: Any) -> Any:
    """The schema, allowing no properties beside those it lists, unless it says so itself."""
    return _each_object(schema, _without_others)


def _with_real_date(schema: Schema) -> Schema:
    if schema.get("format") not in ("date", "date-time"):
        return schema
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*(others if isinstance(others, list) else ()), _REAL_DATE]}


def _without_others(schema: Schema) -> Schema:
    lists = "properties" in schema or "patternProperties" in schema
    return {"additionalProperties": False, **schema} if lists else schema


def _each_object(schema: Any, change: Callable[[Schema], Schema]) -> Any:
    """The schema with a change made to each schema in it, from the innermost on."""
    if isinstance(schema, list):
        return [_each_object(each, change) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {keyword: _within(keyword, value, change) for keyword, value in schema.items()}
    return change(inner)


def _within(keyword: str, value: Any, change: Callable[[Schema], Schema]) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: _each_object(each, change) for name, each in value.items()}
    return _each_object(value, change)
