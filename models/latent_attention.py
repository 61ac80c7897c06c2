"""Multi-head latent attention (DeepSeek-V2, 2024): pages hold one short row a token, not heads.

A token's keys and values are linear in a latent that all heads share. So a head's query can be
brought into the coordinates of the latent once, instead of each latent into those of each head;
and averages of latents are made into averages of values after attention. Keys also have a rotated
part, the same for all heads, which stands behind the latent in the row.

Rows are read once for all heads, which suits decoding. Prefill pays: a pair of tokens takes
2 * (2 * C + R) operations a head where keys and values of each head would take 2 * (N + R + V),
3.4 times fewer for DeepSeek's sizes (512, 64 and 128, 64, 128).

Axis letters, besides those of `paged.models.weights`: Q elements of a query's latent, C of a
latent, R of a head that are rotated, N of a head that are not, V of a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention import AttentionMetadata, Scoring, latent_attention
from paged.cache import Pages
from paged.models.config import ModelConfig, RopeScaling
from paged.models.config_values import count, flag
from paged.models.layers import merge_heads, norm, rms_norm
from paged.models.mesh import own_part
from paged.models.rope import Rotation, rotate, rotate_pairs, yarn_factor
from paged.models.weights import Linear, ParamSpec, Part, fused_linear, linear

# Of the norms of latents, whatever the others have.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class LatentShape:
    """The sizes of the attention of a layer.

    Attributes:
        query_rank: Q; None where queries are made without a latent of their own.
        rank: C.
        plain: N.
        rotated: R.
        value: V.
        pairs: rotation pairs neighbours, 2i with 2i + 1; else i with i + R / 2.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int
    pairs: bool

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> LatentShape:
        """From a config.json."""
        return cls(
            query_rank=None if data["q_lora_rank"] is None else count(data, "q_lora_rank"),
            rank=count(data, "kv_lora_rank"),
            plain=count(data, "qk_nope_head_dim"),
            rotated=count(data, "qk_rope_head_dim"),
            value=count(data, "v_head_dim"),
            pairs=flag(data, "rope_interleave"),
        )

    @property
    def row(self) -> int:
        """Elements of a row of a page."""
        return self.rank + self.rotated

    @property
    def key(self) -> int:
        """Elements of a head's key."""
        return self.plain + self.rotated

    def scale(self, scaling: RopeScaling | None) -> float:
        """What multiplies q·k: yarn sharpens attention here, and may do so by its angles too."""
        sharper = 1.0
        if scaling is not None and scaling.kind == "yarn" and scaling.mscale_all_dim:
            sharper = yarn_factor(scaling, scaling.mscale_all_dim)
        return self.key**-0.5 * sharper**2

    def rotate(self, x: jax.Array, angles: Rotation | None) -> jax.Array:
        """Turn heads [T, H, R]."""
        return rotate_pairs(x, angles) if self.pairs else rotate(x, angles)


@struct.dataclass
class LatentAttentionParams:
    """Weights of the attention of a pre-norm layer.

    Attributes:
        norm: [D].
        inputs: D to Q + C + R: a query's latent, or without one Hq * (N + R) elements of queries;
            the latent; the rotated part of the key.
        query_norm: [Q], or None.
        query: Q to [Hq, N + R], or None.
        latent_norm: [C].
        key: [Hq, N, C], from the latent to keys.
        value: [Hq, V, C], from the latent to values.
        out: Hq * V to D.
    """

    norm: jax.Array
    inputs: Linear
    query_norm: jax.Array | None
    query: Linear | None
    latent_norm: jax.Array
    key: jax.Array
    value: jax.Array
    out: Linear


@dataclass(frozen=True, kw_only=True)
class HeadRowsSpec(ParamSpec):
    """Some rows of each head of a checkpoint tensor, as [Hq, rows, C].

    Attributes:
        first: of the rows, counted within the head.
    """

    first: int

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        heads = tensors[0].reshape(self.parts[0].view).astype(dtype)
        return heads[:, self.first : self.first + self.shape[1]]


def latent_attention_specs(
    config: ModelConfig, shape: LatentShape, index: int
) -> LatentAttentionParams:
    """Description of the attention of the layer of an index, under DeepSeek's names."""
    heads, hidden_size = config.num_heads, config.hidden_size
    prefix = f"model.layers.{index}.self_attn"
    first, query_norm, query = f"{prefix}.q_proj", None, None
    outputs = heads * shape.key
    if shape.query_rank is not None:
        first, outputs = f"{prefix}.q_a_proj", shape.query_rank
        query_norm = norm(f"{prefix}.q_a_layernorm", outputs)
        query = fused_linear(
            {f"{prefix}.q_b_proj": (heads, shape.key)},
            outputs,
            bias=False,
            join_axis=0,
            axes=(None, "heads", None),
        )
    inputs = {first: (outputs,), f"{prefix}.kv_a_proj_with_mqa": (shape.row,)}
    rows = heads, shape.plain + shape.value, shape.rank
    part = Part(f"{prefix}.kv_b_proj.weight", (rows[0] * rows[1], rows[2]), rows)

    def head_rows(first: int, number: int) -> Any:
        axes = ("heads", None, None)
        return HeadRowsSpec((part,), (heads, number, shape.rank), axes, "normal", first=first)

    return LatentAttentionParams(
        norm=norm(f"model.layers.{index}.input_layernorm", hidden_size),
        inputs=fused_linear(inputs, hidden_size, bias=False, join_axis=0, axes=(None, None)),
        query_norm=query_norm,
        query=query,
        latent_norm=norm(f"{prefix}.kv_a_layernorm", shape.rank),
        key=head_rows(0, shape.plain),
        value=head_rows(shape.plain, shape.value),
        out=linear(f"{prefix}.o_proj", heads * shape.value, hidden_size, axes=("heads", None)),
    )


def attend(
    params: LatentAttentionParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    shape: LatentShape,
) -> tuple[jax.Array, Pages]:
    """Attention of a layer, added to x [T, D]; see `paged.models.layers.Layer`."""
    inputs = params.inputs(rms_norm(x, params.norm, config.norm_eps))
    query, latent, key = jnp.split(inputs, (-shape.row, -shape.rotated), axis=-1)
    if params.query is None or params.query_norm is None:
        # With several devices, each makes the queries of all heads: they are fused with the latent.
        q = own_part(query.reshape(len(x), -1, shape.key), config.num_heads, axis=1)
    else:
        q = params.query(rms_norm(query, params.query_norm, _NORM_EPS))
    plain, turned = jnp.split(q, (shape.plain,), axis=-1)
    plain = jnp.einsum("thn,hnc->thc", plain, params.key)
    q = jnp.concatenate([plain, shape.rotate(turned, angles)], axis=-1)
    latent = rms_norm(latent, params.latent_norm, _NORM_EPS)
    rows = jnp.concatenate([latent, shape.rotate(key[:, None], angles)[:, 0]], axis=-1)
    scoring = Scoring(shape.scale(config.rope_scaling))
    averages, pages = latent_attention(q, rows, pages, meta, scoring)
    values = jnp.einsum("thc,hvc->thv", averages, params.value)
    return params.out.added_to(x, merge_heads(values)), pages
