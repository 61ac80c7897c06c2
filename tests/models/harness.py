"""Tiny models on disk, and a way to run them over a paged cache without the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from paged.attention import BACKENDS, AttentionMetadata, attention_metadata
from paged.cache import KV_DTYPES, PagedKVCache
from paged.models.config import ModelConfig
from paged.models.mesh import gathered
from paged.models.registry import get_family
from tests.models.goldens.tiny_weights import tiny_weight

GOLDENS = Path(__file__).parent / "goldens"


def load_golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8"))


def one_golden_a_family() -> list[str]:
    """The first golden of each architecture, by name."""
    first: dict[str, str] = {}
    for path in sorted(GOLDENS.glob("*.json")):
        first.setdefault(load_golden(path.stem)["config"]["architectures"][0], path.stem)
    return sorted(first.values())


def tiny_tensors(golden: dict[str, Any]) -> dict[str, np.ndarray]:
    """The checkpoint of a golden: every tensor by name."""
    return {name: tiny_weight(name, tuple(shape)) for name, shape in golden["tensors"].items()}


def write_checkpoint(folder: Path, golden: dict[str, Any]) -> Path:
    """A Hugging Face folder with the model of a golden."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
    save_file(tiny_tensors(golden), folder / "model.safetensors")
    return folder


class Runner:
    """Runs steps of a model over a few sequences, each with pages of its own.

    Attributes:
        contexts: tokens in pages so far, by slot.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Any,
        *,
        num_slots: int = 2,
        page_size: int = 4,
        max_tokens: int = 96,
        kv_dtype: str = "float32",
        backend: str = "xla",
    ) -> None:
        pages = -(-max_tokens // page_size)
        self.spec = config.cache_spec(1 + num_slots * pages, page_size, KV_DTYPES[kv_dtype])
        self.config, self.params, self.backend = config.for_length(max_tokens), params, backend
        self.contexts = [0] * num_slots
        self._cache = PagedKVCache.zeros(self.spec)
        # Pages lie scattered and out of order, as a pool would hand them out.
        order = np.random.RandomState(0).permutation(num_slots * pages) + 1
        self._tables = jnp.asarray(order.reshape(num_slots, pages), jnp.int32)

    def step(
        self, rows: Mapping[int, Sequence[int]], *, num_tokens: int | None = None
    ) -> np.ndarray:
        """Feed each slot its next tokens; returns log-probabilities [T, V], row after row."""
        arrays, fixed = self._inputs(rows, num_tokens)
        run = run_step if jax.default_backend() == "cpu" else run_step_as_served
        logprobs, self._cache = run(self.params, self._cache, *arrays, **fixed)
        for slot, chunk in rows.items():
            self.contexts[slot] += len(chunk)
        return np.asarray(logprobs)[: sum(map(len, rows.values()))]

    def program(self, rows: Mapping[int, Sequence[int]], *, num_tokens: int | None = None) -> str:
        """What `step` runs, as compiled. Nothing is run."""
        arrays, fixed = self._inputs(rows, num_tokens)
        lowered = run_step_as_served.lower(self.params, self._cache, *arrays, **fixed)
        text = lowered.compile().as_text()
        assert text is not None
        return text

    def _inputs(
        self, rows: Mapping[int, Sequence[int]], num_tokens: int | None
    ) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
        """Arguments of a step: arrays, and what it is compiled for."""
        slots, chunks = list(rows), list(rows.values())
        tokens = np.concatenate([np.asarray(chunk, np.int32) for chunk in chunks])
        padded = num_tokens or len(tokens)
        arrays = (
            jnp.asarray(np.pad(tokens, (0, padded - len(tokens)))),
            self._tables,
            jnp.asarray(slots, jnp.int32),
            jnp.asarray([len(chunk) for chunk in chunks], jnp.int32),
            jnp.asarray([self.contexts[slot] for slot in slots], jnp.int32),
        )
        fixed = {
            "config": self.config,
            "page_size": self.spec.page_size,
            "decode_only": padded == len(tokens) and all(len(chunk) == 1 for chunk in chunks),
            "backend": self.backend,
        }
        return arrays, fixed


def step(
    params: Any,
    cache: PagedKVCache,
    tokens: jax.Array,
    tables: jax.Array,
    slots: jax.Array,
    query_len: jax.Array,
    context_len: jax.Array,
    *,
    config: ModelConfig,
    page_size: int,
    decode_only: bool,
    backend: str = "xla",
) -> tuple[jax.Array, PagedKVCache]:
    """Log-probabilities [T, V] of all tokens of a step, and the cache after it.

    The reference attends in small tiles, so that short chunks have several.
    """
    meta: AttentionMetadata = attention_metadata(
        tables,
        slots,
        query_len,
        context_len,
        num_tokens=tokens.shape[0],
        page_size=page_size,
        tile_size=8 if backend == "xla" else BACKENDS[backend]().tile_size,
        decode_only=decode_only,
        backend=backend,
    )
    family = get_family(config.architecture)
    hidden, cache = family.forward(params, config, tokens, cache, meta)
    logits = gathered(family.logits(params, config, hidden), config.vocab_size)
    return jax.nn.log_softmax(logits), cache


_jit = partial(
    jax.jit,
    static_argnames=("config", "page_size", "decode_only", "backend"),
    donate_argnames=("cache",),
)
# Compiling is most of what these tests do: on a CPU they ask for little optimisation.
run_step = _jit(step, compiler_options={"xla_backend_optimization_level": "0"})
run_step_as_served = _jit(step)
