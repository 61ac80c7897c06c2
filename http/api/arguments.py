"""The arguments of a call, an object that is written as JSON in a text."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from paged.http.api.json_size import check_num_values

# Every escape, so that what follows an escaped backslash is none; whole pairs stay.
_ESCAPES = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|(?P<half>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)


def read_arguments(text: str) -> dict[str, Any]:
    """The object.

    Half a surrogate pair, which JSON can spell and no text can hold, becomes U+FFFD.

    Raises:
        TooManyValues: it holds too much.
        ValueError: no JSON object, or one with numbers that are out of every range.
    """
    check_num_values(text.encode())
    try:
        return msgspec.json.decode(_ESCAPES.sub(_whole, text), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _whole(escape: re.Match[str]) -> str:
    return r"\ufffd" if escape["half"] else escape[0]
