"""`LLM`: a model for scripts and notebooks, driven in the caller's own thread."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import index
from typing import Any, Self, cast

from tqdm import tqdm

from paged.models.chat_template import Message, Tool
from paged.models.tokenizer import Tokenizer
from paged.runtime.about import About
from paged.runtime.beam_search import BeamSearchParams, begin_search
from paged.runtime.engine import Engine, engine_config, load_engine
from paged.runtime.errors import ConfigError, InvalidRequest
from paged.runtime.front import Front, Prepared, Prompt
from paged.runtime.interrupts import deferred_interrupts
from paged.runtime.messages import EngineStats
from paged.runtime.outputs import RequestOutput
from paged.runtime.pooling.comparison import pair_up
from paged.runtime.pooling.engine import PoolingEngine, wants_pooling
from paged.runtime.pooling.outputs import EmbeddingRequestOutput, ScoringRequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams


class LLM:
    """A model that answers batches of prompts.

        with LLM("path/to/model", max_model_len=4096) as llm:
            for output in llm.generate(["The sky is", "Grass is"]):
                print(output.outputs[0].text)

    Models for embeddings and scores answer `embed` and `score` instead.

    Calls from several threads take turns. Without `close` or `with`, the interpreter's exit closes
    it.

    Args:
        model: folder, GGUF file or hub id; without one, the embedded SmolLM2-135M-Instruct.
        flags: the fields of `EngineConfig`.

    Raises:
        TypeError: a keyword that is no flag; the message suggests the nearest one.
        ConfigError: flags that do not go together or do not fit the device.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        self.config = engine_config(model, flags)
        if self.config.kv_transfer_port is not None:
            raise ConfigError(
                "--kv-transfer-port needs an engine that runs by itself: use `paged serve` or "
                "AsyncEngine"
            )
        self._ids = itertools.count()
        self._turn = threading.Lock()
        self._loaded: Engine | PoolingEngine
        if wants_pooling(self.config):
            self._loaded = PoolingEngine.from_config(self.config)
            close = self._loaded.shutdown
        else:
            self._loaded = load_engine(self.config)
            close = self._loaded.close
        self._close = weakref.finalize(self, close)  # at exit, too

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; the results come in their order.

        Args:
            prompts: one or many: text, token ids, or a dict with "prompt" or "prompt_token_ids".
            sampling_params: one for all or one each; default the model's own.
            use_tqdm: show progress.
            priority: one for all or one each; lower goes first, under the priority policy.

        Raises:
            InvalidRequest: a prompt that can never run; none was started then.
            EngineDead: the device failed, now or before.
        """
        many = _list_of_prompts(prompts)
        params = _one_each(sampling_params, len(many), "sampling_params")
        prepared = self._front.prepare_all(
            [str(next(self._ids)) for _ in many],
            many,
            [None if each is None else _final_only(each) for each in params],
            [each or 0 for each in _one_each(priority, len(many), "priority")],
        )
        return self._run(prepared, use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The likeliest continuations of each prompt, best first; see `generate` for the rest.

        A result's sequences are ranked by `cumulative_logprob / len(token_ids) ** length_penalty`.
        """
        many, front = _list_of_prompts(prompts), self._front
        ids = [str(next(self._ids)) for _ in many]
        whole = front.prepare_all(ids, many, [params.whole] * len(many), [0] * len(many))
        searches = [begin_search(front, prepared, params) for prepared in whole]
        with tqdm(total=len(many), desc="Beam search", disable=not use_tqdm) as progress:
            while running := [search for search in searches if search.alive]:
                progress.update(len(many) - len(running) - progress.n)
                asked = [search.prompts() for search in running]
                flat = [prompt for each in asked for prompt in each]
                answers = iter(self.generate(flat, params.one_token, use_tqdm=False))
                for search, each in zip(running, asked, strict=True):
                    search.advance(list(itertools.islice(answers, len(each))))
            progress.update(len(many) - progress.n)
        return [search.result(front.tokenizer) for search in searches]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many; see `generate` for the rest.

        Args:
            messages: dicts with "role" and "content".
            chat_template: Jinja source, instead of the model's.
            add_generation_prompt: open a new message of the assistant.
            continue_final_message: go on with the last message instead.
            tools: JSON schemas of functions.
            chat_template_kwargs: further names that the template reads.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        prompts = self._front.chat_prompts(
            cast(Sequence[Sequence[Message]], [messages] if is_one else messages),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **(chat_template_kwargs or {}),
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        dimensions: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in their order.

        Args:
            prompts: see `generate`.
            use_tqdm: show progress.
            truncate_prompt_tokens: most tokens that a prompt keeps, special ones included; -1 for
                as many as the model takes. None refuses longer prompts.
            dimensions: to which the vectors are cut, if the model was trained for that.

        Raises:
            InvalidRequest: a prompt that cannot be embedded; none was then.
            EngineDead: the device failed, now or before.
        """
        engine = self._pooling_engine
        texts = engine.reader.texts(_list_of_prompts(prompts), truncate_prompt_tokens)
        with tqdm(total=len(texts), desc="Embedding", disable=not use_tqdm) as progress:
            return _result(engine.embed(texts, dimensions, progress.update)) if texts else []

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each document answers its query, or the one query; see `embed` for the rest.

        Cross-encoders read both texts together; of other models it is the cosine of two vectors.
        """
        pairs = pair_up(queries, documents)
        comparison = self._pooling_engine.compare(pairs, truncate_prompt_tokens)
        total = len(comparison.texts)
        with tqdm(total=total, desc="Scoring", disable=not use_tqdm) as progress:
            return _result(self._pooling_engine.score(comparison, progress.update))

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RuntimeError under skip_tokenizer_init."""
        loaded = self._loaded
        front = loaded.reader if isinstance(loaded, PoolingEngine) else loaded.front
        tokenizer = front.tokenizer
        if tokenizer is None:
            raise RuntimeError("the engine was started with skip_tokenizer_init")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without parameters: those of the model's generation_config.json."""
        return self._engine.front.default_params

    def get_metrics(self) -> EngineStats:
        return self._loaded.stats()

    @property
    def about(self) -> About:
        """Where its memory went, and how long its start took."""
        about = self._engine.about
        assert about is not None, "an engine that was loaded here tells of itself"
        return about

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages."""
        with self._turn:
            return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Free the device's memory; `generate` raises EngineDead from then on. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def _engine(self) -> Engine:
        if isinstance(self._loaded, PoolingEngine):
            raise InvalidRequest(
                "this model gives embeddings or scores, not text: use embed or score"
            )
        return self._loaded

    @property
    def _pooling_engine(self) -> PoolingEngine:
        if isinstance(self._loaded, Engine):
            raise InvalidRequest(
                'this model makes text: load it with runner="pooling" for embeddings'
            )
        return self._loaded

    @property
    def _front(self) -> Front:
        """The engine's, asking for final outputs only."""
        front = self._engine.front
        return replace(front, default_params=_final_only(front.default_params))

    def _run(self, prepared: list[Prepared], use_tqdm: bool) -> list[RequestOutput]:
        engine = self._engine
        done: dict[str, RequestOutput] = {}
        progress = tqdm(total=len(prepared), desc="Requests", disable=not use_tqdm)
        with self._turn, progress, deferred_interrupts() as let_through:
            try:
                for each in prepared:
                    engine.add(each)
                while engine.has_work:
                    let_through()
                    outputs = engine.step()
                    done |= {output.request_id: output for output in outputs}
                    progress.update(len(outputs))
            except BaseException:
                engine.abort(engine.request_ids)
                raise
        return [done[each.request.request_id] for each in prepared]


def _result[T](future: Future[T]) -> T:
    """The result, or what ended the wait for it: the request ends too then."""
    try:
        return future.result()
    finally:
        future.cancel()


def _final_only(params: SamplingParams) -> SamplingParams:
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _list_of_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Text, a dict and a list of integers are one prompt; any other list is many."""
    if isinstance(prompts, str | bytes | Mapping):
        return [prompts]
    try:
        is_one = len(prompts) > 0 and _is_token_id(prompts[0])
    except TypeError:
        raise InvalidRequest(
            "prompts must be text, token ids, a dict, or a list of these, got a "
            f"{type(prompts).__name__}"
        ) from None
    return [cast(Prompt, prompts)] if is_one else list(cast(Sequence[Prompt], prompts))


def _is_token_id(value: object) -> bool:
    """Whether it is one number; an array has what makes an index of one, but may hold many."""
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


def _one_each[T](value: T | Sequence[T] | None, number: int, name: str) -> list[T | None]:
    """A list of `number` values, from one for all or one each."""
    if not isinstance(value, Sequence):
        return [value] * number
    if len(value) != number:
        raise InvalidRequest(f"{name} has {len(value)} entries for {number} prompts", name)
    return list(value)
