"""Errors as OpenAI's clients read them, {"error": {message, type, param, code}}, or Anthropic's.

A route raises what it likes; `error_info` is the one place that decides what the client is told.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paged.http.paths import path_of
from paged.runtime.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineRestarting,
    InvalidRequest,
    Overloaded,
    Unsupported,
)

logger = logging.getLogger(__name__)

# Messages may quote a value: enough to recognise it, never the whole of a large input.
_MAX_MESSAGE = 600
_CLIENT_CLOSED_REQUEST = 499
_INTERNAL = "InternalServerError"
REFUSAL_CAUSE = "paged.refusal_cause"
"""Where the scope of a request that was refused says why."""
_UNAVAILABLE = "ServiceUnavailableError"
# Seconds after which to ask an engine again that is being restarted.
_RESTART = 10
# Seconds after which to ask again where nothing is known.
_LATER = 5


class ErrorInfo(msgspec.Struct, frozen=True):
    """What went wrong; `code` is the HTTP status, `param` the field that is wrong."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every reply that is not a success."""

    error: ErrorInfo


class AnthropicErrorInfo(msgspec.Struct, frozen=True):
    """What went wrong; the message begins with the field that is wrong."""

    type: str
    message: str


class AnthropicError(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The same for a request to /v1/messages."""

    error: AnthropicErrorInfo


# Other statuses are the client's fault below 500 and ours from there on.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_ANTHROPIC_PATH = "/v1/messages"


class ApiError(Exception):
    """A refusal with its status, for what no other exception says, and headers of its reply."""

    def __init__(
        self,
        status: int,
        message: str,
        type: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type
        self.param = param
        self.headers = headers


_FAILED = "The engine failed while it worked on this request; see the server's log"


class GenerationFailed(RuntimeError):
    """The engine gave up on this request.

    Attributes:
        told: what the client may know of the reason.
    """

    def __init__(self, message: str, told: str | None = None) -> None:
        super().__init__(message)
        self.told = told


EXPECTED = (DeadlineExceeded, EngineDead, GenerationFailed, Overloaded)
"""What may end an answer that has begun without being a bug."""


def error_info(error: Exception) -> ErrorInfo:
    """What the client is told of `error`; nothing of it when the fault is ours."""
    match error:
        case ApiError():
            return _info(str(error), error.type, error.status, error.param)
        case Unsupported():
            return _info(str(error), "NotImplementedError", 400, error.param)
        case InvalidRequest():
            return _info(str(error), "BadRequestError", 400, error.param)
        case HTTPException():
            return _info(error.detail, HTTPStatus(error.status_code).phrase, error.status_code)
        case Overloaded():
            return _info(str(error), _UNAVAILABLE, 503)
        case DeadlineExceeded():
            return _info(str(error), "TimeoutError", 504, "timeout")
        case EngineRestarting():
            message = "The engine has stopped and is being restarted; try again later"
            return _info(message, _UNAVAILABLE, 503)
        case GenerationFailed():
            return _info(error.told or _FAILED, _INTERNAL, 500)
        case EngineDead():
            return _info("The engine has stopped; see the server's log", _INTERNAL, 500)
        case _:
            return _info("Internal server error", _INTERNAL, 500)


def _info(message: str, type: str, status: int, param: str | None = None) -> ErrorInfo:
    printable = "".join(char if char.isprintable() else " " for char in message[:_MAX_MESSAGE])
    cut = printable + "..." if len(message) > _MAX_MESSAGE else printable
    return ErrorInfo(cut, type, param, status)


def is_anthropic(path: str) -> bool:
    """Whether clients of this path read Anthropic's errors."""
    return path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/")


def anthropic_error(error: Exception) -> AnthropicError:
    """What an Anthropic client is told of `error`."""
    info = error_info(error)
    other = "invalid_request_error" if info.code < 500 else "api_error"
    return AnthropicError(AnthropicErrorInfo(_ANTHROPIC_TYPES.get(info.code, other), info.message))


def error_response(
    error: Exception, path: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The whole reply for `error`, in the shape that the path's clients read."""
    info = error_info(error)
    body = anthropic_error(error) if is_anthropic(path) else ErrorBody(info)
    return _Refusal(msgspec.json.encode(body), info.code, headers, cause_of(error))


class _Refusal(Response):
    """A reply that is not a success. It leaves its cause in the scope, for metrics."""

    media_type = "application/json"

    def __init__(
        self, body: bytes, status: int, headers: Mapping[str, str] | None, cause: str
    ) -> None:
        super().__init__(body, status, headers)
        self._cause = cause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[REFUSAL_CAUSE] = self._cause
        await super().__call__(scope, receive, send)


def cause_of(error: Exception) -> str:
    """What metrics call an error: one of few words, whatever was asked."""
    if isinstance(error, InvalidRequest) and error.param == "input_tokens":
        return "too_long"
    if isinstance(error, Overloaded):
        return error.cause
    words = error_info(error).type.removesuffix("Error").replace(" ", "")
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", words).lower()


def unavailable(
    message: str, path: str, seconds: int, headers: Mapping[str, str] | None = None
) -> Response:
    """A 503 that says why, and when to try again."""
    error = ApiError(503, message, _UNAVAILABLE)
    return error_response(error, path, {"Retry-After": str(seconds), **(headers or {})})


async def handle_error(request: Request, error: Exception) -> Response:
    """Starlette's handler for every exception a route may raise."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    if isinstance(error, EngineDead | GenerationFailed):
        logger.error("%s %s: %s", request.method, request.url.path, error)
    path = path_of(request.scope)
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        error, headers = _of_route(error, request.method, path), error.headers
    return error_response(error, path, headers or _headers_of(error))


def retry_after(seconds: float) -> dict[str, str]:
    """The header that clients wait by, in whole seconds."""
    return {"Retry-After": str(max(math.ceil(seconds), 1))}


def _headers_of(error: Exception) -> Mapping[str, str] | None:
    match error:
        case Overloaded():
            return retry_after(error.retry_after)
        case EngineRestarting():
            return retry_after(_RESTART)
        case DeadlineExceeded():  # OpenAI's and Anthropic's clients would ask again by themselves
            return {"X-Should-Retry": "false"}
        case ApiError(status=503, headers=None):
            return retry_after(_LATER)
        case ApiError():
            return error.headers
        case _:
            return None


def _of_route(error: HTTPException, method: str, path: str) -> HTTPException:
    """The router's error, saying what there is instead."""
    if error.status_code == HTTPStatus.NOT_FOUND:
        message = f"There is no route {path}; OpenAI's begin with /v1, and /docs lists all"
    elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{path} takes {(error.headers or {}).get('Allow')}, not {method}"
    else:
        return error
    return HTTPException(error.status_code, message, error.headers)
