"""`PoolingEngine`: embeddings and scores, for threads and event loops alike."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from msgspec.structs import replace

from paged.models.tokenizer import Tokenizer
from paged.runtime.config import EngineConfig
from paged.runtime.engine import find_model, load_tokenizer
from paged.runtime.errors import EngineDead
from paged.runtime.keeper import Keeper, Keeping
from paged.runtime.messages import EngineStats
from paged.runtime.pooling.abilities import Abilities
from paged.runtime.pooling.comparison import Comparison
from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringRequestOutput,
)
from paged.runtime.pooling.reader import Reader, Tokens
from paged.runtime.pooling.vectors import Vectors, normalized
from paged.runtime.pooling.waiting import Advance
from paged.runtime.pooling.worker import Runner, Worker


class PoolingEngine:
    """A model that gives embeddings or scores.

        engine = PoolingEngine.from_config(EngineConfig(model="path/to/encoder"))
        texts = engine.reader.texts(["The sky is blue", "Grass is green"])
        outputs = await asyncio.wrap_future(engine.embed(texts))

    Any number of requests may run at once, from any thread, and are computed together. Cancelling
    its future ends a request.

    Attributes:
        reader: makes the tokens that `embed` takes.
        abilities: what the model gives.
    """

    def __init__(
        self,
        reader: Reader,
        abilities: Abilities,
        runner: Runner,
        grid: Grid,
        *,
        max_waiting: int | None = None,
        max_waiting_tokens: int | None = None,
        again: Callable[[], Runner] | None = None,
        keeping: Keeping | None = None,
    ) -> None:
        self.reader = reader
        self.abilities = abilities

        def work(runner: Runner) -> Worker:
            return Worker(runner, grid, max_waiting, max_waiting_tokens)

        def work_again() -> Worker:
            assert again is not None, "what cannot be made again is not kept"
            return work(again())

        self._keeper = Keeper(work(runner), work_again, keeping)
        # At interpreter exit, while JAX is still there, and when nobody holds the engine.
        self._shutdown = weakref.finalize(self, self._keeper.shutdown)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        *,
        separate_process: bool = False,
        keeping: Keeping | None = None,
    ) -> Self:
        """Find the model, load and compile it.

        Args:
            separate_process: whether the device is for a process of its own; this one leaves it
                alone then.
            keeping: what is done when that dies or hangs; None to let the engine die.

        Raises:
            ConfigError: flags that do not go together or do not fit the device.
            ModelNotFoundError, CheckpointError, TokenizerError: see `paged.models`.
        """
        # Here, so that this module and its tests need no JAX.
        from paged.runtime.pooling.remote import prepare_apart
        from paged.runtime.pooling.setup import prepare_pooling

        source = find_model(config)
        tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config, source)
        apart = prepare_apart(config) if separate_process else None
        ready = apart or prepare_pooling(config, source)
        return cls(
            Reader(
                tokenizer=tokenizer,
                max_model_len=ready.max_model_len,
                vocab_size=source.config.vocab_size,
                lowercase=ready.lowercase,
            ),
            ready.abilities,
            ready.runner,
            ready.grid,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            again=lambda: prepare_apart(config).runner,
            keeping=keeping,
        )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under skip_tokenizer_init."""
        return self.reader.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.reader.max_model_len

    @property
    def errored(self) -> bool:
        """Whether the engine has died for good."""
        return self._keeper.errored

    @property
    def trouble(self) -> str | None:
        """Why requests cannot be served now, None if they can: what follows "The engine"."""
        return self._keeper.trouble

    @property
    def dead_error(self) -> EngineDead | None:
        """What the engine died of; None while it lives and after a shutdown."""
        return self._keeper.thread.dead_error

    @property
    def about(self) -> None:
        """It has no pages to tell of."""
        return None

    def stats(self) -> EngineStats:
        return replace(self._keeper.thread.stats(), num_restarts=self._keeper.num_restarts)

    def embed(
        self,
        texts: Sequence[Tokens],
        dimensions: int | None = None,
        advance: Advance = lambda number: None,
    ) -> Future[list[EmbeddingRequestOutput]]:
        """Embed one text or more; the outputs come in their order.

        Args:
            dimensions: to which the vectors are cut.

        Raises:
            InvalidRequest: the model gives no such vectors.
            EngineDead: the engine died or was shut down.
            EngineRestarting: it died, and another one is being started.
            Overloaded: too many texts wait.
        """
        self.abilities.check_embeds()
        self.abilities.check_dimensions(dimensions)
        renormalize = self.abilities.normalized and dimensions is not None

        def finish(vectors: Vectors) -> list[EmbeddingRequestOutput]:
            cut = vectors[:, :dimensions]
            if renormalize:
                cut = normalized(cut)
            return [
                EmbeddingRequestOutput(text.token_ids, EmbeddingOutput(vector))
                for text, vector in zip(texts, cut, strict=True)
            ]

        return self._keeper.living().submit(texts, finish, advance)

    def compare(self, pairs: Sequence[tuple[str, str]], truncate: int | None = None) -> Comparison:
        """Make one pair or more of texts ready to be scored. Raises as `reader` does."""
        if self.abilities.scores:
            return Comparison.by_classifier(self.reader, pairs, truncate)
        return Comparison.by_vectors(self.reader, pairs, truncate)

    def score(
        self, comparison: Comparison, advance: Advance = lambda number: None
    ) -> Future[list[ScoringRequestOutput]]:
        """Score what `compare` made; the outputs come in the order of the pairs.

        Raises:
            EngineDead: the engine died or was shut down.
            EngineRestarting: it died, and another one is being started.
            Overloaded: too many texts wait.
        """
        return self._keeper.living().submit(comparison.texts, comparison.outputs, advance)

    def shutdown(self) -> None:
        """End running requests with EngineDead and free the device. Idempotent."""
        self._shutdown()


def wants_pooling(config: EngineConfig) -> bool:
    """Whether the model of a configuration gives embeddings or scores.

    Raises:
        ConfigError: it cannot give the text that is asked of it.
        ModelNotFoundError: there is no such model.
    """
    if config.model is None:  # the embedded model makes text
        return config.runner == "pooling"
    from paged.runtime.pooling.setup import runs_pooling

    return runs_pooling(config, find_model(config))
