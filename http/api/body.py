"""JSON bodies: requests are checked for type, size and fields; replies are written."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.errors import ApiError
from paged.http.api.fields import Neutral, check_fields

# How msgspec's messages end when a value has the wrong type: "... - at `$.messages[0].role`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


MAX_VALUES = 2_000_000
"""Numbers, texts, lists and objects in a body: token ids of the longest prompts, and room."""

# What stands before each value but the first.
_MARKS = (b",", b"[", b"{")
_SLICE = 2**16


async def read_body[T: msgspec.Struct](
    request: Request, type: type[T], neutral: Neutral, max_size: int
) -> T:
    """The body as a `type`.

    Raises:
        ApiError: as `read_json` does, not JSON, or a field of the wrong type.
        InvalidRequest: more fields than any request has.
        Unsupported: a field of `neutral` that asks for something.
    """
    body = await read_json(request, max_size)
    check_fields(fields_of(body), type.__struct_fields__, neutral)
    return _decode(body, type)


async def read_json(request: Request, max_size: int) -> bytes:
    """The body as it came.

    Raises:
        ApiError: another content type, too large, or of too many values.
    """
    _check_content_type(request)
    body = await _read(request, max_size)
    # A value takes two bytes at least, its comma being one.
    if len(body) > 2 * MAX_VALUES:
        await asyncio.to_thread(_check_num_values, body)
    return body


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, their values not decoded. Raises ApiError for anything else."""
    return _decode(body, dict[str, msgspec.Raw])


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = "The body must be JSON, sent with 'Content-Type: application/json'"
        raise ApiError(400, message, "Bad Request")


async def _read(request: Request, max_size: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_size:
            message = f"The body is larger than {max_size} bytes"
            raise ApiError(413, message, "Request Entity Too Large")
        chunks.append(chunk)
    return b"".join(chunks)


def _check_num_values(body: bytes) -> None:
    """Refuse what would take seconds to decode and to look through.

    Text is left out, in which commas and brackets stand for nothing. A thread can do this while
    others run, which it cannot while a whole body is decoded.
    """
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")
    num_values, in_text = 0, False
    for start in range(0, len(bare), _SLICE):
        pieces = bare[start : start + _SLICE].split(b'"')
        num_values += sum(piece.count(mark) for piece in pieces[in_text::2] for mark in _MARKS)
        in_text ^= len(pieces) % 2 == 0
        if num_values > MAX_VALUES:
            message = f"The body holds more than {MAX_VALUES} values"
            raise ApiError(413, message, "Request Entity Too Large")


def _decode[T](body: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except msgspec.DecodeError as error:
        raise ApiError(400, f"The body is not JSON: {error}", "Bad Request") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply", "Bad Request") from None


def _wrong_field(message: str) -> ApiError:
    """Turn a message that ends in a path into one that begins with it."""
    where = _PATH.search(message)
    path = where["path"] if where else ""
    reason = message[: where.start()] if where else message
    missing = _MISSING.search(reason)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        reason = "this field is required"
    return ApiError(400, f"{path or 'body'}: {reason}", "Bad Request", path or None)


def json_response(body: msgspec.Struct) -> Response:
    """A successful reply."""
    return Response(msgspec.json.encode(body), media_type="application/json")
