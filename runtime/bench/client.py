"""Streaming requests to a server that speaks the OpenAI API, each with the times of its chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from paged.models.tokenizer import Tokenizer
from paged.runtime.bench.connection import HttpClient, Response
from paged.runtime.bench.metrics import RequestRecord
from paged.runtime.bench.options import SamplingOptions, ServerOptions
from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.errors import ConfigError

COMPLETIONS, CHAT_COMPLETIONS = "/v1/completions", "/v1/chat/completions"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.json.Encoder().encode


class StreamReader:
    """Takes a server-sent stream piece by piece and writes what it says into a record."""

    def __init__(self, record: RequestRecord, clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock
        self._rest = b""
        self._texts: list[str] = []

    def feed(self, piece: bytes) -> None:
        now = self._clock()
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                self._read(payload, now)

    def finish(self) -> None:
        """To be called after the last piece."""
        record = self._record
        record.text = "".join(self._texts)
        if not record.chunk_times and record.error is None:
            record.error = "the stream ended without a token"

    def _read(self, payload: bytes, now: float) -> None:
        record = self._record
        try:
            chunk = _decode_chunk(payload)
        except msgspec.DecodeError as error:
            record.error = f"a chunk that cannot be read: {error}"
            return
        if chunk.error is not None:
            record.error = f"error in the stream: {_message(chunk.error)}"
        if chunk.choices:
            record.chunk_times.append(now)
            for choice in chunk.choices:
                self._read_choice(choice)
        if chunk.usage is not None:
            record.num_input_tokens = chunk.usage.prompt_tokens
            record.num_output_tokens = chunk.usage.completion_tokens
            record.counted = True

    def _read_choice(self, choice: _Choice) -> None:
        if choice.text:
            self._texts.append(choice.text)
        if (delta := choice.delta) is not None:
            self._texts += [delta.reasoning_content or "", delta.content or ""]
        if choice.finish_reason in ("abort", "error"):
            self._record.error = f"the request ended with finish_reason {choice.finish_reason!r}"


@dataclass(frozen=True, kw_only=True)
class OpenAIClient:
    """Sends the requests of a workload.

    Attributes:
        path: of the endpoint, after the base URL.
        is_chat: prompts are texts, sent as a user's message.
        fields: of every request: model, sampling and so on.
        tokenizer: counts tokens if the server does not; None to count chunks.
        timeout: seconds until a request counts as failed.
    """

    http: HttpClient
    path: str
    is_chat: bool
    fields: dict[str, Any]
    tokenizer: Tokenizer | None
    timeout: float

    async def stream(self, request: BenchRequest) -> RequestRecord:
        """Send one request; whatever goes wrong is told by the record's `error`."""
        body = _encode(self._body(request))
        clock = time.perf_counter
        record = RequestRecord(
            start=clock(), num_input_tokens=request.num_input_tokens, kind=request.kind
        )
        reader = StreamReader(record, clock)
        try:
            async with asyncio.timeout(self.timeout):
                response = await self.http.post(self.path, body, reader.feed)
        except TimeoutError:
            record.error = f"not finished after {self.timeout:g} s (--request-timeout-sec)"
        except OSError as error:
            record.error = f"{type(error).__name__}: {error}"
        else:
            if response.status != 200:
                record.error = f"HTTP {response.status}: {error_message(response)}"
        reader.finish()
        if record.error is None and not record.counted:
            record.num_output_tokens = self._count(record)
        return record

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        if not self.is_chat:
            prompt = {"prompt": request.prompt, "max_tokens": request.num_output_tokens}
            return self.fields | prompt
        message = {"role": "user", "content": request.prompt}
        limit = {"max_completion_tokens": request.num_output_tokens}
        return self.fields | {"messages": [message]} | limit

    def _count(self, record: RequestRecord) -> int:
        if self.tokenizer is None:
            return len(record.chunk_times)
        return len(self.tokenizer.encode(record.text, add_special_tokens=False))


def request_fields(
    options: ServerOptions, sampling: SamplingOptions, model: str, *, ignore_eos: bool
) -> dict[str, Any]:
    """What is the same in every request."""
    given = {name: value for name, value in asdict(sampling).items() if value is not None}
    if options.backend == "openai-chat" and "logprobs" in given:
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    if ignore_eos:
        given["ignore_eos"] = True
    if options.skip_tokenizer_init:
        # Without text there would be nothing to stream before the end.
        given["return_token_ids"] = True
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, **stream, **given, **(options.extra_body or {})}


async def first_model(http: HttpClient) -> str:
    """The id of the first model that the server names.

    Raises:
        ConfigError: it names none.
        OSError: it cannot be reached.
    """
    response = await http.get("/v1/models")
    if response.status == 401:
        raise ConfigError("The server asks for a key: put the right one into OPENAI_API_KEY")
    if response.status != 200:
        raise ConfigError(
            f"/v1/models answers with HTTP {response.status} ({error_message(response)}): "
            "give --model"
        )
    try:
        models = msgspec.json.decode(response.body, type=_Models).data
    except msgspec.DecodeError as error:
        raise ConfigError(f"/v1/models is not a list of models ({error}): give --model") from error
    if not models:
        raise ConfigError("The server names no model: give --model")
    return models[0].id


def error_message(response: Response) -> str:
    """The message of an OpenAI error body, or else the body."""
    try:
        return _message(msgspec.json.decode(response.body)["error"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.body.decode(errors="replace").strip()


def _message(error: Any) -> str:
    """What an OpenAI error object says."""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)
