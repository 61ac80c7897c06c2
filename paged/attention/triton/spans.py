"""What both kernels do with one span of a sequence: fetch it from the pages, score it, fold it in.

The softmax runs in powers of two with a running maximum and sum. Keys and values that must not
count are never loaded but are zero, and their score is `MASKED`, so that whatever a recycled or a
null page holds, NaN included, reaches no result.

Triton wants arrays whose sizes are powers of two: a head size such as 80 is padded to the next one
inside the kernels, by masked loads and stores.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.attention.scoring import LOG2_E, LOWEST, MASKED, Scoring
from paged.attention.triton.unpack import product_dtype, unpack
from paged.cache import Pages
from paged.kernels import Ref

# A head of D elements, cut into lanes: all of them in one, or the even and the odd elements, which
# are the first and the second values of the words that pages of 8 bits hold.
Lanes = tuple[jax.Array, ...]


class KeysAndValues(NamedTuple):
    """One span of one head.

    Attributes:
        k, v: by lane [span, D / lanes], zero where not readable.
        k_scale, v_scale: [span] float32, see `paged.cache.Pages`; None where there are none.
    """

    k: Lanes
    v: Lanes
    k_scale: jax.Array | None
    v_scale: jax.Array | None


# Row, a scalar or [M], and head [M] of queries or of their output.
Place = tuple[jax.Array, jax.Array]
# Output by lane [M, D / lanes], maximum [M] and sum [M] of the softmax so far, float32; maxima in
# powers of two.
Running = tuple[Lanes, jax.Array, jax.Array]


@dataclass(frozen=True)
class Spec:
    """What is fixed when a kernel is compiled.

    Attributes:
        group: query heads that share one key/value head (G).
        head_dim: elements of a head (D).
        page_size: tokens a page holds.
        span: positions read at a time, a power of two.
        scoring: see there.
        lanes: how many a head is cut into.
        dtype, precision: of the operands of products, whose sums are float32.
        interpret: whether Pallas' interpreter runs the kernel.
    """

    group: int
    head_dim: int
    page_size: int
    span: int
    scoring: Scoring
    lanes: int
    dtype: jnp.dtype
    precision: lax.PrecisionLike
    interpret: bool

    @property
    def lane_size(self) -> int:
        """Elements of a lane, padded to a power of two."""
        return pl.next_power_of_2(self.head_dim // self.lanes)

    def columns(self) -> list[tuple[jax.Array, jax.Array]]:
        """For each lane, the indices of its elements within a head, and which of them exist."""
        indices = (lane + self.lanes * jnp.arange(self.lane_size) for lane in range(self.lanes))
        return [(columns, columns < self.head_dim) for columns in indices]


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


def make_spec(q: jax.Array, pages: Pages, scoring: Scoring, span: int, interpret: bool) -> Spec:
    """The constants of a kernel for queries [.., Hq, D] over pages (see `load_span`).

    Products of float32 keep their precision through three products of its parts.
    """
    head_dim, page_size = q.shape[-1], pages.values.shape[1]
    narrow, wide = pages.dtype.itemsize == 1, q.dtype.itemsize > 2
    # The interpreter leaves products to XLA, which knows no such algorithm on a CPU.
    split = lax.Precision.HIGHEST if interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return Spec(
        group=q.shape[1] // pages.kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        span=span,
        scoring=scoring,
        lanes=2 if narrow else 1,
        dtype=product_dtype(pages.dtype) if narrow and not wide else q.dtype,
        precision=split if wide else None,
        interpret=interpret,
    )


def head_of(program: jax.Array, members: int, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """The key/value head of a program that takes `members` heads of a group, and its first member.

    A group larger than that is shared out to several programs, which stand beside each other.
    """
    per_group = pl.cdiv(spec.group, members)
    return lax.div(program, per_group), lax.rem(program, per_group) * members


def load_queries(ref: Ref, place: Place, exist: jax.Array, spec: Spec) -> Lanes:
    """Queries by lane [M, D / lanes], zero for those that do not `exist` [M].

    Beyond the range of what is multiplied they saturate, as keys do.
    """
    lanes = []
    for index, mask in _elements(place, exist, spec):
        q = plgpu.load(ref.at[index], mask=mask, other=0.0)
        if q.dtype != spec.dtype:
            limit = float(jnp.finfo(spec.dtype).max)
            q = jnp.clip(q.astype(jnp.float32), -limit, limit)
        lanes.append(q.astype(spec.dtype))
    return tuple(lanes)


def store_output(ref: Ref, place: Place, out: Lanes, exist: jax.Array, spec: Spec) -> None:
    """Store outputs of the queries that `exist` [M]."""
    for (index, mask), lane in zip(_elements(place, exist, spec), out, strict=True):
        plgpu.store(ref.at[index], lane.astype(ref.dtype), mask=mask)


def _elements(place: Place, exist: jax.Array, spec: Spec) -> Iterator[tuple[Any, jax.Array]]:
    """Indices and mask [M, D / lanes] of each lane of some heads."""
    row, head = place
    row = row[:, None] if row.ndim else row
    for columns, there in spec.columns():
        yield (row, head[:, None], columns[None, :]), exist[:, None] & there[None, :]


def start(rows: int, sink: jax.Array | None, spec: Spec) -> Running:
    """The softmax over nothing for `rows` queries, or over their sinks [rows], in powers of two."""
    out = (jnp.zeros((rows, spec.lane_size), jnp.float32),) * spec.lanes
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
    page = plgpu.load(
        tables.at[slot, lax.div(position, jnp.int32(spec.page_size))], mask=readable, other=0
    )
    offset = lax.rem(position, jnp.int32(spec.page_size))
    columns = jnp.arange(spec.lane_size)
    mask = readable[:, None] & (columns < spec.head_dim // spec.lanes)[None, :]
    values: Ref = pages.values
    scales: Ref | None = pages.scales

    def load(head: jax.Array) -> Lanes:
        place = values.at[page[:, None], offset[:, None], head, columns[None, :]]
        loaded = plgpu.load(place, mask=mask, other=0)
        if spec.lanes == 1:
            return (loaded.astype(spec.dtype),)
        lanes = unpack(loaded, pages.dtype, interpret=spec.interpret)
        return tuple(lane.astype(spec.dtype) for lane in lanes)

    k, v = load(head), load(head + pages.kv_heads)
    if scales is None:
        return KeysAndValues(k, v, None, None)
    pair = plgpu.load(scales.at[page, offset, head], mask=readable, other=0)
    # A bfloat16 is the upper half of a float32.
    k_scale = lax.bitcast_convert_type(pair << 16, jnp.float32)
    v_scale = lax.bitcast_convert_type(pair & jnp.uint32(0xFFFF0000), jnp.float32)
    return KeysAndValues(k, v, k_scale, v_scale)


def attend(
    running: Running,
    q: Lanes,
    kv: KeysAndValues,
    visible: jax.Array | None,
    spec: Spec,
) -> Running:
    """Fold keys and values into the running softmax of queries [M, D].

    `visible` broadcasts to [M, span]; None when all is.
    """
    out, maximum, total = running
    dot = functools.partial(plgpu.dot, precision=spec.precision)
    products = functools.reduce(operator.add, map(lambda q, k: dot(q, k.T), q, kv.k))
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
    weights = weights.astype(spec.dtype)
    out = tuple(lane * decay[:, None] + dot(weights, v) for lane, v in zip(out, kv.v, strict=True))
    return out, new_maximum, total


def _in_powers_of_two(products: jax.Array, spec: Spec) -> jax.Array:
    """The base-2 exponents of the softmax for products q·k."""
    scale, soft_cap = spec.scoring.scale, spec.scoring.soft_cap
    if soft_cap is None:
        return products * (scale * LOG2_E)
    return jnp.tanh(products * (scale / soft_cap)) * (soft_cap * LOG2_E)


def finish(running: Running) -> tuple[Lanes, jax.Array]:
    """The output, and the base-2 logarithm [M] of its softmax sum to merge it by."""
    out, maximum, total = running
    return tuple(lane / total[:, None] for lane in out), maximum + jnp.log2(total)
