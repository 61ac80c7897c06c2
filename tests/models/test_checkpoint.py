"""Checkpoints that do not fit their model are refused before any memory is taken."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading.checkpoint import CheckpointError, TensorInfo, check_tensors, load_params
from paged.models.registry import FAMILIES, get_family, model_config
from paged.models.weights import param_bytes
from tests.models.harness import load_golden, one_golden_a_family, tiny_tensors
from tests.models.test_goldens import NAMES

F32 = jnp.dtype(jnp.float32)


class Memory:
    """A checkpoint that lives in memory and counts what is read of it."""

    def __init__(self, tensors: dict[str, np.ndarray]) -> None:
        self.arrays = tensors
        self.reads = 0

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(a.shape, "memory", a.dtype) for name, a in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        self.reads += 1
        return self.arrays[name]


@dataclass(frozen=True)
class Shapes:
    """A checkpoint of which nothing can be read but its headers."""

    tensors: dict[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        raise AssertionError(f"{name} was read")


def checkpoint_of(name: str) -> tuple[Any, Memory]:
    golden = load_golden(name)
    config = model_config(golden["config"])
    return get_family(config.architecture).specs(config), Memory(tiny_tensors(golden))


def test_every_family_has_a_golden():
    """But for other names of a family."""
    goldens = {load_golden(name)["config"]["architectures"][0] for name in NAMES}
    missing = set(FAMILIES) - goldens
    assert all(any(FAMILIES[each] is FAMILIES[one] for one in goldens) for each in missing)


def refuse(specs: Any, checkpoint: Memory, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_params(specs, checkpoint, F32)
    assert all(word in str(error.value) for word in words)
    assert checkpoint.reads == 0


def test_missing_tensors_are_named():
    specs, checkpoint = checkpoint_of("llama")
    for name in list(checkpoint.arrays):
        if "layers.1" in name:
            del checkpoint.arrays[name]
    refuse(specs, checkpoint, "lacks", "model.layers.1.input_layernorm.weight", "and 4 more")


def test_unexpected_tensors_are_named():
    specs, checkpoint = checkpoint_of("llama")
    checkpoint.arrays["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    refuse(specs, checkpoint, "tensor 'model.layers.2.mlp.up_proj.weight'", "config.json")


def test_wrong_shape_is_named():
    specs, checkpoint = checkpoint_of("llama")
    checkpoint.arrays["lm_head.weight"] = np.zeros((130, 64), np.float32)
    refuse(specs, checkpoint, "lm_head.weight", "memory", "[130, 64]", "[128, 64]")


def test_harmless_extras_are_ignored():
    specs, checkpoint = checkpoint_of("llama_tied")
    checkpoint.arrays["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    checkpoint.arrays["lm_head.weight"] = np.zeros((128, 64), np.float32)
    assert load_params(specs, checkpoint, F32).head is None


def test_tensors_are_cast_and_copied():
    specs, checkpoint = checkpoint_of("llama")
    params = load_params(specs, checkpoint, jnp.dtype(jnp.bfloat16), show_progress=False)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    norm = checkpoint.arrays["model.norm.weight"]
    kept = load_params(specs, checkpoint, F32, show_progress=False).final_norm
    expected = norm.copy()
    norm[:] = 0
    np.testing.assert_array_equal(kept, expected)


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_every_family_is_checked(name: str) -> None:
    golden = load_golden(name)
    config = model_config(golden["config"])
    specs = get_family(config.architecture).specs(config)
    checkpoint = Shapes({each: TensorInfo(tuple(s), "f") for each, s in golden["tensors"].items()})
    check_tensors(specs, checkpoint)
    elements = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    assert param_bytes(specs, F32) == 4 * elements, "an element is left out or taken twice"
    for tensor, info in checkpoint.tensors.items():
        others = {each: other for each, other in checkpoint.tensors.items() if each != tensor}
        with pytest.raises(CheckpointError, match=f"lacks tensor '{re.escape(tensor)}'"):
            check_tensors(specs, Shapes(others))
        longer = TensorInfo((info.shape[0] + 1, *info.shape[1:]), "f")
        with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}.*has shape"):
            check_tensors(specs, Shapes(others | {tensor: longer}))
        quantized = TensorInfo(info.shape, "f", np.dtype(np.int8))
        with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}.*has dtype int8"):
            check_tensors(specs, Shapes(others | {tensor: quantized}))
    extra = {"layers.0.extra.weight": TensorInfo((1,), "f")}
    with pytest.raises(CheckpointError, match=r"has tensor 'layers\.0\.extra\.weight'"):
        check_tensors(specs, Shapes(checkpoint.tensors | extra))


@pytest.mark.parametrize("name", one_golden_a_family())
def test_a_tensor_that_is_not_of_numbers_is_named(name: str) -> None:
    """One NaN or infinity in any tensor, whatever family it is of, and whatever else is joined."""
    specs, checkpoint = checkpoint_of(name)
    owners = {part.name: spec for spec in jax.tree.leaves(specs) for part in spec.parts}
    for index, (tensor, values) in enumerate(checkpoint.arrays.items()):
        place, value = values.size * index // len(owners), (np.nan, np.inf, -np.inf)[index % 3]
        exact = values.flat[place]
        values.flat[place] = value
        alone = Memory({part.name: checkpoint.arrays[part.name] for part in owners[tensor].parts})
        with pytest.raises(CheckpointError) as error:
            load_params(owners[tensor], alone, F32, show_progress=False)
        assert f"tensor '{tensor}' in memory has 1 values of" in str(error.value)
        values.flat[place] = exact


def test_values_that_a_dtype_does_not_hold_are_named():
    specs, checkpoint = checkpoint_of("llama")
    checkpoint.arrays["model.norm.weight"][3] = 1e5
    load_params(specs, checkpoint, jnp.dtype(jnp.bfloat16), show_progress=False)
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight'.*6.55e\+04.*bfloat16"):
        load_params(specs, checkpoint, jnp.dtype(jnp.float16), show_progress=False)
