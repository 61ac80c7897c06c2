"""What a JSON schema asks for beyond what the library that follows grammars makes of it."""

from __future__ import annotations

from typing import Any

_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "default", "enum", "examples")

# The library lets every year have a 29th of February, and a year 0, which calendars do not know.
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"([0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_REAL_DATE = f"^({_YEAR}-(0[13-9]|1|02-([01]|2[0-8]))|{_LEAP_YEAR}-02-29)"


def with_real_dates(schema: Any) -> Any:
    """The schema, allowing under the formats "date" and "date-time" days that there are."""
    if isinstance(schema, list):
        return [with_real_dates(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {keyword: _exact(keyword, value) for keyword, value in schema.items()}
    if schema.get("format") in ("date", "date-time"):
        others = exact.get("allOf", [])
        exact["allOf"] = [*(others if isinstance(others, list) else ()), {"pattern": _REAL_DATE}]
    return exact


def _exact(keyword: str, value: Any) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: with_real_dates(each) for name, each in value.items()}
    return with_real_dates(value)
