"""What the doors need from an engine. `AsyncEngine` is one; tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from paged.runtime.about import About
from paged.runtime.beam_search import BeamSearchParams
from paged.runtime.engine_state import EngineState
from paged.runtime.messages import EngineStats, Terms
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import SamplingParams

ChatMessage = dict[str, Any]
"""A message as chat templates read it: role, content, and what else the template knows."""


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    @property
    def chat_templates(self) -> Mapping[str, str]: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str: ...


class AnyEngine(Protocol):
    """What engines for text and those for vectors have in common."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def errored(self) -> bool:
        """Whether it has died for good."""

    @property
    def trouble(self) -> str | None:
        """Why it cannot serve now, None if it can: what follows "The engine"."""

    @property
    def about(self) -> About | None: ...

    def stats(self) -> EngineStats: ...

    def shutdown(self) -> None: ...


class Engine(AnyEngine, Protocol):
    """An engine that takes any number of requests at once.

    `generate` raises InvalidRequest before its first output if the request can never run,
    Overloaded if it cannot on its terms, and EngineDead if the engine has stopped. Closing it early
    aborts the request. `abort` makes it give a last output, with finish_reason "abort"; an id that
    is not running is ignored. `beam_search` raises the same, and DeadlineExceeded, and ends when it
    is cancelled.
    """

    @property
    def default_sampling_params(self) -> SamplingParams: ...

    def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> AsyncGenerator[RequestOutput, None]: ...

    async def beam_search(
        self,
        prompt: list[int],
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> RequestOutput: ...

    async def abort(self, request_id: str) -> None: ...

    async def look(self) -> EngineState: ...
