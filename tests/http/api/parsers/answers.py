"""What models write in each format, and what it means."""

from collections.abc import Sequence
from typing import Any

import msgspec

from paged.http.api.parsers.events import (
    Arguments,
    CallStart,
    Content,
    Event,
    Parser,
    Reasoning,
    Tools,
    joined,
)

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
}
TOOLS: Tools = {"weather": SCHEMA, "clock": {}}

OSLO = {"city": "Oslo", "days": 3}
WEATHER = ("weather", OSLO)
CLOCK = ("clock", {"zone": "UTC"})

# By parser: a text, the content in it, and the calls in it.
CALLS: dict[str, list[tuple[str, str, list[tuple[str, dict[str, Any]]]]]] = {
    "hermes": [
        (
            'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3'
            '}}\n</tool_call>\n<tool_call>{"name": "clock", "arguments": "{\\"zone\\": \\"UTC\\"}"}'
            "</tool_call>\n",
            "Let me see.",
            [WEATHER, CLOCK],
        ),
        ('<tool_call>{"name": "clock"}</tool_call> now', " now", [("clock", {})]),
        ('<tool_call>{"name": "clock", "arguments": {}}', "", [("clock", {})]),
    ],
    "qwen3_xml": [
        (
            "Yes.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
            "<function=clock>\n<parameter=zone>\nUTC\n</parameter>\n</function>\n</tool_call>",
            "Yes.",
            [WEATHER, CLOCK],
        ),
        ("<function=clock></function>", "", [("clock", {})]),
    ],
    "glm45": [
        (
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
            "<tool_call>clock<arg_key>zone</arg_key><arg_value>UTC</arg_value></tool_call>",
            "",
            [WEATHER, CLOCK],
        ),
        ("<tool_call>clock\n</tool_call>", "", [("clock", {})]),
    ],
    "llama3_json": [
        (
            '<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo", "days": 3}}; '
            '{"name": "clock", "parameters": {"zone": "UTC"}}',
            "",
            [WEATHER, CLOCK],
        ),
        ('{"name": "Ada", "age": 36}', '{"name": "Ada", "age": 36}', []),
        ('A brace: {"name": "clock", "parameters": {}}',) * 2 + ([],),
    ],
    "mistral": [
        (
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
            '{"name": "clock", "arguments": {"zone": "UTC"}}]',
            "",
            [WEATHER, CLOCK],
        ),
        (
            'Well[TOOL_CALLS]weather{"city": "Oslo", "days": 3}[TOOL_CALLS]clock[ARGS]'
            '{"zone": "UTC"}',
            "Well",
            [WEATHER, CLOCK],
        ),
    ],
    "granite": [
        (
            '<|tool_call|> [{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
            '{"name": "clock", "arguments": {"zone": "UTC"}}]',
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "phi4_mini_json": [
        (
            'functools[{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}, '
            '{"name": "clock", "arguments": {"zone": "UTC"}}]',
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "jamba": [
        (
            '<tool_calls>[\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}},\n'
            '{"name": "clock", "arguments": {"zone": "UTC"}}\n]</tool_calls>',
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "internlm": [
        (
            'Sure.<|action_start|><|plugin|>\n{"name": "weather", "parameters": {"city": "Oslo", '
            '"days": 3}}<|action_end|>',
            "Sure.",
            [WEATHER],
        ),
    ],
    "deepseek_v3": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
            '{"city": "Oslo", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function'
            '<｜tool▁sep｜>clock\n```json\n{"zone": "UTC"}\n```<｜tool▁call▁end｜>'
            "<｜tool▁calls▁end｜>",
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "deepseek_v31": [
        (
            "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
            '{"city": "Oslo", "days": 3}<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>'
            '{"zone": "UTC"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "Hm.",
            [WEATHER, CLOCK],
        ),
    ],
    "deepseek_v32": [
        (
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
            '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="clock">\n'
            '<｜DSML｜parameter name="zone" string="true">UTC</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n"
            "</｜DSML｜function_calls>",
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "minimax_m2": [
        (
            '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Oslo</parameter>'
            '\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="clock">\n'
            '<parameter name="zone">UTC</parameter>\n</invoke>\n</minimax:tool_call>',
            "",
            [WEATHER, CLOCK],
        ),
    ],
    "kimi_k2": [
        (
            "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
            '<|tool_call_argument_begin|>{"city": "Oslo", "days": 3}<|tool_call_end|>'
            "<|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>"
            '{"zone": "UTC"}<|tool_call_end|><|tool_calls_section_end|>',
            "I look.",
            [WEATHER, CLOCK],
        ),
    ],
    "pythonic": [
        ('[weather(city="Oslo", days=3), clock(zone="UTC")]', "", [WEATHER, CLOCK]),
        ("[1, 2] are numbers, [clock()]", "[1, 2] are numbers, [clock()]", []),
        (
            "[clock(a=[-1, 2.5], b={'c': None, 'd': true}, e='x]')]",
            "",
            [("clock", {"a": [-1, 2.5], "b": {"c": None, "d": True}, "e": "x]"})],
        ),
    ],
    "llama4_pythonic": [
        (
            '<|python_start|>[weather(city="Oslo", days=3), clock(zone="UTC")]<|python_end|>',
            "",
            [WEATHER, CLOCK],
        ),
    ],
}

# By parser: what looks like a call and is none.
MALFORMED: dict[str, list[str]] = {
    "hermes": [
        "<tool_call>not JSON</tool_call>",
        '<tool_call>{"name": "clock", "arguments": {"a": }}</tool_call> and so on',
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": NaN}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a": 1e999}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"a',
        "<tool_call>" + "[" * 100_000,
        "<tool_call>" + "9" * 5000 + "</tool_call>",
        "<tool_",
    ],
    "qwen3_xml": [
        "<function=weather>\n<parameter=city>\nOs",
        "<function=>x</function>",
        "<function=weather",
    ],
    "glm45": ["<tool_call>wea", "<tool_call>weather<arg_key>city</arg_key><arg_value>Os"],
    "llama3_json": ['{"name": "clock", "parameters": {"a', '{"parameters": {}}', "{}", "{"],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS]{}", '[TOOL_CALLS]clock{"a": ', "[TOOL_CALLS] [1]"],
    "granite": ["<|tool_call|>[1]", "<tool_call>nothing"],
    "deepseek_v3": [
        "<｜tool▁call▁begin｜>x<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>",
    ],
    "deepseek_v32": ['<｜DSML｜invoke name="weather">x'],
    "kimi_k2": [
        "<|tool_call_begin|>functions.clock:0<|tool_call_end|>",
        "<|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{",
    ],
    "pythonic": ["[clock(1)]", "[clock(**{})]", "[clock(a=f())]", "[", "[]", "[clock(a={1: 2})]"],
}


def read(parser: Parser, pieces: Sequence[str]) -> list[Event]:
    """All events of an answer that comes in these pieces."""
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined([*events, *parser.finish()])


def content_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Content))


def reasoning_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls_of(events: Sequence[Event]) -> list[tuple[str, dict[str, Any]]]:
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, Arguments):
            name, before = calls[-1]
            calls[-1] = name, before + event.text
    return [(name, msgspec.json.decode(arguments)) for name, arguments in calls]
