"""What a checkpoint says about its model, as one frozen record.

`parse_config` reads a Hugging Face `config.json` as it is written by old and new releases of
transformers (`rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`). Values that the models
cannot honour are refused here, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from paged.errors import ConfigError

SUPPORTED_ACTIVATIONS = ("silu",)
SUPPORTED_DTYPES = {
    "float32": jnp.float32,
    "float": jnp.float32,
    "float16": jnp.float16,
    "half": jnp.float16,
    "bfloat16": jnp.bfloat16,
}


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed to reach contexts longer than the trained one.

    Attributes:
        kind: one of `SUPPORTED_ROPE_TYPES`.
        factor: how many times longer the context becomes.
        original_max_position: context the model was first trained with (llama3, yarn).
        low_freq_factor, high_freq_factor: llama3's bounds of the smoothed band.
        beta_fast, beta_slow: yarn's bounds of its ramp, in rotations.
        attention_factor: yarn's factor on cos and sin; None derives it from `factor`.
        mscale, mscale_all_dim: yarn's alternative derivation of that factor.
        truncate: yarn rounds the ends of its ramp to whole dimensions.
        divisors: what each frequency is divided by (factors, as GGUF files store them).
    """

    kind: str
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    divisors: tuple[float, ...] = ()


# What each type must state besides its name.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": ("divisors",),
}
SUPPORTED_ROPE_TYPES = ("default", *_ROPE_KEYS)


@dataclass(frozen=True)
class ModelConfig:
    """The shape and constants of one model.

    Attributes:
        architecture: class name in `architectures`, the key of the family registry.
        windows: per layer, how many positions a token sees (itself included); None sees all.
        rope_scaling: None for plain rotary embedding.
        dtype: as the checkpoint declares it ("bfloat16", "float16" or "float32").
        bos_token_id, eos_token_ids: as config.json has them, possibly none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    windows: tuple[int | None, ...]
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, found {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def context_length(self) -> int:
        """Longest sequence (tokens) whose positions mean what they meant in training.

        Dynamic scaling changes its frequencies with the length of the sequence beyond
        `max_position_embeddings`, which keys already in pages cannot follow: it ends there.
        """
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "yarn":
            return max(
                self.max_position_embeddings,
                int(scaling.original_max_position * scaling.factor),
            )
        if scaling is not None and scaling.kind == "linear":
            return int(self.max_position_embeddings * scaling.factor)
        return self.max_position_embeddings


def parse_config(data: Mapping[str, Any]) -> ModelConfig:
    """Build the record from a config.json whose gaps the family's defaults have filled.

    Raises:
        ConfigError: a key is missing, or a value is not supported.
    """
    _refuse_unsupported(data)
    num_layers = _required(data, "num_hidden_layers")
    num_heads = _required(data, "num_attention_heads")
    hidden_size = _required(data, "hidden_size")
    eos = data.get("eos_token_id")
    rope = _rope_parameters(data)
    return ModelConfig(
        architecture=architecture_of(data),
        vocab_size=_required(data, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_required(data, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=data.get("num_key_value_heads") or num_heads,
        head_dim=data.get("head_dim") or hidden_size // num_heads,
        max_position_embeddings=_required(data, "max_position_embeddings"),
        windows=_windows(data, num_layers),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=_rope_scaling(rope, data),
        rms_norm_eps=data.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=data.get("tie_word_embeddings", False),
        attention_bias=data.get("attention_bias", False),
        mlp_bias=data.get("mlp_bias", False),
        hidden_act=data.get("hidden_act", "silu"),
        dtype=_declared_dtype(data),
        bos_token_id=data.get("bos_token_id"),
        eos_token_ids=token_ids(eos),
    )


def architecture_of(data: Mapping[str, Any]) -> str:
    """The first entry of `architectures`."""
    names = data.get("architectures")
    if not names:
        raise ConfigError("the model configuration names no class in 'architectures'")
    return str(names[0])


def token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A token id entry of a configuration file, which may be absent, one id or several."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def resolve_dtype(name: str, config: ModelConfig, platform: str) -> jnp.dtype:
    """The dtype to compute in, for a `--dtype` value and a JAX platform ("cpu", "gpu", …).

    "auto" is float32 on a CPU. Elsewhere it is bfloat16 for bfloat16 checkpoints and float16 for
    the others, which halves the memory of float32 ones.
    """
    if name == "auto":
        if platform == "cpu":
            name = "float32"
        else:
            name = "bfloat16" if config.dtype == "bfloat16" else "float16"
    if name not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"dtype {name!r} is not supported; choose one of auto, {', '.join(SUPPORTED_DTYPES)}"
        )
    return jnp.dtype(SUPPORTED_DTYPES[name])


def _required(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    if value is None:
        raise ConfigError(f"the model configuration has no {key!r}")
    return int(value)


def _refuse_unsupported(data: Mapping[str, Any]) -> None:
    activation = data.get("hidden_act", "silu")
    if activation not in SUPPORTED_ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {activation!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ACTIVATIONS)}"
        )
    quantization = data.get("quantization_config")
    if quantization:
        raise ConfigError(
            f"quantized checkpoints are not supported (quantization_config has quant_method "
            f"{quantization.get('quant_method')!r}); use an unquantized one or a GGUF file"
        )


def _declared_dtype(data: Mapping[str, Any]) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"the model configuration declares dtype {name!r}; supported: "
            f"{', '.join(SUPPORTED_DTYPES)}"
        )
    return name


def _windows(data: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Per-layer windows: `layer_types` decides, else the layers from `max_window_layers` on."""
    window = data.get("sliding_window")
    if window is None or not data.get("use_sliding_window", False):
        return (None,) * num_layers
    types = data.get("layer_types")
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    first = data.get("max_window_layers", 0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _rope_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    """One dict of rotary settings, with its type and base, from either way of writing them."""
    rope = dict(data.get("rope_parameters") or data.get("rope_scaling") or {})
    rope.setdefault("rope_theta", data.get("rope_theta") or 10000.0)
    rope.setdefault("rope_type", rope.get("type") or "default")
    if rope.get("partial_rotary_factor", data.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ConfigError("partial_rotary_factor other than 1.0 is not supported")
    return rope


def _rope_scaling(rope: Mapping[str, Any], data: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "default":
        return None
    if kind not in _ROPE_KEYS:
        raise ConfigError(
            f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    missing = [key for key in _ROPE_KEYS[kind] if rope.get(key) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}")
    fields = RopeScaling.__dataclass_fields__
    given = {key: value for key, value in rope.items() if key in fields and value is not None}
    original = (
        data.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or _required(data, "max_position_embeddings")
    )
    return RopeScaling(kind=kind, original_max_position=original, **given)
