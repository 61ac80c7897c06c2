"""gpt-oss: mixtures in all layers, a sink in each head's softmax, a window in every other layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from paged.attention import AttentionMetadata
from paged.cache import Pages
from paged.models import llama
from paged.models.activations import ClampedSwiglu
from paged.models.config import ModelConfig, parse_config
from paged.models.config_values import count, expect, number
from paged.models.experts import (
    DenseExperts,
    Mixture,
    Routing,
    SparseLayerParams,
    add_mixture,
    sparse_layer_specs,
)
from paged.models.layers import (
    DecoderParams,
    decode,
    decoder_specs,
    layer_specs,
)
from paged.models.mxfp4 import mxfp4
from paged.models.rope import Rotation
from paged.models.weights import Init, ParamSpec, Part, linear, vector

DEFAULTS: dict[str, Any] = {
    "attention_bias": True,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "sliding_window": 128,
    "sliding_window_pattern": 2,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "use_sliding_window": True,
}


@dataclass(frozen=True)
class Extras:
    """Settings of gpt-oss.

    Attributes:
        routing: of the mixtures.
        activation: of the experts.
        packed: the checkpoint has the experts' weights in 4 bits.
    """

    routing: Routing
    activation: ClampedSwiglu
    packed: bool


@struct.dataclass
class GptOssLayerParams(SparseLayerParams):
    """Weights of one layer.

    Attributes:
        sinks: [Hq].
    """

    sinks: jax.Array


def configure(data: Mapping[str, Any]) -> ModelConfig:
    """See `paged.models.registry.Family`."""
    expect(data, "hidden_act", "silu")
    quantization = data.get("quantization_config")
    packed = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    routing = Routing(
        num_experts=count(data, "num_local_experts"),
        num_chosen=count(data, "num_experts_per_tok"),
        expert_size=count(data, "intermediate_size"),
        renormalise=True,
    )
    activation = ClampedSwiglu(number(data, "swiglu_alpha"), number(data, "swiglu_limit"))
    unpacked = {**data, "quantization_config": None if packed else quantization}
    return parse_config(unpacked, Extras(routing, activation, packed))


def specs(config: ModelConfig) -> DecoderParams:
    """Description of the parameters."""
    return decoder_specs(config, partial(_layer_specs, config))


def _layer_specs(config: ModelConfig, index: int) -> GptOssLayerParams:
    prefix, bias = f"model.layers.{index}", config.attention_bias
    plain = layer_specs(config, index, qkv_bias=bias, out_bias=bias)
    sinks: Any = vector(f"{prefix}.self_attn.sinks", config.num_heads, "zeros", "heads")
    mixture = _mixture_specs(f"{prefix}.mlp", config)
    return GptOssLayerParams(**vars(sparse_layer_specs(plain, mixture)), sinks=sinks)


def _mixture_specs(prefix: str, config: ModelConfig) -> Mixture:
    """Description of a mixture whose experts are stacked in the checkpoint, biases and all."""
    experts, size = config.extras.routing.num_experts, config.extras.routing.expert_size
    hidden_size, packed = config.hidden_size, config.extras.packed
    gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    inner, outer = (experts, hidden_size, 2, size), (experts, size, hidden_size)
    inner_axes, outer_axes = ("experts", None, None, None), ("experts", None, None)
    kernels: Any = (
        (mxfp4(gate_up, inner, inner_axes), mxfp4(down, outer, outer_axes))
        if packed
        else (_paired(gate_up, inner, inner_axes, "normal"), _plain(down, outer, outer_axes))
    )
    biases: Any = (
        _paired(f"{gate_up}_bias", (experts, 2, size), ("experts", None, None), "zeros"),
        _plain(f"{down}_bias", (experts, hidden_size), ("experts", None), "zeros"),
    )
    return Mixture(
        router=linear(f"{prefix}.router", hidden_size, experts, bias=True),
        gate_up=DenseExperts(kernels[0], biases[0]),
        down=DenseExperts(kernels[1], biases[1]),
    )


def _plain(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init = "normal"
) -> ParamSpec:
    return ParamSpec((Part(name, shape, shape),), shape, axes, init)


@dataclass(frozen=True)
class PairedSpec(ParamSpec):
    """A parameter [..., 2, F] of a checkpoint tensor in which the two alternate."""

    def assemble(self, tensors: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        """See `ParamSpec.assemble`."""
        return jnp.swapaxes(tensors[0].reshape(self.parts[0].view).astype(dtype), -1, -2)


def _paired(
    name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init
) -> PairedSpec:
    *outer, pair, size = shape
    part = Part(name, (*outer, pair * size), (*outer, size, pair))
    return PairedSpec((part,), shape, axes, init)


@partial(jax.jit, static_argnames=("config", "window"))
def layer(
    params: GptOssLayerParams,
    x: jax.Array,
    pages: Pages,
    angles: Rotation | None,
    meta: AttentionMetadata,
    *,
    config: ModelConfig,
    window: int | None,
) -> tuple[jax.Array, Pages]:
    """See `paged.models.layers.Layer`."""
    sinks = params.sinks.astype(jnp.float32)
    x, pages = llama.attend(
        params, x, pages, angles, meta, config=config, window=window, sinks=sinks
    )
    extras = config.extras
    return add_mixture(params, x, extras.routing, meta, config, extras.activation), pages


forward = partial(decode, layer)
