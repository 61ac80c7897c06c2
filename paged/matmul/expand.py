"""Weights in bricks written out as floats of 16 bits: for many rows that pays."""

from __future__ import annotations

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from paged.kernels import Ref, swizzled
from paged.matmul.bricks import BRICK
from paged.matmul.narrow import kind_of
from paged.matmul.narrow_buffers import Buffer, Plan, Shared
from paged.matmul.tiling import Cut

# Inputs that a program writes at most.
_DEPTH = 256


def expanded(
    words: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """The weight [N, K] in the dtype of `scale`; for the arguments see `narrow_matmul`."""
    n, k = scale.shape[1], words.shape[1] * BRICK
    group = k // scale.shape[0]
    plan = Plan(
        cut=Cut(warpgroups=1, depth=gcd(k, _DEPTH if group % _DEPTH == 0 else 128)),
        kind=kind_of(words),
        m=0,
        k=k,
        n=n,
        group=group,
        zeros=zero is not None,
        gated=False,
        dtype=jnp.dtype(scale.dtype),
        out_dtype=jnp.dtype(scale.dtype),
        interpreted=interpret is not None,
    )
    bricks = (1, 1, plan.bricks, *plan.kind.shape)
    layout = swizzled(BRICK, plan.dtype.itemsize)
    return plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="paged_expand",
        out_type=jax.ShapeDtypeStruct((n, k), plan.dtype),
        grid=(n // BRICK, plan.steps),
        grid_names=("row", "step"),
        scratch_types=[
            plgpu.SMEM(bricks, jnp.uint32),
            plgpu.SMEM((1, 1 + plan.zeros, 1, plan.scale_rows, BRICK), plan.dtype),
            plgpu.SMEM((BRICK, plan.cut.depth), plan.dtype, transforms=layout),
            plgpu.Barrier(num_arrivals=2 + plan.zeros),
        ],
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )(words, scale, zero)


def _kernel(
    w_ref: Ref,
    scale_ref: Ref,
    zero_ref: Ref | None,
    out_ref: Ref,
    w: Ref,
    scales: Ref,
    out: Ref,
    full: Ref,
    *,
    plan: Plan,
) -> None:
    """One row of bricks, as far as a program goes."""
    row, step = lax.axis_index("row"), lax.axis_index("step")
    outputs = pl.ds(pl.multiple_of(row * BRICK, BRICK), BRICK)
    inputs = pl.ds(pl.multiple_of(step * plan.cut.depth, plan.cut.depth), plan.cut.depth)
    bricks = w_ref.at[pl.ds(row, 1), pl.ds(step * plan.bricks, plan.bricks)]
    plgpu.copy_gmem_to_smem(bricks, w.at[0], full)
    groups = pl.ds(lax.div(step * plan.cut.depth, plan.group), plan.scale_rows)
    for i, ref in enumerate((scale_ref,) if zero_ref is None else (scale_ref, zero_ref)):
        plgpu.copy_gmem_to_smem(ref.at[groups, outputs], scales.at[0, i, 0], full)
    plgpu.barrier_wait(full)
    shared = Shared(None, w, scales, None, full, None, None, None)
    out[...] = Buffer(plan, shared, 0, 0).weight(range(plan.bricks))
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out, out_ref.at[outputs, inputs])
    plgpu.wait_smem_to_gmem(0)
