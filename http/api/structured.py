"""What form the output must have, from the fields that OpenAI's API and vLLM's have for it."""

from __future__ import annotations

from paged.http.api.protocol import GenerationRequest, ResponseFormat
from paged.runtime.errors import InvalidRequest, Unsupported
from paged.runtime.structured_outputs import StructuredOutputsParams

_OLDER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """None if the output is free.

    Raises:
        InvalidRequest: a malformed `response_format`, or several fields that each name a form.
        Unsupported: structural tags.
    """
    asked: dict[str, StructuredOutputsParams] = {}
    if body.structured_outputs is not None:
        asked["structured_outputs"] = body.structured_outputs
    if body.response_format is not None and body.response_format.type != "text":
        asked["response_format"] = _of_format(body.response_format)
    pattern = body.guided_whitespace_pattern
    for name, kind in _OLDER_NAMES.items():
        if (value := getattr(body, name)) is not None:
            given = {kind: value, "whitespace_pattern": pattern}
            asked[name] = StructuredOutputsParams(**given)
    if len(asked) > 1:
        names = " and ".join(asked)
        raise InvalidRequest(f"give only one of {names}: each names a form of the output", names)
    return next(iter(asked.values()), None)


def _of_format(wanted: ResponseFormat) -> StructuredOutputsParams:
    """All schemas are enforced, be they `strict` or not."""
    if wanted.type == "json_object":
        if wanted.schema is not None:
            return StructuredOutputsParams(json=wanted.schema)
        return StructuredOutputsParams(json_object=True)
    if wanted.type == "json_schema":
        if wanted.json_schema is None or wanted.json_schema.schema is None:
            where = "response_format.json_schema.schema"
            raise InvalidRequest(f"{where}: this field is required", where)
        return StructuredOutputsParams(json=wanted.json_schema.schema)
    if wanted.type == "structural_tag":
        raise Unsupported("response_format: structural_tag is not supported", "response_format")
    raise InvalidRequest(
        f"response_format.type must be text, json_object or json_schema, got {wanted.type[:100]!r}",
        "response_format.type",
    )
