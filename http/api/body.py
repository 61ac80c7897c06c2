"""JSON bodies: requests are checked for type, size and fields; replies are written."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from paged.http.api.errors import ApiError
from paged.http.api.fields import Neutral, check_fields

# How msgspec's messages end when a value has the wrong type: "... - at `$.messages[0].role`".
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"missing required field `(?P<name>\w+)`")


async def read_body[T: msgspec.Struct](
    request: Request, type: type[T], neutral: Neutral, max_size: int
) -> T:
    """The body as a `type`.

    Raises:
        ApiError: another content type, too large, not JSON, or a field of the wrong type.
        Unsupported: a field of `neutral` that asks for something.
    """
    _check_content_type(request)
    body = await _read(request, max_size)
    check_fields(_decode(body, dict[str, msgspec.Raw]), type.__struct_fields__, neutral)
    return _decode(body, type)


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
