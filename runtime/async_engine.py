"""`AsyncEngine`: any number of requests at once, for programs that run an event loop."""

from __future__ import annotations

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

from msgspec.structs import replace

from paged.models.tokenizer import Tokenizer
from paged.runtime.beam_search import BeamSearchParams, begin_search
from paged.runtime.config import EngineConfig
from paged.runtime.engine import LoadedCore, engine_config, load_again, load_engine
from paged.runtime.engine_state import EngineState
from paged.runtime.engine_thread import EngineThread, Stream
from paged.runtime.errors import (
    DeadlineExceeded,
    EngineDead,
    EngineRestarting,
    InvalidRequest,
    Overloaded,
)
from paged.runtime.front import Front, Prepared, Prompt, TokensPrompt
from paged.runtime.keeper import Keeper, Keeping
from paged.runtime.long_text import without_hurry
from paged.runtime.messages import EngineStats, Refusal, Terms
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import SamplingParams


class AsyncEngine:
    """A model that serves requests as they come.

        engine = AsyncEngine("path/to/model")
        async for output in engine.generate("The sky is", SamplingParams()):
            print(output.outputs[0].text)

    The engine steps in a thread of its own. Methods may be called from any event loop.

    Args:
        model: folder, GGUF file or hub id; without one, the embedded SmolLM2-135M-Instruct.
        separate_process: whether device and scheduler run in a process of their own, so that busy
            callers of this one do not slow them.
        make_core: what finds the core in another way, such as one that runs already.
        keeping: what is done when the core's process dies or hangs; None to let the engine die.
        flags: the fields of `EngineConfig`.

    Attributes:
        config: what it was told.
        about: where its memory went, and how long its start took.

    Raises:
        TypeError: a keyword that is no flag; the message suggests the nearest one.
        ConfigError: flags that do not go together or do not fit the device.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        separate_process: bool = False,
        make_core: Callable[[EngineConfig], LoadedCore] | None = None,
        keeping: Keeping | None = None,
        **flags: Any,
    ) -> None:
        self.config = engine_config(model, flags)
        engine = load_engine(self.config, separate_process=separate_process, make_core=make_core)
        self.about = engine.about
        again = partial(load_again, self.config, engine.front, make_core)
        self._keeper = Keeper(EngineThread(engine), lambda: EngineThread(again()), keeping)
        # At interpreter exit, while JAX is still there, and when nobody holds the engine.
        self._shutdown = weakref.finalize(self, self._keeper.shutdown)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        separate_process: bool = False,
        make_core: Callable[[EngineConfig], LoadedCore] | None = None,
        keeping: Keeping | None = None,
    ) -> AsyncEngine:
        flags = vars(config)
        return cls(separate_process=separate_process, make_core=make_core, keeping=keeping, **flags)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under skip_tokenizer_init."""
        return self._front.tokenizer

    @property
    def _front(self) -> Front:
        return self._keeper.thread.front

    @property
    def max_model_len(self) -> int:
        return self._front.max_model_len

    @property
    def default_sampling_params(self) -> SamplingParams:
        """Those of requests without parameters, from the model's generation_config.json."""
        return self._front.default_params

    @property
    def is_running(self) -> bool:
        return self._keeper.thread.is_running

    @property
    def errored(self) -> bool:
        """Whether the engine has died for good."""
        return self._keeper.errored

    @property
    def dead_error(self) -> EngineDead | None:
        """What the engine died of; None while it lives and after a shutdown."""
        return self._keeper.thread.dead_error

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served now, None if they can: what follows "The engine"."""
        return self._keeper.trouble

    def stats(self) -> EngineStats:
        """As of the last step."""
        return replace(self._keeper.thread.stats, num_restarts=self._keeper.num_restarts)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield a request's outputs until it is finished.

        Leaving early, by `break`, `aclose` or cancellation, aborts the request. A slow consumer
        delays nobody: outputs that came meanwhile are joined into one.

        Args:
            prompt: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            params: default the model's own.
            request_id: unique among running requests; default a random one.
            priority: lower goes first, under the priority policy.
            cache_salt: keeps prefix cache entries apart from those with other salts.
            terms: its deadline, and what the queue must have room for; default no deadline, and
                room for the request.

        Raises:
            InvalidRequest: before the first output, if the request can never run.
            Overloaded: before the first output, if the queue has no room for it, or would keep it
                beyond its deadline.
            DeadlineExceeded: before the first output, if that has passed already.
            EngineDead: the engine died or was shut down.
            EngineRestarting: it died, and another one is being started.
        """
        self._keeper.living()
        request_id = request_id or uuid.uuid4().hex
        prepared = await self._prepare(request_id, prompt, params, priority, cache_salt)
        thread = self._keeper.living()
        stream = Stream(_on_terms(prepared, terms))
        thread.start(stream)
        finished = False
        try:
            while not finished:
                output = await self._next(stream)
                finished = output.finished
                if output.refusal is not None:
                    raise _error_of(output.refusal)
                yield output
        finally:
            if not finished:
                thread.leave(stream)

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        terms: Terms | None = None,
    ) -> RequestOutput:
        """The likeliest continuations, best first; see `generate` for the arguments.

        Being cancelled ends it; `abort` knows nothing of it.

        Raises:
            DeadlineExceeded: its deadline passed.
        """
        request_id = request_id or uuid.uuid4().hex
        prepared = await self._prepare(request_id, prompt, params.whole, priority, cache_salt)
        search = begin_search(self._front, prepared, params)
        num_tokens = len(prepared.request.prompt_token_ids)
        # The queue is asked once, for all beams: a search that has begun goes on.
        terms = terms or Terms(0.0, params.beam_width, num_tokens)

        async def answer(index: int, beam: TokensPrompt, terms: Terms) -> RequestOutput:
            name = f"{request_id}-{index}"
            outputs = self.generate(beam, params.one_token, name, priority=priority, terms=terms)
            async with aclosing(outputs):
                return _in_time(await anext(outputs))

        while asked := search.prompts():
            steps = (answer(index, beam, terms) for index, beam in enumerate(asked))
            try:
                search.advance(await asyncio.gather(*steps))
            except Overloaded as error:
                if terms.num_sequences:
                    raise
                raise DeadlineExceeded(str(error)) from error
            terms = Terms(terms.deadline)
        return search.result(self.tokenizer)

    async def abort(self, request_id: str) -> None:
        """End a request: its last output comes with finish_reason "abort".

        An id that is not running is ignored.
        """
        with suppress(EngineDead):
            # Shielded: a caller that is cancelled meanwhile still wants the request gone.
            await asyncio.shield(asyncio.wrap_future(self._keeper.thread.abort(request_id)))

    async def look(self) -> EngineState:
        """A close look at the engine, between two steps. Raises EngineDead."""
        return await asyncio.wrap_future(self._keeper.living().look())

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while requests use pages."""
        call = self._keeper.living().call(lambda engine: engine.reset_prefix_cache())
        return await asyncio.wrap_future(call)

    def shutdown(self) -> None:
        """End running requests with finish_reason "abort" and free the device. Idempotent."""
        self._shutdown()

    async def _next(self, stream: Stream) -> RequestOutput:
        try:
            return await stream.get()
        except EngineDead as error:
            if self._keeper.is_restarting:
                raise EngineRestarting(str(error)) from error
            raise

    async def _prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int,
        cache_salt: str,
    ) -> Prepared:
        def prepare() -> Prepared:
            return self._front.prepare(
                request_id, prompt, params, priority=priority, cache_salt=cache_salt
            )

        if params is not None and params.structured_outputs is not None:
            return await asyncio.to_thread(prepare)  # a large schema takes a while to check
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return await without_hurry(len(text) if isinstance(text, str) else 0, prepare)


def _on_terms(prepared: Prepared, terms: Terms | None) -> Prepared:
    """The request on these terms; by default room for it must be there."""
    request = prepared.request
    terms = terms or Terms(0.0, request.params.n, len(request.prompt_token_ids))
    return prepared._replace(request=replace(request, terms=terms))


def _error_of(refusal: Refusal) -> Exception:
    if refusal.cause == "size":
        return InvalidRequest(refusal.message, "n")
    if not refusal.retry_after:
        return DeadlineExceeded(refusal.message)
    return Overloaded(refusal.message, refusal.cause, refusal.retry_after)


def _in_time(output: RequestOutput) -> RequestOutput:
    """The same output. Raises DeadlineExceeded if a deadline has ended it."""
    if any(each.finish_reason == "timeout" for each in output.outputs):
        raise DeadlineExceeded("The request was not answered within its time")
    return output
