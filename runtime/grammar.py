"""Structured output as the text of a grammar, checked before the engine hears of it.

What crosses to the engine is llguidance's own form of a grammar, whatever the caller wrote.
Everything is bounded: the text in length, the grammar and its automata in size, the work in each
token. What goes beyond is refused, or ends the one request that asked for it.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.grammar_vocabulary import special_vocabulary
from paged.runtime.json_schemas import with_real_dates
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
    names = _special(tokenizer, vocab_size) if kind == "grammar" and "<" in text else None
    return _checked(kind, text, None if params.disable_any_whitespace else whitespace, names)


_special = lru_cache(maxsize=1)(special_vocabulary)


@lru_cache(maxsize=64)
def _checked(kind: str, text: str, whitespace: str | None, names: LLTokenizer | None) -> str:
    try:
        grammar = _convert(kind, text, whitespace)
    except (ValueError, RecursionError, GbnfToLarkError) as error:
        raise _refused(kind, str(error)) from None
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, names, limits=LIMITS)
    if failed:
        raise _refused(kind, messages[0])
    return grammar


def _convert(kind: str, text: str, whitespace: str | None) -> str:
    if kind == "regex":
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, _ASCII)}/")
    if kind == "grammar":
        return LLMatcher.grammar_from_lark(any_to_lark(text))
    if kind == "choice":
        choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
        return LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
    options: Any = {"whitespace_flexible": whitespace is not None}
    if whitespace is not None:
        options["whitespace_pattern"] = whitespace
    if '"date' in text:
        text = json.dumps(with_real_dates(json.loads(text)))
    return LLMatcher.grammar_from_json_schema(text, overrides=options)


def _refused(kind: str, reason: str) -> InvalidRequest:
    reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]}..."
    return InvalidRequest(f"{_NAMES[kind]} cannot be enforced: {reason}", "structured_outputs")
