"""Quantised checkpoints of tiny models, written from the formats' descriptions alone.

Each packer takes a weight [N, K] in full precision and gives the tensors that stand for it in a
checkpoint, by what their names end in, and the weight that they mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests.models.harness import load_golden, tiny_tensors

FLOAT8 = ml_dtypes.float8_e4m3fn


class Packed(NamedTuple):
    tensors: dict[str, np.ndarray]
    meaning: np.ndarray


Packer = Callable[[np.ndarray], Packed]


class Grid(NamedTuple):
    """Integers [N, K] of a weight, and for each group of inputs [N, G] the scale and the zero."""

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray


def grid(weight: np.ndarray, bits: int, owners: np.ndarray, *, symmetric: bool, group: int) -> Grid:
    """Quantise; `owners` [K] says which group an input is in."""
    most = 2**bits - 1
    rows, groups = len(weight), weight.shape[1] // group
    scales, zeros = np.zeros((rows, groups), np.float16), np.zeros((rows, groups), np.int64)
    values = np.zeros(weight.shape, np.int64)
    for index in range(groups):
        inputs = np.flatnonzero(owners == index)
        low, high = weight[:, inputs].min(axis=1), weight[:, inputs].max(axis=1)
        if symmetric:
            scale = np.maximum(np.abs(low), np.abs(high)) * 2 / most
            zero = np.full(rows, 2 ** (bits - 1))
        else:
            scale = (high - low) / most
            zero = np.clip(np.round(-low / scale), 1, most)
        scales[:, index], zeros[:, index] = scale, zero
        scaled = weight[:, inputs] / scales[:, index, None].astype(np.float32)
        values[:, inputs] = np.clip(np.round(scaled) + zero[:, None], 0, most)
    return Grid(values, scales, zeros)


def meaning(grid: Grid, owners: np.ndarray) -> np.ndarray:
    zeros = grid.values - grid.zeros[:, owners]
    return (zeros * grid.scales[:, owners].astype(np.float64)).astype(np.float32)


def words(values: np.ndarray, bits: int, order: tuple[int, ...] = ()) -> np.ndarray:
    """[..., n] to int32 [..., n * bits / 32]: place i of a word holds its value order[i]."""
    many = 32 // bits
    out = np.zeros((*values.shape[:-1], values.shape[-1] // many), np.uint32)
    for place in range(many):
        source = order[place] if order else place
        out |= values[..., source::many].astype(np.uint32) << np.uint32(bits * place)
    return out.view(np.int32)


def gptq(
    bits: int, group: int, *, symmetric: bool, act_order: bool = False, version: int = 1
) -> Packer:
    def pack(weight: np.ndarray) -> Packed:
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        owners = np.arange(inputs) // size
        if act_order:
            owners = np.random.default_rng(inputs).permutation(owners)
        made = grid(weight, bits, owners, symmetric=symmetric, group=size)
        stored = made.zeros - 1 if version == 1 else made.zeros
        tensors = {
            "qweight": words(made.values, bits).T,
            "qzeros": words(stored.T, bits),
            "scales": made.scales.T,
            "g_idx": owners.astype(np.int32),
            "bias": np.zeros(len(weight), np.float16),
        }
        return Packed(tensors, meaning(made, owners))

    return pack


def awq(group: int) -> Packer:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(weight: np.ndarray) -> Packed:
        owners = np.arange(weight.shape[1]) // group
        made = grid(weight, 4, owners, symmetric=False, group=group)
        tensors = {
            "qweight": words(made.values.T, 4, order),
            "qzeros": words(made.zeros.T, 4, order),
            "scales": made.scales.T,
        }
        return Packed(tensors, meaning(made, owners))

    return pack


def pack_quantized(
    bits: int, group: int | None, *, symmetric: bool, act_order: bool = False
) -> Packer:
    def pack(weight: np.ndarray) -> Packed:
        rows, inputs = weight.shape
        size = group or inputs
        owners = np.arange(inputs) // size
        if act_order:
            owners = np.random.default_rng(inputs).permutation(owners)
        made = grid(weight, bits, owners, symmetric=symmetric, group=size)
        tensors = {
            "weight_packed": words(made.values, bits),
            "weight_scale": made.scales,
            "weight_shape": np.array([rows, inputs], np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = words(made.zeros.T, bits).T
        if act_order:
            tensors["weight_g_idx"] = owners.astype(np.int32)
        return Packed(tensors, meaning(made, owners))

    return pack


def eight_bits(dtype: Any, *, per_tensor: bool, scalar: bool = False) -> Packer:
    """Weights in their own shape, with `weight_scale`."""
    most = 127 if dtype is np.int8 else 448

    def pack(weight: np.ndarray) -> Packed:
        largest = np.abs(weight).max(axis=None if per_tensor else 1, keepdims=True)
        scale = (largest / most).astype(np.float32)
        values = weight / scale
        stored = (np.round(values) if dtype is np.int8 else values).astype(dtype)
        tensors = {"weight": stored, "weight_scale": scale.reshape(()) if scalar else scale}
        return Packed(tensors, stored.astype(np.float32) * scale)

    return pack


def tiles(suffix: str) -> Packer:
    """Floats of 8 bits with a scale for each 128 by 128."""

    def pack(weight: np.ndarray) -> Packed:
        rows, inputs = weight.shape
        scales = np.zeros((-(-rows // 128), -(-inputs // 128)), np.float32)
        stored, meant = np.zeros(weight.shape, FLOAT8), np.zeros(weight.shape, np.float32)
        for i, j in np.ndindex(scales.shape):
            here = np.s_[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
            scales[i, j] = np.abs(weight[here]).max() / 448
            stored[here] = (weight[here] / scales[i, j]).astype(FLOAT8)
            meant[here] = stored[here].astype(np.float32) * scales[i, j]
        return Packed({"weight": stored, suffix: scales}, meant)

    return pack


def one_layer(name: str) -> dict[str, Any]:
    """A golden's model with its first layer alone."""
    golden = load_golden(name)
    tensors = {each: shape for each, shape in golden["tensors"].items() if ".layers.1." not in each}
    return golden | {"config": golden["config"] | {"num_hidden_layers": 1}, "tensors": tensors}


