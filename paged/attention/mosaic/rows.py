"""What prefill computes: a softmax over positions in columns, with a query in each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
        may_split: whether contexts may be split, see `splits`.
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
    may_split: bool
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


def start(sinks_ref: Ref | None, half: Piece, spec: Spec, *, counts: jax.Array) -> Running:
    """The softmax over nothing, or over the sinks of the warpgroup's rows if they count here."""
    out = plgpu.layout_cast(jnp.zeros((ROWS, spec.head_dim), jnp.float32), plgpu.Layout.WGMMA)
    maximum = plgpu.layout_cast(jnp.full(ROWS, LOWEST, jnp.float32), ROW)
    total = plgpu.layout_cast(jnp.zeros(ROWS, jnp.float32), ROW)
    if sinks_ref is not None:
        total += jnp.where(counts, 1.0, 0.0)
        row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        for m in range(spec.cut.members):
            sink = sinks_ref[query_head(m, half, spec)] * LOG2_E
            maximum = jnp.where((row >= m * spec.tokens) & counts, sink, maximum)
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


def half_of(piece: Piece, warpgroup: jax.Array, spec: Spec) -> Piece:
    """The part of a piece that a warpgroup computes: its first or second tokens."""
    before = warpgroup * spec.tokens
    return piece._replace(
        token=piece.token + before,
        num_tokens=jnp.minimum(piece.num_tokens - before, spec.tokens),
        first=piece.first + before,
    )


def store_output(
    out: jax.Array, rows: Ref, out_ref: Ref, half: Piece, spec: Spec, elements: Any = slice(None)
) -> None:
    """Copy out what a warpgroup computed, of rows that have a token and a member.

    Args:
        out: [ROWS, E].
        rows: [ROWS, E], shared memory to copy from.
        out_ref: [T, Hq, D].
        elements: the E of a head that these are.
    """
    rows[...] = out
    plgpu.commit_smem()
    complete = half.num_tokens == spec.tokens
    for m in range(spec.cut.members):
        member = half.first_member + m
        head, exists = half.head * spec.cut.group + member, member < spec.cut.group

        @pl.when(complete & exists)
        def _(m: int = m, head: jax.Array = head) -> None:
            source = rows.at[pl.ds(m * spec.tokens, spec.tokens)]
            target = out_ref.at[pl.ds(half.token, spec.tokens), head, elements]
            plgpu.copy_smem_to_gmem(source, target)

        # The tokens that follow a chunk are another row's: its end is copied one by one.
        @pl.when(~complete & exists)
        def _(m: int = m, head: jax.Array = head) -> None:
            def copy_one(t: jax.Array, carry: jax.Array) -> jax.Array:
                source = rows.at[m * spec.tokens + t]
                plgpu.copy_smem_to_gmem(source, out_ref.at[half.token + t, head, elements])
                return carry

            lax.fori_loop(0, half.num_tokens, copy_one, jnp.int32(0))

    plgpu.wait_smem_to_gmem(0)
