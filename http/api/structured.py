"""What form the output must have, from the fields that OpenAI's API and vLLM's have for it."""

from __future__ import annotations

from paged.http.api.fields import missing
from paged.http.api.protocol import GenerationRequest, ResponseFormat
from paged.runtime.errors import InvalidRequest
from paged.runtime.structured_outputs import StructuredOutputsParams

_NAME = "structured_outputs"
_OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_WHITESPACE = "guided_whitespace_pattern"
_ABOUT_JSON = ("guided_json", "response_format")


def form_field(body: GenerationRequest) -> str | None:
    """The field that names a form; None if the output is free.

    Raises:
        InvalidRequest: several do.
    """
    given = [name for name in (_NAME, *_OLDER_NAMES) if getattr(body, name) is not None]
    if body.response_format is not None and body.response_format.type != "text":
        given.insert(0, "response_format")
    if len(given) > 1:
        names = " and ".join(given)
        raise InvalidRequest(f"give only one of {names}: each names a form of the output", names)
    return given[0] if given else None


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """None if the output is free.

    Raises:
        InvalidRequest: a malformed form, several of them, or white space without JSON around it.
    """
    field = form_field(body)
    if body.guided_whitespace_pattern is not None and field not in _ABOUT_JSON:
        raise InvalidRequest(
            f"{_WHITESPACE} needs guided_json or a response_format of JSON beside it", _WHITESPACE
        )
    if field is None or field == _NAME:
        return body.structured_outputs
    try:
        if body.response_format is not None and field == "response_format":
            return _of_format(body.response_format, body.guided_whitespace_pattern)
        given = {_OLDER_NAMES[field]: getattr(body, field)}
        return StructuredOutputsParams(**given, whitespace_pattern=body.guided_whitespace_pattern)
    except InvalidRequest as error:
        raise in_words_of(field, error) from None


def in_words_of(field: str, error: InvalidRequest) -> InvalidRequest:
    """The error as one of the field that the client gave, if it is about the form."""
    if error.param != _NAME:
        return error
    return InvalidRequest(f"{field}: {str(error).removeprefix(f'{_NAME}: ')}", field)


def _of_format(wanted: ResponseFormat, whitespace: str | None) -> StructuredOutputsParams:
    """All schemas are enforced, be they `strict` or not."""
    if wanted.type == "json_object" and wanted.schema is None:
        return StructuredOutputsParams(json_object=True, whitespace_pattern=whitespace)
    if wanted.type == "structural_tag":
        return StructuredOutputsParams(structural_tag=_tag(wanted), whitespace_pattern=whitespace)
    if wanted.type not in ("json_object", "json_schema"):
        raise InvalidRequest(
            "response_format.type must be text, json_object, json_schema or structural_tag, got "
            f"{wanted.type[:100]!r}",
            "response_format.type",
        )
    schema = wanted.schema
    if wanted.type == "json_schema":
        schema = None if wanted.json_schema is None else wanted.json_schema.schema
    if schema is None:
        raise missing("response_format.json_schema.schema")
    return StructuredOutputsParams(json=schema, whitespace_pattern=whitespace)


def _tag(wanted: ResponseFormat) -> dict[str, object]:
    parts = {name: getattr(wanted, name) for name in ("format", "structures", "triggers")}
    return {name: part for name, part in parts.items() if part is not None}
