"""What both kernels do with one span of a sequence: fetch it from the pages, score it, fold it in.

The softmax runs in powers of two (exp2 is one instruction) with a running maximum and sum. Keys and
values that must not count are never loaded but are zero, and their score is `MASKED`, so that
whatever a recycled or a null page holds, NaN included, reaches no result.

Triton wants arrays whose sizes are powers of two: a head size such as 80 is padded to the next one
inside the kernels, by masked loads and stores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.pieces import Ref
from paged.attention.scoring import Scoring
from paged.cache import Pages

F16, BF16 = jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16)
LOG2_E = math.log2(math.e)
# A masked score, and where running maxima start: far below any real one, far above a masked one, so
# that masked scores weigh nothing even where nothing else has been seen.
MASKED, LOWEST = -1e30, -1e20


class KeysAndValues(NamedTuple):
    """One span of one head.

    Attributes:
        k, v: [span, D] in the dtypes of their products, zero where not readable.
        k_scale, v_scale: [span] float32, see `paged.cache.Pages`; None where there are none.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


# Output [M, D], maximum [M] and sum [M] of the softmax so far, float32; maxima in powers of two.
Running = tuple[jax.Array, jax.Array, jax.Array]


@dataclass(frozen=True)
class Spec:
    """What is fixed when a kernel is compiled.

    Attributes:
        group: query heads that share one key/value head (G).
        head_dim: elements of a head (D).
        page_size: tokens a page holds.
        span: positions read at a time, a power of two.
        max_queries: rows (tokens times heads) of a tile of queries, a power of two.
        scoring: see there.
        key_dtype, value_dtype, precision: of the operands of products with keys and with values.
            Their sums are float32.
    """

    group: int
    head_dim: int
    page_size: int
    span: int
    max_queries: int
    scoring: Scoring
    key_dtype: jnp.dtype
    value_dtype: jnp.dtype
    precision: lax.PrecisionLike

    def columns(self) -> tuple[jax.Array, jax.Array]:
        """Element indices of a head padded to a power of two, and which of them exist."""
        columns = jnp.arange(pl.next_power_of_2(self.head_dim))
        return columns, columns < self.head_dim


def for_platform(attention: Callable[..., jax.Array], *operands: Any) -> jax.Array:
    """Call `attention(*operands, interpret=...)`: compiled on a GPU, interpreted on a CPU.

    Which one is decided when the program is lowered, so that a machine without a GPU can compile
    for one.
    """
    return lax.platform_dependent(
        *operands,
        cpu=functools.partial(attention, interpret=True),
        default=functools.partial(attention, interpret=False),
    )


def make_spec(q: jax.Array, pages: Pages, scoring: Scoring, interpret: bool) -> Spec:
    """The constants of a kernel for queries [.., Hq, D] over pages (see `load_span`).

    Tiles are as large as they are fast without spilling registers: products of float32 keep their
    precision through three products of its parts, and want four times the registers.
    """
    _, page_size, heads, head_dim = pages.values.shape
    wide = q.dtype.itemsize > 2
    # Tensor cores take no fewer than 16 rows.
    rows = max((2048 if wide else 16384) // pl.next_power_of_2(head_dim), 16)
    key_dtype, value_dtype = _product_dtypes(q.dtype, pages.dtype)
    # The interpreter leaves products to XLA, which knows no such algorithm on a CPU.
    split = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return Spec(
        group=q.shape[1] // (heads // 2),
        head_dim=head_dim,
        page_size=page_size,
        span=min(rows, 32 if wide else 64),
        max_queries=min(rows, 32 if wide else 128),
        scoring=scoring,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        precision=split if wide else None,
    )


def _product_dtypes(queries: jnp.dtype, pages: jnp.dtype) -> tuple[jnp.dtype, jnp.dtype]:
    """Of products with keys, and of those with values."""
    if queries.itemsize > 2 or pages.itemsize > 1:
        return queries, queries
    if jnp.issubdtype(pages, jnp.floating):
        return F16, F16
    return queries, BF16


def head_of(program: jax.Array, members: int, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """The key/value head of a program that takes `members` heads of a group, and its first member.

    A group larger than that is shared out to several programs, which stand beside each other.
    """
    per_group = pl.cdiv(spec.group, members)
    return lax.div(program, per_group), lax.rem(program, per_group) * members


def start(rows: int, sink: jax.Array | None, spec: Spec) -> Running:
    """The softmax over nothing for `rows` queries, or over their sinks [rows], in powers of two."""
    out = jnp.zeros((rows, pl.next_power_of_2(spec.head_dim)), jnp.float32)
    if sink is None:
        return out, jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    return out, sink, jnp.ones((rows,), jnp.float32)


def load_span(
    pages: Pages,
    tables: Ref,
    slot: jax.Array,
    head: jax.Array,
    position: jax.Array,
    readable: jax.Array,
    spec: Spec,
) -> KeysAndValues:
    """Keys and values of one head at `position` [span], zero where not `readable` [span].

    `tables` [S, P] are the pages of each slot.
    """
    columns, exist = spec.columns()
    page = plgpu.load(
        tables.at[slot, lax.div(position, jnp.int32(spec.page_size))], mask=readable, other=0
    )
    offset = lax.rem(position, jnp.int32(spec.page_size))
    mask = readable[:, None] & exist[None, :]

    values: Ref = pages.values
    scales: Ref | None = pages.scales

    def load(head: jax.Array) -> jax.Array:
        place = values.at[page[:, None], offset[:, None], head, columns[None, :]]
        loaded = plgpu.load(place, mask=mask, other=0)
        return lax.bitcast_convert_type(loaded, pages.dtype)

    def scale(head: jax.Array) -> jax.Array | None:
        if scales is None:
            return None
        place = scales.at[page, offset, head]
        return plgpu.load(place, mask=readable, other=0.0).astype(jnp.float32)

    value_head = head + pages.kv_heads
    return KeysAndValues(
        load(head).astype(spec.key_dtype),
        load(value_head).astype(spec.value_dtype),
        scale(head),
        scale(value_head),
    )


def attend(
    running: Running,
    q: jax.Array,
    kv: KeysAndValues,
    visible: jax.Array | None,
    spec: Spec,
) -> Running:
    """Fold keys and values into the running softmax of queries [M, D].

    `visible` broadcasts to [M, span]; None when all is.
    """
    out, maximum, total = running
    products = plgpu.dot(q, kv.k.T, precision=spec.precision)
    if kv.k_scale is not None:
        products *= kv.k_scale[None, :]
    scores = _in_powers_of_two(products, spec)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    new_maximum = jnp.maximum(maximum, scores.max(axis=1))
    decay = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores - new_maximum[:, None])
    total = total * decay + weights.sum(axis=1)
    if kv.v_scale is not None:
        weights *= kv.v_scale[None, :]
    values = plgpu.dot(weights.astype(spec.value_dtype), kv.v, precision=spec.precision)
    return out * decay[:, None] + values, new_maximum, total


def _in_powers_of_two(products: jax.Array, spec: Spec) -> jax.Array:
    """The base-2 exponents of the softmax for products q·k."""
    scale, soft_cap = spec.scoring.scale, spec.scoring.soft_cap
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)


def finish(running: Running) -> tuple[jax.Array, jax.Array]:
    """The output [M, D], and the base-2 logarithm [M] of its softmax sum to merge it by."""
    out, maximum, total = running
    return out / total[:, None], maximum + jnp.log2(total)
