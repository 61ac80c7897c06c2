"""The parts that decoder families are composed of: descriptions of weights and pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention import AttentionMetadata
from paged.cache import PagedKVCache, Pages
from paged.models.config import ModelConfig
from paged.models.offloading import Layers
from paged.models.rope import Rotation, rotation
from paged.models.weights import (
    Dense,
    Embedding,
    Linear,
    ParamSpec,
    Part,
    embedding,
    fused_linear,
    linear,
    vector,
)


@struct.dataclass
class AttentionParams:
    """Weights of the attention of a pre-norm layer.

    Attributes:
        attention_norm: [D].
        qkv: D to [Hkv, G + 2, E]: the query heads of a group, then its key, then its value head.
        out: Hq * E to D.
    """

    attention_norm: jax.Array
    qkv: Linear
    out: Linear


@struct.dataclass
class LayerParams(AttentionParams):
    """Weights of one pre-norm decoder layer.

    Attributes:
        mlp_norm: [D].
        gate_up: D to [2, F].
        down: F to D.
    """

    mlp_norm: jax.Array
    gate_up: Linear
    down: Linear


@struct.dataclass
class PostNormLayerParams(LayerParams):
    """Weights of a layer that also normalises what it adds to the residual stream.

    Attributes:
        attention_post_norm, mlp_post_norm: [D].
    """

    attention_post_norm: jax.Array
    mlp_post_norm: jax.Array


@struct.dataclass
class LayerNorm:
    """Weights of a `layer_norm` with a bias, each [D]."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x: jax.Array, eps: float) -> jax.Array:
        return layer_norm(x, self.weight, self.bias, eps)


@struct.dataclass
class DecoderParams:
    """Weights of a decoder.

    Attributes:
        embedding: of the tokens; also makes the logits when `head` is None.
        layers: one record a layer.
        final_norm: [D], or whatever else the family's norm takes.
        head: D to V, or None when tied to the embedding.
    """

    embedding: Embedding
    layers: tuple[Any, ...]
    final_norm: Any
    head: Linear | None

    @property
    def without_layers(self) -> DecoderParams:
        """What makes logits: each array that a call takes costs the host about a microsecond."""
        return replace(self, layers=())


NormSpec = Callable[[str, int], Any]


class Layer(Protocol):
    """One layer: x [T, D] and the layer's pages in, the same out. `config`, `window` static."""

    def __call__(
        self,
        params: Any,
        x: jax.Array,
        pages: Pages,
        angles: Rotation | None,
        meta: AttentionMetadata,
        *,
        config: ModelConfig,
        window: int | None,
    ) -> tuple[jax.Array, Pages]: ...


def norm(name: str, size: int) -> Any:
    """Description of a norm's weight."""
    return vector(f"{name}.weight", size, "ones")


def offset_norm(name: str, size: int) -> Any:
    """Description of the weight of a norm that scales by one more than it (`offset_rms_norm`)."""
    return vector(f"{name}.weight", size, "zeros")


def biased_norm(name: str, size: int) -> Any:
    """Description of a `LayerNorm`."""
    bias: Any = vector(f"{name}.bias", size, "zeros")
    return LayerNorm(norm(name, size), bias)


def qkv_projection(prefix: str, config: ModelConfig, *, bias: bool) -> Dense:
    """Description of the fused query, key and value projections (see `LayerParams.qkv`)."""
    heads, size = config.num_kv_heads, config.head_dim
    parts = {
        f"{prefix}.q_proj": (heads, config.group_size, size),
        f"{prefix}.k_proj": (heads, 1, size),
        f"{prefix}.v_proj": (heads, 1, size),
    }
    axes = (None, "kv_heads", None, None)
    return fused_linear(parts, config.hidden_size, bias=bias, join_axis=1, axes=axes)


