"""What a checkpoint says about its model, as one frozen record.

`parse_config` reads a Hugging Face `config.json` as it is written by old and new releases of
transformers (`rope_scaling` or `rope_parameters`, `torch_dtype` or `dtype`). Values that the models
cannot honour are refused here, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from paged.cache import CacheSpec
from paged.errors import ConfigError
from paged.models.activations import ACTIVATIONS
from paged.models.config_values import TOO_MANY, count, flag, number, shown
from paged.models.quantized.published import published_quantization
from paged.models.quantized.rules import Quantization

_LAYER_TYPES = ("sliding_attention", "full_attention")
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
        original_max_position: context the model was first trained with (llama3, yarn, longrope).
        low_freq_factor, high_freq_factor: llama3's bounds of the smoothed band.
        beta_fast, beta_slow: yarn's bounds of its ramp, in rotations.
        attention_factor: factor of yarn and longrope on cos and sin; None derives it from `factor`.
        mscale, mscale_all_dim: yarn's alternative derivation of that factor.
        truncate: yarn rounds the ends of its ramp to whole dimensions.
        divisors: what each frequency is divided by (longrope; factors, as GGUF files store them).
        short_divisors: longrope's for a model that stays within the original context.
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
    short_divisors: tuple[float, ...] = ()


# What each type must state besides its name.
_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("long_factor", "short_factor"),
    "factors": ("divisors",),
}
_ROPE_NUMBERS = (
    *("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
    *("attention_factor", "mscale", "mscale_all_dim"),
)
SUPPORTED_ROPE_TYPES = ("default", *_ROPE_KEYS)


@dataclass(frozen=True)
class ModelConfig:
    """The shape and constants of one model.

    Attributes:
        architecture: class name in `architectures`, the key of the family registry.
        windows: per layer, how many positions a token sees (itself included); None sees all.
        rope_scaling: None for plain rotary embedding.
        partial_rotary_factor: share of a head's elements, from its first on, that are rotated.
        norm_eps: what norms add to the mean square, or to the variance.
        hidden_act: of the MLPs, one of `ACTIVATIONS`.
        dtype: as the checkpoint declares it ("bfloat16", "float16" or "float32").
        bos_token_id, eos_token_ids: as config.json has them, possibly none.
        latent_rank: pages hold one row of head_dim elements for a token (num_kv_heads is 1), whose
            first so many are value and part of the key for all heads; None for keys and values.
        quantization: how projections are stored; None for full precision.
        extras: the settings that only this family has, as a frozen record of its own.
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
    partial_rotary_factor: float = 1.0
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    latent_rank: int | None = None
    quantization: Quantization | None = None
    extras: Any = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ConfigError(
                f"rotary embedding turns pairs of a head's elements, and cannot turn "
                f"{self.rotary_dim} of {self.head_dim}"
            )
        scaling, frequencies = self.rope_scaling or RopeScaling("default"), self.rotary_dim // 2
        for divisors in (scaling.divisors, scaling.short_divisors):
            if divisors and len(divisors) != frequencies:
                raise ConfigError(
                    f"{len(divisors)} rope divisors for {frequencies} frequencies of a head"
                )
        if len(self.windows) != self.num_layers:
            raise ConfigError(f"{len(self.windows)} attention windows for {self.num_layers} layers")

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

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

    def cache_spec(self, num_pages: int, page_size: int, dtype: jnp.dtype) -> CacheSpec:
        """The pages that its layers need; for the arguments see `CacheSpec`."""
        return CacheSpec(
            num_layers=self.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=dtype,
            latent_rank=self.latent_rank,
        )

    def share(self, num_devices: int) -> ModelConfig:
        """What each of so many devices sees of the model, which share its heads.

        Of fewer key/value heads than devices, each sees one, and so do others.
        """
        kv_heads = max(self.num_kv_heads // num_devices, 1)
        return replace(self, num_heads=self.num_heads // num_devices, num_kv_heads=kv_heads)

    def for_length(self, length: int) -> ModelConfig:
        """The configuration of a model whose sequences end at `length` tokens.

        longrope turns differently where none exceeds the original context. That is settled for all
        sequences at once: one that grew beyond it could not take its keys along.
        """
        scaling = self.rope_scaling
        if scaling is None or not scaling.short_divisors or length > scaling.original_max_position:
            return self
        return replace(self, rope_scaling=replace(scaling, divisors=scaling.short_divisors))


def parse_config(
    data: Mapping[str, Any], extras: Any = None, *, rotated_share: float | None = None
) -> ModelConfig:
    """Build the record from a config.json whose gaps the family's defaults have filled.

    Args:
        data: the file's content.
        extras: see `ModelConfig`.
        rotated_share: `partial_rotary_factor` where the family has another word for it; None for
            what the file says.

    Raises:
        ConfigError: a key is missing, or a value is not supported.
    """
    num_layers = count(data, "num_hidden_layers")
    num_heads = count(data, "num_attention_heads")
    hidden_size = count(data, "hidden_size")
    rope = _rope_parameters(data)
    return ModelConfig(
        architecture=architecture_of(data),
        vocab_size=count(data, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=count(data, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=count(data, "num_key_value_heads", num_heads),
        head_dim=count(data, "head_dim", hidden_size // num_heads),
        max_position_embeddings=count(data, "max_position_embeddings"),
        windows=_windows(data, num_layers),
        rope_theta=number(rope, "rope_theta"),
        rope_scaling=_rope_scaling(rope, data),
        partial_rotary_factor=rotated_share or number(rope, "partial_rotary_factor"),
        norm_eps=number(data, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(data, "tie_word_embeddings"),
        attention_bias=flag(data, "attention_bias"),
        mlp_bias=flag(data, "mlp_bias"),
        hidden_act=_activation(data),
        dtype=_declared_dtype(data),
        bos_token_id=next(iter(token_ids(data.get("bos_token_id"))), None),
        eos_token_ids=token_ids(data.get("eos_token_id")),
        quantization=published_quantization(data),
        extras=extras,
    )


def architecture_of(data: Mapping[str, Any]) -> str:
    """The first entry of `architectures`."""
    names = data.get("architectures")
    if not names or not isinstance(names, list):
        raise ConfigError("the model configuration names no class in 'architectures'")
    return str(names[0])


def token_ids(value: Any) -> tuple[int, ...]:
    """A token id entry of a configuration file, which may be absent, one id or several.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(type(each) is int and 0 <= each < TOO_MANY for each in ids):
        raise ConfigError(f"a token id of the model must be a whole number, found {shown(value)}")
    return tuple(ids)


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


def _activation(data: Mapping[str, Any]) -> str:
    name = data.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(
            f"hidden_act {shown(name)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return name


def _declared_dtype(data: Mapping[str, Any]) -> str:
    name = str(data.get("dtype") or data.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ConfigError(
            f"the model configuration declares dtype {name!r}; supported: "
            f"{', '.join(SUPPORTED_DTYPES)}"
        )
    return name


def _windows(data: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    _check_layer_types(data, num_layers)
    if data.get("sliding_window") is None or not flag(data, "use_sliding_window"):
        return (None,) * num_layers
    window = count(data, "sliding_window")
    return tuple(window if windowed else None for windowed in _windowed(data, num_layers))


def _check_layer_types(data: Mapping[str, Any], num_layers: int) -> None:
    """Refuse layers of a type that is none of ours, also where there is no window."""
    types = data.get("layer_types")
    if types is None:
        return
    if not isinstance(types, list) or len(types) != num_layers:
        raise ConfigError(
            f"layer_types must list a type for each of {num_layers} layers, found "
            f"{f'{len(types)} types' if isinstance(types, list) else shown(types)}"
        )
    unknown = [kind for kind in types if kind not in _LAYER_TYPES]
    if unknown:
        raise ConfigError(
            f"layer_types has {shown(unknown[0])}; supported: {', '.join(_LAYER_TYPES)}"
        )


def _windowed(data: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Which layers have a window: `layer_types` tells, or else one of two older settings."""
    types = data.get("layer_types")
    if types is not None:
        return [kind == "sliding_attention" for kind in types]
    if data.get("sliding_window_pattern"):
        pattern = count(data, "sliding_window_pattern")
        return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
    first = count(data, "max_window_layers", num_layers) if data.get("max_window_layers") else 0
    return [layer >= first for layer in range(num_layers)]


def _rope_parameters(data: Mapping[str, Any]) -> dict[str, Any]:
    """One dict of rotary settings, with its type and base, from either way of writing them."""
    given = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ConfigError(f"the rope settings must be an object, found {shown(given)}")
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(f"rope settings of {nested[0]!r} alone are not supported for this model")
    rope = dict(given)
    rope.setdefault("rope_type", rope.get("type") or "default")
    for key, usual in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
        outside = data.get(key)
        rope.setdefault(key, usual if outside is None else outside)
    return rope


def _rope_scaling(rope: Mapping[str, Any], data: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope["rope_type"]
    if kind == "su":  # its first name
        kind = "longrope"
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise ConfigError(
            f"rope type {shown(kind)} is not supported; supported: "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    missing = [key for key in _ROPE_KEYS[kind] if rope.get(key) is None]
    if missing:
        raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}")
    given = {key: number(rope, key) for key in _ROPE_NUMBERS if rope.get(key) is not None}
    if kind == "llama3" and given["high_freq_factor"] <= given["low_freq_factor"]:
        raise ConfigError("rope type 'llama3' needs a high_freq_factor above its low_freq_factor")
    if kind == "yarn" and number(rope, "rope_theta") <= 1:  # its logarithm divides
        raise ConfigError(
            f"rope type 'yarn' needs a rope_theta above 1, found {shown(rope['rope_theta'])}"
        )
    longest = count(data, "max_position_embeddings")
    original = count(rope, "original_max_position_embeddings", longest)
    original = count(data, "original_max_position_embeddings", original)
    if kind == "longrope":
        if original < 2:  # its logarithm divides
            raise ConfigError("rope type 'longrope' needs an original context above 1, found 1")
        given.setdefault("factor", longest / original)
    return RopeScaling(
        kind=kind,
        original_max_position=original,
        truncate=flag({"truncate": True, **rope}, "truncate"),
        divisors=_numbers(rope, "long_factor" if kind == "longrope" else "divisors"),
        short_divisors=_numbers(rope, "short_factor"),
        **given,
    )


def _numbers(rope: Mapping[str, Any], key: str) -> tuple[float, ...]:
    numbers = rope.get(key, ())
    if not isinstance(numbers, list | tuple):
        raise ConfigError(f"{key!r} must be a list of numbers, found {shown(numbers)}")
    return tuple(number({key: each}, key) for each in numbers)
