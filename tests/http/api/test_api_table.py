"""docs/api.md lists what the protocol declares, no more and no less, and tests that are there."""

import json
import re
from pathlib import Path

import pytest

from paged.http.api.anthropic.protocol import MESSAGES_NEUTRAL, MessagesRequest
from paged.http.api.fields import ACCEPTED, CHAT_NEUTRAL, COMPLETION_NEUTRAL
from paged.http.api.protocol import ChatRequest, CompletionRequest
from paged.http.api.responses.protocol import RESPONSES_NEUTRAL, ResponsesRequest
from paged.http.options import ModelOptions, ServeOptions
from paged.runtime.config import EngineConfig

ROOT = Path(__file__).parents[3]
SECTIONS = {
    part.partition("\n")[0]: part for part in (ROOT / "docs/api.md").read_text().split("\n## ")
}
SHARED, COMPLETIONS, CHATS = "Completions and chat", "Completions only", "Chat only"
OTHERS = {"Responses": ResponsesRequest, "Messages": MessagesRequest}


def fields(section: str) -> list[str]:
    """First cells of the table."""
    return re.findall(r"^\| `(\w+)` \|", SECTIONS[section], re.MULTILINE)


def row(name: str, routes: str, values: tuple[object, ...]) -> str:
    shown = ", ".join(f"`{json.dumps(value)}`" for value in values)
    return f"| `{name}` | {routes} | {shown} |"


def test_no_field_is_missing_on_either_side() -> None:
    both = fields(SHARED)
    assert sorted(both + fields(COMPLETIONS)) == sorted(CompletionRequest.__struct_fields__)
    assert sorted(both + fields(CHATS)) == sorted(ChatRequest.__struct_fields__)
    for section, request in OTHERS.items():
        assert sorted(fields(section)) == sorted(request.__struct_fields__)


def test_what_is_refused() -> None:
    rows = []
    for route, neutral in (("responses", RESPONSES_NEUTRAL), ("messages", MESSAGES_NEUTRAL)):
        rows += [row(name, route, values) for name, values in neutral.items()]
    for name in {**CHAT_NEUTRAL, **COMPLETION_NEUTRAL}:
        on_chat, on_completions = name in CHAT_NEUTRAL, name in COMPLETION_NEUTRAL
        routes = "both" if on_chat and on_completions else "chat" if on_chat else "completions"
        values = CHAT_NEUTRAL.get(name, COMPLETION_NEUTRAL.get(name, ()))
        rows.append(row(name, routes, values))
    listed = [line for line in SECTIONS["Refused"].splitlines() if line.startswith("| `")]
    assert listed == sorted(rows)


def test_what_is_accepted() -> None:
    assert re.findall(r"`(\w+)`", SECTIONS["Accepted"]) == sorted(ACCEPTED)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+\.py::\w+)`", str(SECTIONS)))))
def test_the_tests_exist(name: str) -> None:
    file, _, test = name.partition("::")
    [path] = (ROOT / "tests").rglob(file)
    assert re.search(rf"^(def|class) {test}\b", path.read_text(), re.MULTILINE)


def test_every_row_names_one() -> None:
    for section in (SHARED, COMPLETIONS, CHATS, *OTHERS):
        rows = re.findall(r"^\| `\w+` \|.*$", SECTIONS[section], re.MULTILINE)
        assert all(re.search(r"`test_\w+\.py::\w+` \|$", row) for row in rows)


def test_flags_exist() -> None:
    declared = (ServeOptions, ModelOptions, EngineConfig)
    known = {name for each in declared for name in each.__dataclass_fields__}
    flags = re.findall(r"`--([a-z-]+)", str(SECTIONS))
    assert [flag for flag in flags if flag.replace("-", "_") not in known] == []