def joined_qkv_projection(name: str, config: ModelConfig, *, bias: bool) -> Dense:
    """As `qkv_projection`, of one tensor: all query heads, then key, then value heads."""
    heads, size, inputs = config.num_kv_heads, config.head_dim, config.hidden_size
    group, outputs = config.group_size, (config.num_heads + 2 * config.num_kv_heads) * size
    # Rows of each key/value head, and where they begin.
    slices = [(group, 0), (1, heads * group * size), (1, heads * (group + 1) * size)]
    weights = tuple(
        Part(f"{name}.weight", (outputs, inputs), (heads, rows, size, inputs), first)
        for rows, first in slices
    )
    biases = tuple(
        Part(f"{name}.bias", (outputs,), (heads, rows, size), first) for rows, first in slices
    )
    shape, axes = (heads, group + 2, size), ("kv_heads", None, None)
    kernel: Any = ParamSpec(
        weights, (inputs, *shape), (None, *axes), "normal", join_axis=1, transpose=True
    )
    offset: Any = ParamSpec(biases, shape, axes, "zeros", join_axis=1) if bias else None
    return Dense(kernel, offset)


def out_projection(prefix: str, config: ModelConfig, *, bias: bool) -> Dense:
    """Description of the projection from the heads back to the residual stream."""
    inputs = config.num_heads * config.head_dim
    axes = ("heads", None)
    return linear(f"{prefix}.o_proj", inputs, config.hidden_size, bias=bias, axes=axes)


def gate_up_projection(prefix: str, config: ModelConfig, *, bias: bool, axis: str = "mlp") -> Dense:
    """Description of the fused gate and up projections of a gated MLP."""
    size = config.intermediate_size
    parts = {f"{prefix}.gate_proj": (1, size), f"{prefix}.up_proj": (1, size)}
    axes = (None, None, axis)
    return fused_linear(parts, config.hidden_size, bias=bias, join_axis=0, axes=axes)


def joined_gate_up_projection(name: str, config: ModelConfig) -> Dense:
    """As `gate_up_projection`, of one checkpoint tensor that holds the gate, then up."""
    parts = {name: (2, config.intermediate_size)}
    axes = (None, None, "mlp")
    return fused_linear(parts, config.hidden_size, bias=False, join_axis=0, axes=axes)


def down_projection(prefix: str, config: ModelConfig, *, bias: bool, axis: str = "mlp") -> Dense:
    """Description of the projection from the MLP back to the residual stream."""
    inputs = config.intermediate_size
    axes = (axis, None)
    return linear(f"{prefix}.down_proj", inputs, config.hidden_size, bias=bias, axes=axes)


def layer_specs(
    config: ModelConfig,
    index: int,
    *,
    norm: NormSpec = norm,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
) -> LayerParams:
    """Description of one pre-norm layer, under the names that Llama's checkpoints gave its parts.

    Args:
        index: of the layer, from 0.
        norm: describes a norm of a name and size.
        qkv_bias, out_bias, mlp_bias: which projections add a bias.
    """
    prefix = f"model.layers.{index}"
    return LayerParams(
        attention_norm=norm(f"{prefix}.input_layernorm", config.hidden_size),
        qkv=qkv_projection(f"{prefix}.self_attn", config, bias=qkv_bias),
        out=out_projection(f"{prefix}.self_attn", config, bias=out_bias),
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", config.hidden_size),
        gate_up=gate_up_projection(f"{prefix}.mlp", config, bias=mlp_bias),
        down=down_projection(f"{prefix}.mlp", config, bias=mlp_bias),
    )


def decoder_specs(
    config: ModelConfig, layer: Callable[[int], Any], *, norm: NormSpec = norm
) -> DecoderParams:
    """Description of a decoder: `layer` describes the layer of an index, `norm` the final norm."""
    vocab_size, hidden_size = config.vocab_size, config.hidden_size
    head = linear("lm_head", hidden_size, vocab_size, axes=(None, "vocab"))
    return DecoderParams(
        embedding=embedding("model.embed_tokens.weight", vocab_size, hidden_size),
        layers=tuple(layer(index) for index in range(config.num_layers)),
        final_norm=norm("model.norm", hidden_size),
        head=None if config.tie_word_embeddings else head,
    )


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale x [..., D] to unit mean square, then by `weight` [D]; in float32, back to x's dtype."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)


