"""Rotary position embedding (Su et al. 2021), with the scalings checkpoints ask for.

Frequencies are worked out on the host in float32, in the order of operations of Hugging Face
transformers, so that long positions turn by the same angle.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.config import ModelConfig, RopeScaling


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles, each [T, N / 2] float32; N elements are rotated."""

    cos: jax.Array
    sin: jax.Array


def rotation(config: ModelConfig, positions: jax.Array) -> Rotation:
    """Angles of tokens at `positions` [T] int32."""
    angles = positions[:, None].astype(jnp.float32) * rope_frequencies(config)
    factor = attention_factor(config.rope_scaling)
    return Rotation(jnp.cos(angles) * factor, jnp.sin(angles) * factor)


def rotate(x: jax.Array, angles: Rotation | None) -> jax.Array:
    """Turn the first N elements of heads x [T, H, E], of which i pairs with i + N / 2.

    With None for angles the heads stay as they are.
    """
    if angles is None:
        return x
    half = angles.cos.shape[-1]
    first, second, rest = jnp.split(x, (half, 2 * half), axis=-1)
    return jnp.concatenate((*_turned(first, second, angles), rest), axis=-1)


def rotate_pairs(x: jax.Array, angles: Rotation | None) -> jax.Array:
    """As `rotate`, where neighbours are pairs: 2i and 2i + 1."""
    if angles is None:
        return x
    half = angles.cos.shape[-1]
    pairs = x[..., : 2 * half].reshape(*x.shape[:-1], half, 2)
    turned = jnp.stack(_turned(pairs[..., 0], pairs[..., 1], angles), axis=-1)
    return jnp.concatenate((turned.reshape(*x.shape[:-1], -1), x[..., 2 * half :]), axis=-1)


def _turned(first: jax.Array, second: jax.Array, angles: Rotation) -> tuple[jax.Array, jax.Array]:
    """Pairs [T, H, N / 2] turned by each token's angles, in float32 and back to their dtype."""
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    cos, sin = angles.cos[:, None], angles.sin[:, None]
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(first.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """[N / 2] float32 radians per position."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    plain = 1 / np.float32(config.rope_theta) ** exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    match scaling.kind:
        case "linear":
            return plain / np.float32(scaling.factor)
        case "factors" | "longrope":
            return plain / np.asarray(scaling.divisors, np.float32)
        case "llama3":
            return _llama3(plain, scaling)
        case "yarn":
            return _yarn(plain, scaling, config.rope_theta)
        case "dynamic":  # differs only beyond config.context_length
            return plain
    raise AssertionError(f"no frequencies for rope type {scaling.kind!r}")


def attention_factor(scaling: RopeScaling | None) -> float:
    """Factor on cos and sin, by which yarn and longrope sharpen attention over long contexts."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        growth = math.log(max(scaling.factor, 1.0))
        return math.sqrt(1 + growth / math.log(scaling.original_max_position))
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_factor(scaling, scaling.mscale) / yarn_factor(scaling, scaling.mscale_all_dim)
    return yarn_factor(scaling, 1.0)


def _llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Slow frequencies are divided by the factor, fast ones kept, and the band between blended."""
    turns = scaling.original_max_position / (np.float32(2 * math.pi) / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1).astype(np.float32)
    return (1 - kept) * plain / np.float32(scaling.factor) + kept * plain


def _yarn(plain: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """YaRN (Peng et al. 2023): a ramp over the dimensions from kept to divided frequencies."""
    low, high = _yarn_ramp(scaling, theta, 2 * plain.size)
    ramp = (np.arange(plain.size, dtype=np.float32) - low) / (high - low)
    divided = np.clip(ramp, 0, 1).astype(np.float32)
    return plain / np.float32(scaling.factor) * divided + plain * (1 - divided)


def _yarn_ramp(scaling: RopeScaling, theta: float, head_dim: int) -> tuple[float, float]:
    """Dimensions that turn `beta_fast` and `beta_slow` times over the original context."""

    def dimension(turns: float) -> float:
        span = scaling.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(span) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001


def yarn_factor(scaling: RopeScaling, weight: float) -> float:
    """How much sharper attention gets by yarn's scaling."""
    return 1.0 if scaling.factor <= 1 else 0.1 * weight * math.log(scaling.factor) + 1.0
