"""Every family through the engine, and a model that depends on a flag."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.cache import KV_DTYPES, CacheSpec
from paged.models.loading import ModelSource, resolve_model
from paged.runtime import setup
from paged.runtime.compiler import Compiler
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.messages import SequenceOutput
from paged.runtime.scheduler import SchedulerConfig
from tests.models.harness import load_golden, one_golden_a_family, write_checkpoint
from tests.runtime.test_core import FLAGS, drain, make_core, make_request

pytestmark = pytest.mark.usefixtures("few_programs")

LENGTH = 57 + 16  # of every golden: its prompt and its continuation
# Each family with pages of one size: all of them would compile for many minutes.
SIZES = dict(zip(one_golden_a_family(), cycle((8, 16, 32)), strict=False))
QUICK = ("gemma3", "qwen3_moe")


def tight_core(source: ModelSource, page_size: int, compile_cache: str) -> EngineCore:
    """An engine whose pages hold the prompts of two sequences, and not their answers as well."""
    config = source.config
    spec = CacheSpec(
        num_layers=config.num_layers,
        num_pages=1,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=KV_DTYPES["float32"],
        latent_rank=config.latent_rank,
    )
    # Without some pages over, the second sequence would wait for the first to end.
    pages = 1 + 2 * -(-57 // page_size) + SchedulerConfig.growth_steps // page_size
    return make_core(
        source,
        compile_cache,
        block_size=page_size,
        kv_cache_memory_bytes=pages * spec.bytes_per_page,
        max_model_len=LENGTH + 1,
        max_num_batched_tokens=16,
        max_num_seqs=2,
    )


def check(news: list[SequenceOutput], golden: dict[str, Any], *, scored: bool = False) -> None:
    """The news of one request against what transformers says."""
    tokens = [token for item in news for token in item.token_ids]
    assert tokens == golden["greedy"]
    found = [each.logprob for item in news for each in item.logprobs or ()]
    expected = golden["greedy_logprobs"]
    if scored:
        found = [each.logprob for item in news for each in item.prompt_logprobs or ()] + found
        expected = golden["prompt_logprobs"] + expected
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        pytest.param(name, size, marks=() if name in QUICK else pytest.mark.slow)
        for name, size in SIZES.items()
    ],
)
def test_the_engine_answers_as_transformers_does(
    name: str, page_size: int, tmp_path: Path, compile_cache: str
) -> None:
    """In chunks, from the prefix cache, and after the pages were given to another."""
    golden = load_golden(name)
    source = resolve_model(write_checkpoint(tmp_path, golden))
    core = tight_core(source, page_size, compile_cache)
    asked: dict[str, Any] = {"max_tokens": len(golden["greedy"]), "logprobs": 0}

    core.add(make_request("scored", golden["prompt"], prompt_logprobs=0, **asked))
    check(drain(core), golden, scored=True)

    core.add(make_request("again", golden["prompt"], **asked))
    news = drain(core)
    assert news[0].num_cached_tokens >= 32, "nothing was found in the prefix cache"
    check(news, golden)

    core.reset_prefix_cache()
    core.add(make_request("other", golden["prompt"][::-1], **asked))
    core.add(make_request("last", golden["prompt"], **asked))
    check([item for item in drain(core) if item.request_id == "last"], golden)
    if not any(source.config.windows):
        assert core.stats().num_preemptions > 0, "the pages were enough for both"
    core.close()


@pytest.mark.parametrize(
    ("max_model_len", "factors"), [(128, "short_factor"), (129, "long_factor")]
)
def test_longrope_turns_as_the_longest_sequence_asks(
    max_model_len: int, factors: str, tmp_path: Path
) -> None:
    """The first training of this one was on 128 tokens."""
    golden = load_golden("phi3_longrope_short_tied")
    source = resolve_model(write_checkpoint(tmp_path, golden))
    config = EngineConfig(**FLAGS, max_model_len=max_model_len)
    with Compiler() as compiler:
        part = setup._Part(None, jax.devices()[:1], compiler)
        dtype = jnp.dtype(jnp.float32)
        shapes, _ = setup._divide_memory(config, source, part, dtype, progress=False)
    assert shapes.model.rope_scaling is not None
    assert list(shapes.model.rope_scaling.divisors) == golden["config"]["rope_parameters"][factors]