def offset_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`rms_norm` by 1 + `weight` [D], which is worked out in float32 (Gemma, whatever its size)."""
    return rms_norm(x, 1 + weight.astype(jnp.float32), eps)


def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array | None, eps: float) -> jax.Array:
    """Centre x [..., D], scale it to unit variance, then by `weight`, and add `bias`; in float32.

    Both are [D], or have axes before it that x has too; the result has x's dtype.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    out = centred * scale * weight.astype(jnp.float32)
    return (out if bias is None else out + bias.astype(jnp.float32)).astype(x.dtype)


def split_qkv(qkv: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[T, Hkv, G + 2, E] to queries [T, Hq, E], keys and values [T, Hkv, E]."""
    tokens, heads, rows, size = qkv.shape
    queries = qkv[:, :, :-2].reshape(tokens, heads * (rows - 2), size)
    return queries, qkv[:, :, -2], qkv[:, :, -1]


def merge_heads(x: jax.Array) -> jax.Array:
    """[T, H, E] to [T, H * E]."""
    return x.reshape(x.shape[0], -1)


def add_mlp(params: LayerParams, x: jax.Array, config: ModelConfig) -> jax.Array:
    """x [T, D] plus what the MLP of a pre-norm layer makes of it."""
    normed = rms_norm(x, params.mlp_norm, config.norm_eps)
    return params.down.added_to(x, params.gate_up.gated(normed, config.hidden_act))


def decode(
    layer: Layer,
    params: DecoderParams,
    config: ModelConfig,
    tokens: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
) -> tuple[jax.Array, PagedKVCache]:
    """Run tokens [T] int32 through a decoder of the plain kind.

    Returns:
        (hidden states after the final norm [T, D], cache with this step's keys and values).
    """
    x = params.embedding.lookup(tokens)
    x, cache = run_layers(layer, params, config, x, cache, meta)
    return rms_norm(x, params.final_norm, config.norm_eps), cache


def run_layers(
    layer: Layer,
    params: DecoderParams,
    config: ModelConfig,
    x: jax.Array,
    cache: PagedKVCache,
    meta: AttentionMetadata,
    angles: Sequence[Rotation | None] = (),
) -> tuple[jax.Array, PagedKVCache]:
    """Run x [T, D] through all layers, each with its `angles` (None: it rotates nothing).

    Without any, all rotate alike, as `config` says.

    A Python loop over separate arrays: a scan would copy each layer's weights at every step. The
    layer is jitted by its family, so that it is traced once for all layers of a kind.

    Of a model in stages (`paged.models.stages`) these are the layers that are here, and x is passed
    on in the cache.

    Returns:
        (x [T, D], cache with this step's keys and values).
    """
    angles = angles or [rotation(config, meta.positions)] * config.num_layers
    of_group, arrays = meta.of_groups(), list(cache.layers)
    layers = Layers(params.layers)
    x = x if cache.relay is None else cache.relay
    for home, turn, window in zip(cache.homes, angles, config.windows, strict=True):
        if home is None:  # its devices have run it, or will
            continue
        weights, x = layers.next(x)
        pages, group = arrays[home.array], of_group[home.group]
        x, pages = layer(weights, x, pages, turn, group, config=config, window=window)
        arrays[home.array] = pages
    return x, PagedKVCache(tuple(arrays), cache.homes, x if None in cache.homes else None)


def logits(params: DecoderParams, config: ModelConfig, hidden: jax.Array) -> jax.Array:
    """Logits [R, V] float32 of hidden states [R, D]."""
    dtype = jnp.dtype(jnp.float32)
    if params.head is None:
        return params.embedding.unembed(hidden, dtype)
    return params.head(hidden, dtype)


def capped(x: jax.Array, cap: float | None) -> jax.Array:
    """x bent into -cap to cap by a tanh; None leaves it."""
    return x if cap is None else cap * jnp.tanh(x / cap)
