"""Structured output as the text of a grammar, checked before the engine hears of it.

What crosses to the engine is llguidance's own form of a grammar, whatever the caller wrote.
Everything is bounded: the text in length, the grammar and its automata in size, the work in each
token. What goes beyond is refused, or ends the one request that asked for it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar_vocabulary import special_ids, special_vocabulary
from paged.runtime.json_schemas import with_real_dates, without_others
from paged.runtime.structural_tags import Grammar, TagWriter
from paged.runtime.structured_outputs import StructuredOutputsParams

MAX_GRAMMAR_LENGTH = 128 * 1024
"""Characters of a schema, a pattern or a grammar. One of that size takes up to a second."""

LIMITS = LLParserLimits(
    max_grammar_size=100_000,
    max_lexer_states=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_MAX_REASON = 400
_ASCII = "dws"  # what \d, \w and \s mean: else a digit may be of any of sixty scripts
# A model that has lost its way may go on with spaces and line breaks for ever. That many are an
# indentation of fifteen levels.
_WHITESPACE = r"[ \t\r\n]{1,32}"
_NAMES = {
    "json": "the JSON schema",
    "regex": "the regular expression",
    "choice": "the choice",
    "grammar": "the grammar",
    "json_object": "the white space of JSON",
    "structural_tag": "the form",
}


def grammar_of(params: StructuredOutputsParams, tokenizer: Tokenizer, vocab_size: int) -> str:
    """The grammar of what is asked for.

    Args:
        params: what is asked for.
        tokenizer: knows the special tokens that a grammar may name.
        vocab_size: ids in a grammar are below it.

    Raises:
        InvalidRequest: it is malformed, larger than allowed, or asks for what cannot be enforced.
    """
    kind = params.kind
    value = {"type": "object"} if kind == "json_object" else getattr(params, kind)
    try:
        # The order of a schema's properties is that of the output's.
        text = value if isinstance(value, str) else json.dumps(value)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise _refused(kind, str(error)) from None
    if len(text) > MAX_GRAMMAR_LENGTH:
        raise _refused(kind, f"it has {len(text)} characters, {MAX_GRAMMAR_LENGTH} are allowed")
    whitespace = params.whitespace_pattern or _WHITESPACE
    style = _JsonStyle(
        whitespace=None if params.disable_any_whitespace else whitespace,
        closed=params.disable_additional_properties,
    )
    names_tokens = kind == "structural_tag" or (kind == "grammar" and "<" in text)
    return _checked(kind, text, style, _names(tokenizer, vocab_size) if names_tokens else None)


class _JsonStyle(NamedTuple):
    """How JSON is written.

    Attributes:
        whitespace: a pattern of what may stand between its parts; None for nothing.
        closed: whether objects have no other properties than those of the schema.
    """

    whitespace: str | None
    closed: bool


class _Names(NamedTuple):
    """The special tokens, as the library checks their names, and by their text."""

    vocabulary: LLTokenizer
    ids: dict[str, int]

    def __hash__(self) -> int:
        return id(self.vocabulary)


@lru_cache(maxsize=1)
def _names(tokenizer: Tokenizer, vocab_size: int) -> _Names:
    return _Names(special_vocabulary(tokenizer, vocab_size), special_ids(tokenizer, vocab_size))


@lru_cache(maxsize=64)
def _checked(kind: str, text: str, style: _JsonStyle, names: _Names | None) -> str:
    try:
        grammar = _convert(kind, text, style, names)
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise _refused(kind, str(error)) from None
    vocabulary = names and names.vocabulary
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, vocabulary, limits=LIMITS)
    if failed:
        raise _refused(kind, messages[0])
    return grammar


def _convert(kind: str, text: str, style: _JsonStyle, names: _Names | None) -> str:
    """The list of grammars that the library reads, the first to be followed."""
    if kind != "structural_tag":
        return json.dumps({"grammars": [_part(kind, text, style)]})
    assert names is not None, "a tag may name special tokens"
    writer = TagWriter(lambda kind, text: _part(kind, text, style), names.ids)
    rules = writer.write(json.loads(text))
    return json.dumps({"grammars": [{"lark_grammar": rules}, *writer.parts]})


def _part(kind: str, text: str, style: _JsonStyle) -> Grammar:
    """One grammar."""
    if kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(text, _ASCII)}/"}
    if kind == "grammar":
        return {"lark_grammar": any_to_lark(text)}
    if kind == "choice":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return {"lark_grammar": "start: " + " | ".join(choices)}
    options: Any = {"whitespace_flexible": style.whitespace is not None}
    if style.whitespace is not None:
        options["whitespace_pattern"] = style.whitespace
    if style.closed or '"date' in text:
        schema = with_real_dates(json.loads(text))
        text = json.dumps(without_others(schema) if style.closed else schema)
    [part] = json.loads(LLMatcher.grammar_from_json_schema(text, overrides=options))["grammars"]
    return dict(part)


def _refused(kind: str, reason: str) -> InvalidRequest:
    reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
    return InvalidRequest(f"{_NAMES[kind]} cannot be enforced: {reason}", "structured_outputs")
