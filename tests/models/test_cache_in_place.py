"""The compiled step writes the donated cache in place: no copy of any layer's pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged.cache import KV_DTYPES, PagedKVCache
from paged.models.loading.dummy import random_params
from paged.models.registry import get_family, model_config
from tests.models.harness import load_golden, run_step


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        *((name, dtype) for name in ("llama", "qwen3") for dtype in ("float32", "fp8", "int8")),
        ("deepseek_v3", "float32"),
    ],
)
@pytest.mark.parametrize("num_tokens", [4, 32])
def test_step_never_copies_pages(name, num_tokens, kv_dtype):
    config = model_config(load_golden(name)["config"])
    spec = config.cache_spec(4099, 16, KV_DTYPES[kv_dtype])
    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    params = random_params(get_family(config.architecture).specs(config), jnp.dtype(jnp.float32))
    compiled = run_step.lower(
        params,
        PagedKVCache.shapes(spec),
        jax.ShapeDtypeStruct((num_tokens,), jnp.int32),
        jax.ShapeDtypeStruct((4, 64), jnp.int32),
        rows,
        rows,
        rows,
        config=config,
        page_size=spec.page_size,
        decode_only=num_tokens == 4,
    ).compile()

    cache_bytes = spec.bytes_per_page * spec.num_pages
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 20
    copies = [line for line in text.splitlines() if " copy(" in line]
    assert not [line for line in copies if "4099" in line or str(4099 * 16) in line]
