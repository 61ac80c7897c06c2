"""A core without a device, and a small tokenizer, for tests of everything around the core."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paged.models.tokenizer import Tokenizer
from paged.runtime.engine import Engine
from paged.runtime.engine_state import EngineState, ProcessState
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.front import Front
from paged.runtime.messages import Candidates, EngineRequest, EngineStats, SequenceOutput
from paged.runtime.sampling_params import SamplingParams

EOS = 256
VOCAB_SIZE = 300  # some more than the tokenizer knows, as padded models have
MAX_MODEL_LEN = 200
TEMPLATE = (
    "{% for m in messages %}<user>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The printable character that byte-level vocabularies write for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    moved = {byte: chr(256 + place) for place, byte in enumerate(rest)}
    return [moved.get(byte, chr(byte)) for byte in range(256)]


def byte_tokenizer() -> Tokenizer:
    """Token ids are bytes; 256 is <eos> and 257 <user>."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<user>")])
    return Tokenizer(
        backend, special_tokens={"eos_token": "<eos>"}, chat_templates={"default": TEMPLATE}
    )


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    """A folder whose model has these settings, and the small tokenizer; without weights."""
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def echo(request: EngineRequest, index: int, position: int) -> int:
    """The prompt again and again; sequence i starts i tokens later."""
    prompt = request.prompt_token_ids
    return prompt[(position + index) % len(prompt)]


def candidates(token: int, top: int) -> Candidates:
    """The token second best, after the ids that follow it."""
    best = [token + 1, token, *range(token + 2, token + 20)][:top]
    return Candidates(token, -2.0, 2, best, [-1.0 - rank for rank in range(top)])


@dataclass(eq=False)
class _Sequence:
    request: EngineRequest
    index: int
    num_launched: int = 0
    num_read: int = 0
    first_scheduled: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request.request_id, self.index


@dataclass(eq=False)
class FakeCore:
    """Keeps EngineCore's protocol: a step's tokens come back from the step after it.

    Attributes:
        next_token: gives the token of (request, index, position).
        dies_at: the step that fails, counted from 1.
        step_time: seconds that a step takes.
        on_step: called at the start of each step.
    """

    next_token: Callable[[EngineRequest, int, int], int] = echo
    dies_at: int | None = None
    step_time: float = 0.0
    on_step: Callable[[], None] = lambda: None
    num_steps: int = 0
    live: dict[tuple[str, int], _Sequence] = field(default_factory=dict)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    closed: bool = False
    _in_flight: list[tuple[_Sequence, int]] = field(default_factory=list)
    _dead: str | None = None

    @property
    def has_work(self) -> bool:
        return bool(self.live or self._in_flight or self._dead)

    def fileno(self) -> None:
        pass

    def add(self, request: EngineRequest) -> None:
        self._check_alive()
        if any(request_id == request.request_id for request_id, _ in self.live):
            raise InvalidRequest("request_id is in use", "request_id")
        for index in range(request.params.n):
            self.live[request.request_id, index] = _Sequence(request, index)

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        keys = [key for key in self.live if key[0] == request_id and index in (None, key[1])]
        for key in keys:
            del self.live[key]
        self.aborted += keys
        return [SequenceOutput(*key, [], finish_reason="abort") for key in keys]

    def step(self) -> list[SequenceOutput]:
        self._check_alive()
        self.num_steps += 1
        self.on_step()
        time.sleep(self.step_time)
        if self.num_steps == self.dies_at:
            return self._die("the device fell off")
        before, self._in_flight = self._in_flight, self._launch()
        return [self._read(*each) for each in before if self.live.get(each[0].key) is each[0]]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.live), num_steps=self.num_steps)

    def look(self, deliver: Callable[[EngineState], None]) -> None:
        deliver(EngineState([], bytes(self.num_steps), [], ProcessState.here()))

    def reset_prefix_cache(self) -> bool:
        return not self.live

    def kill(self, reason: str) -> None:
        pass

    def close(self) -> None:
        self.closed = True
        self.live.clear()
        self._dead = self._dead or "the engine was closed"

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineDead(self._dead)

    def _die(self, cause: str) -> list[SequenceOutput]:
        self._dead = cause
        ended = [SequenceOutput(*key, [], finish_reason="error", error=cause) for key in self.live]
        self.live.clear()
        self._in_flight.clear()
        return ended

    def _launch(self) -> list[tuple[_Sequence, int]]:
        launched = []
        for sequence in self.live.values():
            sequence.first_scheduled = sequence.first_scheduled or time.time()
            token = self.next_token(sequence.request, sequence.index, sequence.num_launched)
            launched.append((sequence, token))
            sequence.num_launched += 1
        return launched

    def _read(self, sequence: _Sequence, token: int) -> SequenceOutput:
        params, prompt = sequence.request.params, sequence.request.prompt_token_ids
        sequence.num_read += 1
        reason = _finish_reason(params, token, sequence.num_read)
        if reason is not None:
            del self.live[sequence.key]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and sequence.num_read == 1 and sequence.index == 0:
            prompt_logprobs = [candidates(each, params.prompt_logprobs) for each in prompt[1:]]
        return SequenceOutput(
            *sequence.key,
            token_ids=[token],
            logprobs=None if params.logprobs is None else [candidates(token, params.logprobs)],
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_reason=token if reason == "stop" and token != EOS else None,
            num_cached_tokens=3,
            first_scheduled_time=sequence.first_scheduled,
        )


def _finish_reason(params: SamplingParams, token: int, num_tokens: int) -> str | None:
    stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (EOS,))}
    if token in stops and num_tokens >= params.min_tokens:
        return "stop"
    return "length" if num_tokens == params.max_tokens else None


def front(**changes: Any) -> Front:
    """A front for the fake core."""
    settings: dict[str, Any] = {
        "tokenizer": byte_tokenizer(),
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "max_logprobs": 5,
        "default_params": SamplingParams(max_tokens=16),
    }
    return Front(**settings | changes)


def engine(core: FakeCore | None = None, **changes: Any) -> Engine:
    return Engine(core or FakeCore(), front(**changes))
