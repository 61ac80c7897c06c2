"""Whole models for vectors, compiled for an H200 on any machine: memory stays within bounds."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from paged.models.embedder import Embedder
from paged.models.pooling import Pooling
from paged.models.registry import model_config
from paged.models.weights import for_device, param_shapes
from paged.runtime.pooling.grid import Shape
from paged.runtime.pooling.runner import embed, packed_shape
from tests.paged import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 250002,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 8194,
}
MEBIBYTE = 2**20


@pytest.mark.parametrize(
    ("architecture", "kind", "mebibytes"),
    [("XLMRobertaModel", "cls", 2560), ("Qwen3Model", "last", 1024)],
)
@pytest.mark.parametrize(("rows", "length"), [(16, 512), (1, 8192)])
def test_scores_of_all_places_are_never_held_at_once(
    architecture: str, kind: Any, mebibytes: int, rows: int, length: int
) -> None:
    """Those of 8,192 places, in float32, would take 4 GiB."""
    config = model_config(SIZES | {"architectures": [architecture], "head_dim": 64})
    embedder = Embedder(config, Pooling(kind), backend="mosaic")
    params = for_device(param_shapes(embedder.specs(), jnp.dtype("bfloat16")), aot.H200.device)
    packed = packed_shape(Shape(rows, length))
    program = aot.compile_for_h200(partial(embed, embedder), params, packed, may_spill=True)
    report = program.memory_analysis()
    assert report is not None
    assert report.temp_size_in_bytes < mebibytes * MEBIBYTE
