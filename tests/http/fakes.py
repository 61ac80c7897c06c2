"""A stand-in for the engine: no model, every answer known beforehand.

Its tokens are the bytes of the text. It answers with its `answer`, a token at a time.
"""

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paged.http.api.answers import AnswerFormat
from paged.http.app import create_app
from paged.http.options import ServeOptions
from paged.http.serve import server_config
from paged.models.chat_template import ChatTemplateError
from paged.runtime.about import About, cache_settings
from paged.runtime.beam_search import BeamSearchParams
from paged.runtime.config import EngineConfig
from paged.runtime.engine_state import EngineState, ProcessState, SequenceState, StepState
from paged.runtime.errors import EngineDead, InvalidRequest, Overloaded
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import (
    Distribution,
    EngineStats,
    StepStats,
    Terms,
    TransferStats,
)
from paged.runtime.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 256
MEMORY = MemoryPlan(2**33, 2**31, 2**20, 2**28, 160, 16, 101, 64, 4, num_host_pages=50)
STEPS = StepStats(
    seconds={"decode_4": Distribution((0, 4, *[0] * 15), 0.006)},
    host_seconds=Distribution((4, *[0] * 14), 0.0002),
    num_tokens=Distribution((0, 4, *[0] * 12), 12),
    num_places=16,
)
ABOUT = About(MEMORY, {"weights": 1.5, "compile": 20.0}, cache_settings(EngineConfig(), MEMORY))


