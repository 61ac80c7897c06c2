"""The benchmark of attention over latents, as far as it goes without a GPU."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import latent_attention
from benchmarks.floors import Ceilings
from benchmarks.gpu import random
from benchmarks.latent_attention import Case, attend, relative_error

CARD = Ceilings(bytes_per_second=4e12, flop_per_second=8e14)


def test_few_heads_are_bound_by_memory_and_many_by_products() -> None:
    few, many = Case(16, 32, 1, 4095), Case(128, 32, 1, 4095)
    assert few.bytes == many.bytes == 32 * 4096 * 576 * 2
    assert few.floor(CARD) == few.bytes / 4e12
    assert many.floor(CARD) == many.flop / 8e14 > few.floor(CARD)
    assert Case(1, 1, 3, 10).flop == 2 * (576 + 512) * (11 + 12 + 13)


@pytest.mark.parametrize("case", [Case(16, 2, 1, 40), Case(16, 1, 24, 16)], ids=lambda c: c.name)
def test_what_is_timed_is_attention(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_attention, "POOL_TOKENS", 2000)
    pool = latent_attention.make_pool()
    tables = jnp.asarray(np.random.default_rng(0).integers(1, 125, case.table.shape), jnp.int32)
    q = random(1, (case.rows * case.query, case.heads, latent_attention.ROW))
    [out] = attend(q, pool, [tables], case=case, backend="xla")
    assert out.shape == (case.rows * case.query, case.heads, latent_attention.RANK)
    assert relative_error(case, out, q, pool, tables) < 0.01
