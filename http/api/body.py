"""JSON bodies: requests are checked for type, size and fields; replies are written."""

from __future__ import annotations

import asyncio
import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.errors import ApiError
from paged.http.api.fields import Neutral, check_fields
from paged.http.api.json_size import TooManyValues, check_num_values
from paged.http.api.timeouts import timed
from paged.runtime.long_text import without_hurry

# How msgspec's messages end when a value has the wrong type: "... - at `$.messages[0].role`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")

# Seconds that a body may take, and bytes a second that give it more of them.
_PATIENCE = 60.0
_LEAST_RATE = 10_000


async def read_body[T: msgspec.Struct](
    request: Request, type: type[T], neutral: Neutral, max_size: int
) -> T:
    """The body as a `type`, how long its answer may take filled in.

    Raises:
        ApiError: as `read_json` does, not JSON, or a field of the wrong type.
        InvalidRequest: more fields than any request has, or a timeout that is none.
        Unsupported: a field of `neutral` that asks for something.
    """
    body = await read_json(request, max_size)
    check_fields(fields_of(body), type.__struct_fields__, neutral)
    return timed(request, _decode(body, type))


async def read_json(request: Request, max_size: int) -> bytes:
    """The body as it came.

    Raises:
        ApiError: another content type, too large, or of too many values.
    """
    _check_content_type(request)
    body = await read_whole(request, max_size)
    try:
        await without_hurry(len(body), lambda: check_num_values(body))
    except TooManyValues as error:
        message = f"The body is too much: {error}"
        raise ApiError(413, message, "Request Entity Too Large") from None
    return body


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of a JSON object, their values not decoded. Raises ApiError for anything else."""
    return _decode(body, dict[str, msgspec.Raw])


def _check_content_type(request: Request) -> None:
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        message = "The body must be sent as it is, without a Content-Encoding"
        raise ApiError(415, message, "Unsupported Media Type")
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = "The body must be JSON, sent with 'Content-Type: application/json'"
        raise ApiError(400, message, "Bad Request")


async def read_whole(request: Request, max_size: int) -> bytes:
    """The body as it came. Raises ApiError for one that is too large, or comes too slowly."""
    chunks: list[bytes] = []
    size, start = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(start + _PATIENCE) as limit:
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_size:
                    message = f"The body is larger than {max_size} bytes"
                    raise ApiError(413, message, "Request Entity Too Large")
                chunks.append(chunk)
                limit.reschedule(start + _PATIENCE + size / _LEAST_RATE)
    except TimeoutError:
        message = f"The body comes too slowly: {size} bytes were there in time"
        raise ApiError(408, message, "Request Timeout") from None
    return b"".join(chunks)


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