class FakeTokenizer:
    """Bytes of Latin-1 as token ids; the special token 0 in front when asked for."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.special_tokens = {"bos_token": "\0"}
        self.chat_templates = {"default": "{{ messages }}"}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(threading.get_ident())
        return [0] * add_special_tokens + list(text.encode("latin-1", errors="replace"))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [token_id for token_id in ids if token_id or not skip_special_tokens]
        return bytes(shown).decode("latin-1")

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode() if token_id < VOCAB_SIZE else b""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        if variables.get("refuse"):
            raise ChatTemplateError("the template refuses")
        lines = [f"{message['role']}:{message['content']}" for message in messages]
        marks = [f"tools={len(tools)}"] if tools else []
        marks += [f"{name}={value}" for name, value in variables.items()]
        ending = ["assistant:"] if add_generation_prompt else []
        return "|".join([*marks, *([chat_template] if chat_template else []), *lines, *ending])


@dataclass
class Seen:
    """A request as the engine got it."""

    prompt: list[int]
    params: SamplingParams
    request_id: str
    priority: int
    cache_salt: str
    terms: Terms | None = None
    thread: int = field(default_factory=threading.get_ident)

    @property
    def text(self) -> str:
        return FakeTokenizer().decode(self.prompt)


@dataclass
class FakeEngine:
    """Answers every request alike.

    Attributes:
        answer: its text, cut to max_tokens.
        ends_with: its finish reason, unless it is cut.
        stop_reason: its stop reason.
        fails_after: die after this many tokens.
        pause: seconds between tokens.
        room: sequences that its queue would take; None for any number.
        refusal: of every request.
        seen, aborted: what came in.
        running: ids of requests in flight.
    """

    answer: str = "Hello!"
    max_model_len: int = 64
    default_sampling_params: SamplingParams = field(default_factory=SamplingParams)
    errored: bool = False
    tokenizer: FakeTokenizer | None = field(default_factory=FakeTokenizer)
    ends_with: str = "stop"
    stop_reason: int | str | None = None
    fails_after: int | None = None
    pause: float = 0.0
    room: int | None = None
    refusal: Overloaded | None = None
    seen: list[Seen] = field(default_factory=list)
    searched: list[BeamSearchParams] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    num_tokens: int = 0
    num_waiting: int = 0
    num_deferred: int = 0
    pages: bytes = bytes([2] * 10 + [3] * 5 + [1] * 10 + [0] * 75)
    about: About = field(default_factory=lambda: ABOUT)

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.seen.append(Seen(prompt, params, request_id, priority, cache_salt, terms))
        self._check(prompt)
        self.running.add(request_id)
        try:
            async for output in self._outputs(prompt, params, request_id):
                yield output
        finally:
            if request_id in self.running:
                self.aborted.append(request_id)  # first: who sees it run no more looks here
                self.running.discard(request_id)

    async def _outputs(
        self, prompt: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        times = RequestMetrics(time.time(), time.time())
        sequences = [CompletionOutput(index) for index in range(params.n)]
        answer = self._answer(prompt, params)
        prompt_logprobs = self._prompt_logprobs(prompt, params)
        for position, (token, text) in enumerate(answer):
            await asyncio.sleep(self.pause)
            if position == self.fails_after:
                self.errored = True
                raise EngineDead("the device is gone")
            self.num_tokens += 1
            reason = "length" if position + 1 == params.max_tokens else self.ends_with
            if request_id in self.aborted:
                reason = "abort"
            ended = position + 1 == len(answer) or reason == "abort"
            times.first_token_time = times.first_token_time or time.time()
            times.finished_time = time.time() if ended else None
            for sequence in sequences:
                _extend(sequence, token, text, params, reason if ended else None)
                sequence.stop_reason = self.stop_reason if ended else None
            if ended:
                self.running.discard(request_id)
            if params.output_kind is RequestOutputKind.DELTA or ended:
                yield RequestOutput(
                    request_id,
                    None,
                    prompt,
                    prompt_logprobs,
                    sequences,
                    ended,
                    1,
                    times,
                    time.monotonic(),
                )
            if params.output_kind is RequestOutputKind.DELTA:
                sequences = [CompletionOutput(index) for index in range(params.n)]
                prompt_logprobs = None
            if ended:
                break

    async def beam_search(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> RequestOutput:
        self.searched.append(params)
        self._check(prompt)
        sequences = [
            CompletionOutput(index, f"{index}: {self.answer}", [1, 2], -index, None, "stop")
            for index in range(params.beam_width)
        ]
        times = RequestMetrics(time.time(), time.time(), time.time(), time.time())
        return RequestOutput(request_id, None, prompt, None, sequences, True, 1, times)

    @property
    def trouble(self) -> str | None:
        return "has stopped; see the server's log" if self.errored else None

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def look(self) -> EngineState:
        sequences = [
            SequenceState(name, 0, "running", slot, 0, 1.0, 3, 2, 6, 4, 1, 0, 1, 0, [[1]])
            for slot, name in enumerate(sorted(self.running))
        ]
        steps = [StepState("decode_4", 1, 1, 0.01)]
        return EngineState(sequences, self.pages, steps, ProcessState.here())

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.running),
            num_waiting=self.num_waiting if self.room is None else 7,
            num_deferred=self.num_deferred,
            room=self.room,
            retry_after=2.4,
            kv_cache_usage=0.25,
            num_pages=100,
            num_free_pages=75,
            num_cached_pages=10,
            page_size=16,
            kv_waste=0.125,
            prompt_tokens=sum(len(seen.prompt) - 1 for seen in self.seen),
            prompt_tokens_admitted=sum(len(seen.prompt) for seen in self.seen),
            prompt_tokens_cached=len(self.seen),
            generation_tokens=self.num_tokens,
            prefix_cache_queries=40,
            prefix_cache_hits=30,
            host_queries=10,
            host_hits=4,
            num_host_pages=50,
            num_used_host_pages=20,
            host_bytes_saved=2**40,
            host_bytes_loaded=2**30,
            num_disk_pages=60,
            disk_pages_read=6,
            disk_pages_left_out=3,
            num_preemptions=2,
            num_steps=7,
            compiles_after_warmup=0,
            bytes_per_page=160,
            steps=STEPS,
            transfer=TransferStats(
                num_connected=1,
                num_under_way=3,
                num_served=2,
                outcomes={"done": 4, "lost": 1},
                bytes_received=2**20,
                seconds=1.5,
                served={"done": 5},
                bytes_sent=2**21,
            ),
        )

    def shutdown(self) -> None:
        self.running.clear()

    def _check(self, prompt: list[int]) -> None:
        if self.errored:
            raise EngineDead("the device is gone")
        if self.refusal is not None:
            raise self.refusal
        if not 0 < len(prompt) < self.max_model_len:
            raise InvalidRequest(f"a prompt of {len(prompt)} tokens", "prompt")
        if not all(0 <= token < VOCAB_SIZE for token in prompt):
            raise InvalidRequest("a token out of the vocabulary", "prompt")

    def _answer(self, prompt: list[int], params: SamplingParams) -> list[tuple[int, str]]:
        room = self.max_model_len - len(prompt)
        tokens = self.answer.encode("latin-1")[: min(params.max_tokens or room, room)]
        return [(token, chr(token)) for token in tokens]

    def _prompt_logprobs(
        self, prompt: list[int], params: SamplingParams
    ) -> list[TokenLogprobs | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(candidates(token, params.prompt_logprobs) for token in prompt[1:])]


def candidates(token: int, num_top: int) -> TokenLogprobs:
    """The chosen token is the third most likely, the last of the others impossible."""
    others = [(token + offset) % VOCAB_SIZE for offset in range(1, num_top + 1)]
    ranks = [rank for rank in range(1, num_top + 2) if rank != 3][:num_top]
    found = {token: Logprob(-3.0, 3, chr(token))}
    for other, rank in zip(others, ranks, strict=True):
        logprob = -math.inf if rank > 3 else -float(rank)
        found[other] = Logprob(logprob, rank, chr(other))
    return found


def _extend(
    sequence: CompletionOutput, token: int, text: str, params: SamplingParams, reason: str | None
) -> None:
    sequence.text += text
    sequence.token_ids.append(token)
    if params.logprobs is not None:
        sequence.logprobs = [*(sequence.logprobs or []), candidates(token, params.logprobs)]
        sequence.cumulative_logprob = -3.0 * len(sequence.logprobs)
    sequence.finish_reason = reason


@contextlib.contextmanager
def serving(app: Starlette, **options: Any) -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = server_config(app, ServeOptions(shutdown_timeout=0, **options))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def events(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end in [DONE]."""
    *chunks, done = [line for line in text.split("\n\n") if line]
    assert done == "data: [DONE]"
    return [msgspec.json.decode(chunk.removeprefix("data: ")) for chunk in chunks]


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which must say twice what it is."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(msgspec.json.decode(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def client_of(engine: FakeEngine) -> TestClient:
    """A client of a server that reads reasoning and calls out of the engine's answers."""
    app = create_app(engine, ["tiny"], answers=AnswerFormat("hermes", "qwen3", auto=True))
    return TestClient(app, raise_server_exceptions=False)


def answer_of(form: StructuredOutputsParams | None) -> Any:
    """The schema of a form, behind what may come before it."""
    assert form is not None
    assert isinstance(form.structural_tag, dict)
    return form.structural_tag["format"]["elements"][1]["json_schema"]
