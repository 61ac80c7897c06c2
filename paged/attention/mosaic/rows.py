"""What prefill computes: a softmax over positions in columns, with a query in each row."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.attention.mosaic.spans import scored
from paged.attention.mosaic.words import ROW
from paged.attention.pieces import Cut, Piece
from paged.attention.scoring import LOG2_E, LOWEST, MASKED, Scoring
from paged.kernels import Ref

# Query rows of a warpgroup, and how many warpgroups compute.
ROWS, COMPUTERS = 64, 2


@dataclass(frozen=True)
class Spec:
    """What is fixed when the kernel is compiled.

    Attributes:
        cut: how tiles are cut into pieces of `COMPUTERS * ROWS` query rows.
        head_dim: elements of a head (D).
        kv_heads: key/value heads (Hkv).
        page_size: tokens a page holds.
        pages_per_table: P.
        span: positions a buffer of the ring holds.
        stages: buffers of the ring, for keys and for values.
        lead: spans of words that are on their way at a time, see `widening`.
        scoring: see `Scoring`.
        dtype: of what is multiplied.
        out_dtype: of queries as they come, and of output.
        page_dtype: of what pages hold.
        interpreted: whether Pallas' interpreter runs the kernel.
    """

    cut: Cut
    head_dim: int
    kv_heads: int
    page_size: int
    pages_per_table: int
    span: int
    stages: int
    lead: int
    scoring: Scoring
    dtype: jnp.dtype
    out_dtype: jnp.dtype
    page_dtype: jnp.dtype
    interpreted: bool

    @property
    def tokens(self) -> int:
        """Tokens of a warpgroup. Its row r is token r % tokens with member r // tokens."""
        return self.cut.tokens // COMPUTERS

    @property
    def narrow(self) -> bool:
        """Whether pages hold values of 8 bits, in words of two."""
        return self.page_dtype.itemsize == 1

    @property
    def copies(self) -> int:
        """Copies that fill a buffer: one a page, or a part of one."""
        return max(self.span // self.page_size, 1)


# Output [ROWS, D], maximum [ROWS] and sum [ROWS] of the softmax so far, in powers of two.
Running = tuple[jax.Array, jax.Array, jax.Array]


def wide(column: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number for each row, for the elements of a matrix."""
    return lax.broadcast_in_dim(column, shape, [0])


def query_head(m: int, half: Piece, spec: Spec) -> jax.Array:
    """The query head of member m of a piece; padding members repeat the group's last."""
    return half.head * spec.cut.group + jnp.minimum(half.first_member + m, spec.cut.group - 1)


def start(sinks_ref: Ref | None, half: Piece, spec: Spec) -> Running:
    """The softmax over nothing, or over the sinks of the warpgroup's rows."""
    out = plgpu.layout_cast(jnp.zeros((ROWS, spec.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    maximum = plgpu.layout_cast(jnp.full(ROWS, LOWEST, jnp.float32), ROW)
    total = plgpu.layout_cast(jnp.full(ROWS, sinks_ref is not None, jnp.float32), ROW)
    if sinks_ref is not None:
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        for m in range(spec.cut.members):
            sink = sinks_ref[query_head(m, half, spec)] * LOG2_E
            maximum = jnp.where(row >= m * spec.tokens, sink, maximum)
    return out, maximum, total


def softmax(
    running: Running, products: jax.Array, visible: jax.Array | None, spec: Spec
) -> tuple[Running, jax.Array]:
    """The running softmax scaled for new products q·k [ROWS, span], and their weights.

    `visible` [ROWS, span] says which count; None when all do.
    """
    out, maximum, total = running
    products, scale = scored(products, spec.scoring)
    if visible is not None:
        products = jnp.where(visible, products, MASKED)
    new_maximum = jnp.maximum(maximum, products.max(axis=1) * scale)
    decay = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(products * scale - wide(new_maximum, products.shape))
    out *= wide(decay, out.shape)
    total = total * decay + weights.sum(axis=1)
    # Keeps the compiler from moving any of this behind the other warpgroup's turn.
    running, weights = lax.optimization_barrier(
        ((out, new_maximum, total), weights.astype(spec.dtype))
    )
    return running, weights


def accumulate(running: Running, weights: jax.Array, values: Ref, spec: Spec) -> Running:
    """Add the weighted values [span, D]."""
    out, maximum, total = running
    if spec.interpreted:  # knows no accumulator that starts with a value
        weighted = jnp.dot(weights.astype(jnp.float32), values[...].astype(jnp.float32))
        return out + weighted, maximum, total

    def add(accumulator: Ref) -> None:
        plgpu.wgmma(accumulator, weights, values)

    return pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(out)), maximum, total


def visible_to_rows(begin: jax.Array, half: Piece, spec: Spec) -> jax.Array:
    """Which of the span of positions from `begin` each row sees, [ROWS, span]."""
    shape = (ROWS, spec.span)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    # The tokens of a warpgroup are a power of two: its row's is found without a division.
    distance = (row & (spec.tokens - 1)) - column + (half.first - begin)
    visible = distance >= 0
    window = spec.scoring.window
    return visible if window is None else visible & (distance < window)
