"""Products with weights of 4 and 8 bits, warpgroup by warpgroup in Pallas' interpreter."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.matmul import (
    FP8,
    INT4,
    Tiling,
    cuts,
    expanded,
    narrow_buffers,
    narrow_matmul,
    scaled_matmul,
    scaled_rows,
    supports_narrow,
    supports_scaled,
    tiling,
)
from paged.matmul.bricks import Kind
from paged.matmul.narrow_buffers import Plan, Shared
from paged.matmul.tiling import Cut

INTERPRETED = plgpu.InterpretGPUParams()
FLOAT8, INT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.int8)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few that each has several tiles."""
    for module in (narrow_buffers, cuts, tiling):
        monkeypatch.setattr(module, "MULTIPROCESSORS", 4)


def stored(kind: Kind, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """Values [N, K], and what they stand for."""
    rng = np.random.default_rng(0)
    if kind is INT4:
        values = jnp.asarray(rng.integers(0, 16, (n, k)), jnp.uint8)
        return values, values.astype(jnp.float32) - 8
    values = jnp.asarray(rng.normal(size=(n, k)), FLOAT8)
    return values, values.astype(jnp.float32)


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
def test_a_thread_finds_what_a_tensor_core_wants_of_it(kind: Kind) -> None:
    values, _ = stored(kind, 128, 192)
    plain = np.asarray(jax.lax.bitcast_convert_type(values, jnp.uint8))
    words = np.asarray(kind.words(values)).reshape(2, 3, -1, 128, 4)
    for thread, register in ((0, 0), (37, 5), (127, 15)):
        warp, lane = divmod(thread, 32)
        row, column = 16 * warp + lane // 4 + 8 * (register % 2), 2 * (lane % 4)
        step, half = register // 4, register // 2 % 2
        word, place = divmod(register, kind.values // 2)
        found = words[1, 2, word // 4, thread, word % 4] >> (place * kind.bits)
        for pair in range(2):
            at = plain[64 + row, 128 + 16 * step + 8 * half + column + pair]
            assert found >> (16 * pair) & (2**kind.bits - 1) == at
    np.testing.assert_array_equal(
        jax.lax.bitcast_convert_type(kind.values_of(kind.words(values)), jnp.uint8), plain
    )


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "group", "cut"),
    [
        (INT4, 1, 256, 128, 128, Cut()),
        (INT4, 8, 512, 320, 32, Cut(splits=3)),
        (FP8, 72, 256, 128, 64, Cut(warpgroups=1, depth=64)),
        (INT4, 13, 256, 192, 256, Cut(warpgroups=4)),
        (FP8, 3, 512, 64, 128, None),
        (INT4, 13, 512, 192, 128, Cut(splits=2, depth=256)),
        (FP8, 16, 256, 128, 64, Cut(warpgroups=1)),
        (INT4, 40, 256, 128, 128, None),
        (INT4, 2, 768, 128, 384, None),
        (INT4, 13, 256, 128, 256, Cut(warpgroups=1, depth=256)),
        (FP8, 8, 512, 64, 512, Cut(warpgroups=1, depth=256)),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_products_are_those_of_the_weight(
    kind: Kind, m: int, k: int, n: int, group: int, cut: Cut | None, zeros: bool
) -> None:
    rng = np.random.default_rng(1)
    values, meant = stored(kind, n, k)
    scale = jnp.asarray(rng.normal(size=(k // group, n)) / k**0.5, jnp.bfloat16)
    zero = jnp.asarray(rng.integers(-8, 8, scale.shape), jnp.bfloat16) if zeros else None
    if zero is not None:
        meant = meant - jnp.repeat(zero.astype(jnp.float32), group, axis=0).T
    meant = meant * jnp.repeat(scale.astype(jnp.float32), group, axis=0).T
    x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    words, out = kind.words(values), jnp.dtype(jnp.float32)
    found = narrow_matmul(x, words, scale, zero, out_dtype=out, cut=cut, interpret=INTERPRETED)
    exact = x.astype(jnp.float32) @ meant.T
    np.testing.assert_allclose(found, exact, rtol=0.01, atol=0.06)
    written = expanded(words, scale, zero, interpret=INTERPRETED)
    np.testing.assert_allclose(written.astype(jnp.float32), meant, rtol=0.01, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "m", "k", "n", "cut"),
    [
        (INT4, 1, 256, 256, Cut()),
        (INT4, 13, 256, 640, Cut(warpgroups=4)),  # one row of bricks is left for the last tile
        (FP8, 136, 256, 512, Cut(depth=64)),
        (INT4, 8, 512, 128, Cut(splits=3)),
        (FP8, 72, 256, 128, Cut(warpgroups=1)),
        (INT4, 3, 512, 128, None),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_gates_are_applied(
    kind: Kind, m: int, k: int, n: int, cut: Cut | None, zeros: bool
) -> None:
    rng = np.random.default_rng(2)
    values, meant = stored(kind, n, k)
    scale = jnp.asarray(rng.normal(size=(k // 128, n)) / k**0.5, jnp.bfloat16)
    zero = jnp.asarray(rng.integers(-8, 8, scale.shape), jnp.bfloat16) if zeros else None
    if zero is not None:
        meant = meant - jnp.repeat(zero.astype(jnp.float32), 128, axis=0).T
    meant = meant * jnp.repeat(scale.astype(jnp.float32), 128, axis=0).T
    x = jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16)
    words = kind.words(values)
    found = narrow_matmul(x, words, scale, zero, gated=True, cut=cut, interpret=INTERPRETED)
    gate, up = jnp.split(x.astype(jnp.float32) @ meant.T, 2, axis=1)
    exact = jax.nn.silu(gate) * up
    error = jnp.abs(found.astype(jnp.float32) - exact)
    assert float(jnp.max(error - 0.02 * jnp.abs(exact))) < 0.02 * float(jnp.std(exact))


def test_cuts_go_with_groups() -> None:
    """Those that were measured are for groups of 128; a buffer has whole groups, or part of one."""
    for group in (32, 128, 384, 512):
        for m in (1, 16, 33, 256):
            for cut in (
                cuts.cut_for(INT4, m, 4096, 28672, group),
                *cuts.candidate_cuts(m, 6144, 6144, group),
            ):
                assert group % cut.depth == 0 or cut.depth % group == 0
    assert cuts.cut_for(INT4, 1, 4096, 28672, 128).depth == 256


@pytest.mark.parametrize("kind", [INT4, FP8], ids=["int4", "fp8"])
@pytest.mark.parametrize("group", [32, 64, 128, 1024])
def test_residents_have_room_for_buffers_and_barriers(kind: Kind, group: int) -> None:
    """Buffers begin at multiples of 1 KiB, barriers have 8 bytes, and 1 KiB each is CUDA's."""
    for gated, m in itertools.product((False, True), range(8, 257, 8)):
        for cut in cuts.candidate_cuts(m, 1024, 8192, group):
            fused = gated and cut.splits == 1 and cut.warpgroups % 2 == 0
            plan = Plan(
                cut=cut,
                kind=kind,
                m=m,
                k=1024,
                n=8192,
                group=group,
                zeros=kind is INT4,
                gated=fused,
                dtype=jnp.dtype(jnp.bfloat16),
                out_dtype=jnp.dtype(jnp.bfloat16 if fused else jnp.float32),
                interpreted=False,
            )
            x, w, scales, out, *barriers = Shared.types(plan)
            buffers = [math.prod(each.shape) * each.dtype.itemsize for each in (x, w, scales, out)]
            taken = sum(-(-size // 1024) * 1024 for size in buffers) + 1024
            taken += sum(8 * math.prod(each.num_barriers) for each in barriers if each)
            assert taken * cut.residents <= 228 * 1024, cut


def test_gates_are_whole_bricks() -> None:
    words, scale = jnp.zeros((3, 2, 4, 128), jnp.uint32), jnp.zeros((1, 192), jnp.bfloat16)
    with pytest.raises(ValueError, match="half of the outputs must be a multiple of 64, got 192"):
        narrow_matmul(jnp.zeros((1, 128), jnp.bfloat16), words, scale, gated=True)


def test_other_arrays_are_refused() -> None:
    assert supports_narrow(256, 256, 64, 32)
    for arguments in ((257, 256, 64, 32), (1, 192, 64, 64), (1, 256, 96, 32), (1, 256, 64, 16)):
        assert not supports_narrow(*arguments)
    with pytest.raises(ValueError, match=r"got float32 .* groups of 128: expand the weight"):
        narrow_matmul(
            jnp.zeros((1, 128)), jnp.zeros((1, 2, 4, 128), jnp.uint32), jnp.zeros((1, 64))
        )


@pytest.mark.parametrize("dtype", [FLOAT8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize(
    ("m", "k", "n", "how"),
    [
        (8, 256, 128, Tiling(row_warpgroups=1, widths=(128,), depth=128)),
        (13, 512, 192, Tiling(row_warpgroups=1, widths=(128,), depth=128, splits=2)),
        (72, 256, 192, Tiling(widths=(128,), depth=128, row_cluster=2)),
        (8, 256, 192, Tiling(row_warpgroups=1, widths=(128,), depth=256, column_warpgroups=2)),
        (136, 256, 128, Tiling(widths=(256, 128), depth=128)),
    ],
)
@pytest.mark.parametrize("gated", [False, True])
def test_of_8_bits_on_both_sides(
    m: int, k: int, n: int, how: Tiling, gated: bool, dtype: jnp.dtype
) -> None:
    if gated and how.splits > 1:
        pytest.skip("gates are not summed later")
    rng = np.random.default_rng(0)
    x, x_scale = scaled_rows(
        jnp.asarray(rng.normal(size=(m, k)), jnp.bfloat16), dtype, interpret=True
    )
    shape = (2, n, k) if gated else (n, k)
    w = jnp.asarray(rng.normal(size=shape) * (50 if dtype == INT8 else 1)).astype(dtype)
    w_scale = jnp.asarray(rng.uniform(size=shape[:-1]) / k**0.5, jnp.float32)
    residual = None if gated else jnp.asarray(rng.normal(size=(m, n)), jnp.bfloat16)
    found = scaled_matmul(
        x,
        w,
        (x_scale, w_scale),
        how,
        residual=residual,
        out_dtype=jnp.dtype(jnp.bfloat16),
        interpret=INTERPRETED,
    )
    exact = jnp.einsum("mk,...nk->m...n", x.astype(jnp.float32), w.astype(jnp.float32))
    exact = exact * x_scale.reshape(m, *[1] * (w.ndim - 1)) * w_scale
    exact = jax.nn.silu(exact[:, 0]) * exact[:, 1] if gated else exact
    exact = exact if residual is None else exact + residual.astype(jnp.float32)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0.01, atol=1e-3)


def test_rows_fill_the_range_of_8_bits() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 200)), jnp.bfloat16).at[1].set(0)
    values, scale = scaled_rows(x, INT8, interpret=True)
    assert jnp.max(jnp.abs(values.astype(jnp.int32)), axis=1).tolist() == [127, 0, 127]
    error = jnp.abs(values * scale[:, None] - x.astype(jnp.float32))
    assert bool(jnp.all(error <= scale[:, None] / 2 + 1e-6))


def test_what_is_left_to_xla() -> None:
    def takes(dtype: jnp.dtype, *shape: int) -> bool:
        x, w = (jax.ShapeDtypeStruct(each, dtype) for each in ((8, shape[-1]), shape))
        return supports_scaled(x, w)

    assert takes(FLOAT8, 64, 128)
    assert takes(INT8, 2, 64, 128)
    assert not takes(jnp.dtype(jnp.bfloat16), 64, 128)
    assert not takes(FLOAT8, 64, 192)
    assert not takes(FLOAT8, 96, 128)
