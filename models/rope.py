"""Rotary position embedding (Su et al. 2021), half-split, with the scalings checkpoints ask for.

Frequencies are worked out on the host in float32, in the order of operations of Hugging Face
transformers, so that long positions turn by the same angle.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.config import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles, each [T, D / 2] float32."""

    cos: jax.Array
    sin: jax.Array


def rotation(config: ModelConfig, positions: jax.Array) -> Rotation:
    """Angles of tokens at `positions` [T] int32."""
    frequencies, attention_factor = rope_frequencies(config)
    angles = positions[:, None].astype(jnp.float32) * frequencies
    return Rotation(jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor)


def rotate(x: jax.Array, angles: Rotation) -> jax.Array:
    """Turn heads x [T, H, D]: element i pairs with element i + D / 2."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
    """([D / 2] float32 radians per position, factor on cos and sin)."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    wavelengths = np.float32(config.rope_theta) ** exponents
    if config.rope_scaling is None:
        return 1 / wavelengths, 1.0
    return _SCALINGS[config.rope_scaling.kind](wavelengths, config, config.rope_scaling)


def _linear(
    wavelengths: np.ndarray, config: ModelConfig, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    return 1 / wavelengths / np.float32(scaling.factor), 1.0


def _dynamic(
    wavelengths: np.ndarray, config: ModelConfig, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """Unscaled: it differs only beyond `config.context_length`."""
    return 1 / wavelengths, 1.0


def _factors(
    wavelengths: np.ndarray, config: ModelConfig, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    return 1 / wavelengths / np.asarray(scaling.divisors, np.float32), 1.0


def _llama3(
    wavelengths: np.ndarray, config: ModelConfig, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """Slow frequencies are divided by the factor, fast ones kept, and the band between blended."""
    frequencies = 1 / wavelengths
    turns = scaling.original_max_position / (np.float32(2 * math.pi) / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - smooth) * frequencies / np.float32(scaling.factor) + smooth * frequencies, 1.0


def _yarn(
    wavelengths: np.ndarray, config: ModelConfig, scaling: RopeScaling
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023): a ramp from kept to divided frequencies, and softer attention."""
    low, high = _yarn_ramp(config, scaling)
    ramp = (np.arange(config.head_dim // 2, dtype=np.float32) - low) / (high - low)
    divided = np.clip(ramp, 0, 1).astype(np.float32)
    kept = 1 / wavelengths
    scaled = 1 / (np.float32(scaling.factor) * wavelengths)
    return scaled * divided + kept * (1 - divided), _yarn_attention_factor(scaling)


def _yarn_ramp(config: ModelConfig, scaling: RopeScaling) -> tuple[float, float]:
    """Dimensions that turn `beta_fast` and `beta_slow` times over the original context."""

    def dimension(turns: float) -> float:
        span = scaling.original_max_position / (turns * 2 * math.pi)
        return config.head_dim * math.log(span) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def softening(weight: float) -> float:
        if scaling.factor <= 1:
            return 1.0
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return softening(scaling.mscale) / softening(scaling.mscale_all_dim)
    return softening(1.0)


_Scaling = Callable[[np.ndarray, ModelConfig, RopeScaling], tuple[np.ndarray, float]]
_SCALINGS: dict[str, _Scaling] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "factors": _factors,
    "llama3": _llama3,
    "yarn": _yarn,
}
