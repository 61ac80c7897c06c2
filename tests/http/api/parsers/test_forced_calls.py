"""Calls that a request forces: the schema of the answer, and how it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.http.api.parsers.forced import (
    NamedParser,
    RequiredParser,
    named_schema,
    required_schema,
)
from paged.runtime.errors import InvalidRequest
from tests.http.api.parsers.answers import CLOCK, SCHEMA, TOOLS, WEATHER, calls_of, content_of, read

ANSWER = (
    '[{"name": "weather", "parameters": {"city": "Oslo", "days": 3}},\n'
    ' {"name": "clock", "parameters": {"zone": "UTC"}}]'
)


def test_a_named_function_is_its_own_schema() -> None:
    assert named_schema(SCHEMA) == SCHEMA
    assert named_schema({}) == {"type": "object"}


def test_required_is_a_list_of_any_of_the_functions() -> None:
    schema = required_schema(TOOLS)
    weather, clock = schema["items"]["anyOf"]
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert weather["properties"]["name"] == {"type": "string", "enum": ["weather"]}
    assert weather["properties"]["parameters"] == SCHEMA
    assert clock["properties"]["parameters"] == {"type": "object"}
    assert clock["required"] == ["name", "parameters"]
    assert "maxItems" not in schema
    assert required_schema(TOOLS, parallel=False)["maxItems"] == 1


def test_definitions_move_to_where_references_find_them() -> None:
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}},
        "$defs": {"Place": {"type": "string"}},
    }
    schema = required_schema({"go": parameters})
    assert schema["$defs"] == {"Place": {"type": "string"}}
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    assert required_schema({"go": parameters, "come": parameters})["$defs"] == schema["$defs"]
    other = parameters | {"$defs": {"Place": {"type": "integer"}}}
    with pytest.raises(InvalidRequest, match="define 'Place' in different ways"):
        required_schema({"go": parameters, "come": other})
    assert "$defs" not in required_schema({"go": {"$defs": "odd"}})


@given(st.lists(st.integers(0, len(ANSWER)), max_size=10).map(sorted))
def test_required_answers_are_calls(cuts: list[int]) -> None:
    edges = zip([0, *cuts], [*cuts, len(ANSWER)], strict=True)
    events = read(RequiredParser(), [ANSWER[a:b] for a, b in edges])
    assert (content_of(events), calls_of(events)) == ("", [WEATHER, CLOCK])


def test_a_required_answer_that_was_cut() -> None:
    events = read(RequiredParser(), [ANSWER[:-10]])
    assert calls_of(events) == [WEATHER]
    assert content_of(events) == '{"name": "clock", "parameters": {"zone"'
    assert content_of(read(RequiredParser(), ['[{"name": 1}]'])) == '{"name": 1}'


def test_a_named_functions_arguments_are_handed_on_as_they_come() -> None:
    parser = NamedParser("clock")
    assert len(parser.push('{"zone"')) == 2
    assert len(parser.push(': "UTC"}')) == 1
    assert calls_of(read(NamedParser("clock"), ["", '{"zone"', ': "UTC"}'])) == [CLOCK]
    assert read(NamedParser("clock"), [""]) == []