def resized(name: str, sizes: dict[int, int]) -> dict[str, Any]:
    """A golden's model whose sizes divide into groups."""
    golden = load_golden(name)
    tensors = {
        each: [sizes.get(size, size) for size in shape] for each, shape in golden["tensors"].items()
    }
    config = {
        key: sizes.get(value, value) if key.endswith(("_size", "head_dim")) else value
        for key, value in golden["config"].items()
    }
    return golden | {"config": config, "tensors": tensors}


def is_projection(name: str) -> bool:
    return re.search(r"(_proj|_proj_with_mqa|experts\.\d+\.w\d)\.weight$", name) is not None


def write_pair(
    folder: Path,
    golden: dict[str, Any],
    quantization: Mapping[str, Any],
    packer_of: Callable[[str], Packer | None],
) -> tuple[Path, Path]:
    """A quantised model, and one in full precision of the weights that it means.

    Args:
        packer_of: by the name of a projection's weight; None leaves it.
    """
    stored: dict[str, np.ndarray] = {}
    meant: dict[str, np.ndarray] = {}
    for name, tensor in tiny_tensors(golden).items():
        packer = packer_of(name) if is_projection(name) else None
        if packer is None:
            stored[name] = meant[name] = tensor
            continue
        packed = packer(tensor.astype(np.float32))
        module = name.removesuffix(".weight")
        meant[name] = packed.meaning
        # What the checkpoint has under a name of its own, as a bias, stays.
        stored |= {f"{module}.{each}": value for each, value in packed.tensors.items()}
    stored |= {name: meant[name] for name in meant if name.endswith(".bias")}
    config = golden["config"] | {"quantization_config": dict(quantization)}
    return _write(folder / "quantized", config, stored), _write(
        folder / "plain", golden["config"], meant
    )


def _write(folder: Path, config: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # Written as memory has them, so that rows must lie in memory as rows.
    rows = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(rows, folder / "model.safetensors")
    return folder
