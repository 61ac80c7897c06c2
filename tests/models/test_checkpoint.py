"""Checkpoints that do not fit their model are refused before any memory is taken."""

from __future__ import annotations

import math
import mmap
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import params as loading
from paged.models.loading.checkpoint import (
    CheckpointError,
    TensorInfo,
    check_tensors,
    map_file,
    release,
)
from paged.models.loading.dummy import random_params
from paged.models.loading.params import load_params
from paged.models.registry import FAMILIES, get_family, model_config
from paged.models.weights import ParamSpec, Part, param_bytes, param_shapes
from paged.runtime.compiles import use_compile_cache
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


def test_layers_that_guess_further_tokens_are_left_out():
    specs, checkpoint = checkpoint_of("deepseek_v3")
    further = np.zeros(1, np.float32)
    names = ("eh_proj.weight", "enorm.weight", "mlp.gate.weight", "shared_head.head.weight")
    checkpoint.arrays.update({f"model.layers.3.{name}": further for name in names})
    check_tensors(specs, checkpoint)
    del checkpoint.arrays["model.layers.3.eh_proj.weight"]
    refuse(specs, checkpoint, "tensors 'model.layers.3.enorm.weight'")


def test_a_parameter_may_have_a_type_of_its_own():
    specs, checkpoint = checkpoint_of("deepseek_v3")
    half = jnp.dtype(jnp.bfloat16)
    params = load_params(specs, checkpoint, half, show_progress=False)
    bias = checkpoint.arrays["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(params.layers[1].bias, bias)
    shapes = param_shapes(specs, half)
    assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, params)
    assert param_bytes(specs, half) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    dummy = random_params(specs, half)
    assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(lambda x: x.dtype, dummy)


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
    owners: dict[str, list[ParamSpec]] = {}  # of some tensors several, each of a part
    for spec in jax.tree.leaves(specs):
        for tensor in {part.name for part in spec.parts}:
            owners.setdefault(tensor, []).append(spec)
    for index, (tensor, values) in enumerate(checkpoint.arrays.items()):
        place, value = values.size * index // len(owners), (np.nan, np.inf, -np.inf)[index % 3]
        exact = values.flat[place]
        values.flat[place] = value
        parts = [part for spec in owners[tensor] for part in spec.parts]
        alone = Memory({part.name: checkpoint.arrays[part.name] for part in parts})
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


@pytest.mark.parametrize("name", ["llama", "phi3", "qwen3_moe"])
def test_large_tensors_come_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specs, checkpoint = checkpoint_of(name)
    bfloat16 = jnp.dtype(jnp.bfloat16)
    whole = load_params(specs, checkpoint, bfloat16, show_progress=False)
    monkeypatch.setattr(loading, "_PIECE", 1000)
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(specs, checkpoint, bfloat16, show_progress=False),
        whole,
    )


@pytest.mark.parametrize("allowed", [1, 100_000])
def test_what_is_on_its_way_is_limited(allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes of parameters, unless one alone is larger."""
    specs, checkpoint = checkpoint_of("llama")
    largest = max(param_bytes(spec, F32) for spec in jax.tree.leaves(specs))
    load, lock, on_the_way, most = loading._load_group, threading.Lock(), [], 0

    def watched(group: list[tuple[ParamSpec, Any]], *how: Any) -> list[jax.Array]:
        nonlocal most
        size = sum(param_bytes(spec, F32) for spec, _ in group)
        with lock:
            on_the_way.append(size)
            most = max(most, sum(on_the_way))
        time.sleep(0.002)  # until others would have begun
        params = load(group, *how)
        with lock:
            on_the_way.remove(size)
        return params

    monkeypatch.setattr(loading, "_load_group", watched)
    monkeypatch.setattr(loading, "_IN_FLIGHT", allowed)
    load_params(specs, checkpoint, F32, show_progress=False)
    assert 0 < most <= max(allowed, largest)


def test_threads_do_not_read_what_others_write_to_the_compilation_cache(tmp_path: Path) -> None:
    """JAX would warn of half a file, and warnings are errors here."""
    names = [f"tensor {number}" for number in range(32)]
    # Of different makes, all of which the same program assembles.
    specs = [
        ParamSpec((Part(name, (8, 8), (8, 8)),), (8, 8), (name, None), "ones") for name in names
    ]
    checkpoint = Memory({name: np.ones((8, 8), np.float32) for name in names})
    try:
        for turn in map(str, range(5)):
            use_compile_cache(str(tmp_path / turn))
            jax.clear_caches()
            loading._assembler.cache_clear()
            load_params(specs, checkpoint, F32, show_progress=False)
            assert any((tmp_path / turn).iterdir())
    finally:
        use_compile_cache("")


def mapped_bytes() -> int:
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "RssFile" in line
    ]
    return int(line.split()[1]) * 1024


def test_a_view_that_was_read_is_let_go(tmp_path: Path) -> None:
    size = 2**25
    (tmp_path / "file").write_bytes(b"1" * size)
    mapped = map_file(tmp_path / "file")
    assert isinstance(mapped, mmap.mmap)
    before = mapped_bytes()
    view = np.frombuffer(mapped, np.uint8, offset=100).reshape(2, -1)[1:]
    assert view.sum() == view.size * ord("1")
    assert mapped_bytes() - before > view.size * 0.9
    release(view)
    assert mapped_bytes() - before < view.size * 0.1
    assert view.sum() == view.size * ord("1")
    release(np.ones(3))  # mapped from nowhere
    release(view[:0])
