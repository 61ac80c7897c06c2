"""The candidates of the search compile for GPUs, or are refused as the search expects."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from paged.attention import default_backend
from paged.attention.tiling import MosaicDecode, MosaicPrefill, TritonDecode, TritonPrefill
from paged.attention.tuning.search import Tiling
from paged.attention.tuning.timer import program_of
from paged.attention.tuning.workloads import Case, Layer, Workload
from paged.cache import KV_DTYPES, CacheSpec
from tests.paged import aot

pytestmark = [
    pytest.mark.skipif(not aot.available(), reason="needs jax[cuda13]"),
    # What replaces this backend is not as fast yet.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]

BF16 = jnp.dtype(jnp.bfloat16)
DECODE = Case(True, 8, (Workload(8, 1, 4095),))
PREFILL = Case(False, 2048, (Workload(1, 2048, 6144),))
GPUS = pytest.mark.parametrize("gpu", [aot.H200, aot.A100, aot.L40], ids=lambda gpu: gpu.name)


def layer_on(
    gpu: aot.Gpu, group: int = 4, head_dim: int = 128, kv_dtype: str = "bfloat16"
) -> Layer:
    cache = CacheSpec(1, 4096, 16, 2, head_dim, KV_DTYPES[kv_dtype])
    return Layer(2 * group, cache, BF16, default_backend(gpu.device))


def compile_tiling(
    gpu: aot.Gpu, layer: Layer, case: Case, tiling: Tiling, *, may_spill: bool
) -> None:
    function, args = program_of(layer, case, tiling)
    text = aot.compile_for(gpu, function, *args, may_spill=may_spill).as_text()
    assert text is not None
    assert ("mosaic_gpu" in text) is isinstance(tiling, MosaicDecode | MosaicPrefill)


@pytest.mark.parametrize(
    ("gpu", "case", "tiling"),
    [
        (aot.H200, DECODE, MosaicDecode(residents=3, ring=49152)),
        (aot.H200, DECODE, TritonDecode(span=64, programs=1024)),
        (aot.H200, PREFILL, MosaicPrefill(span=64, stages=4)),
        (aot.A100, DECODE, TritonDecode(span=128, stages=2)),
        (aot.A100, PREFILL, TritonPrefill(span=64, queries=128, stages=2)),
        (aot.L40, DECODE, TritonDecode(span=32, stages=5)),
        (aot.L40, PREFILL, TritonPrefill(span=32, queries=128, stages=2)),
    ],
    ids=lambda value: getattr(value, "name", type(value).__name__),
)
def test_a_tiling_compiles(gpu: aot.Gpu, case: Case, tiling: Tiling) -> None:
    compile_tiling(gpu, layer_on(gpu), case, tiling, may_spill=False)


def test_too_much_shared_memory_is_refused_before_a_launch() -> None:
    with pytest.raises(ValueError, match="shared memory"):
        compile_tiling(
            aot.H200,
            layer_on(aot.H200),
            PREFILL,
            MosaicPrefill(span=128, stages=4),
            may_spill=False,
        )


@pytest.mark.slow
@GPUS
@pytest.mark.parametrize("case", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("group", "head_dim", "kv_dtype"),
    [(4, 128, "bfloat16"), (3, 64, "bfloat16"), (2, 256, "bfloat16"), (8, 128, "int8")],
)
def test_enough_candidates_compile(
    gpu: aot.Gpu, case: Case, group: int, head_dim: int, kv_dtype: str
) -> None:
    layer = layer_on(gpu, group, head_dim, kv_dtype)
    refused = []
    for place, tiling in enumerate(case.candidates(layer)):
        try:
            compile_tiling(gpu, layer, case, tiling, may_spill=place == 0)
        except Exception as error:  # as the search sees it
            refused.append((place, str(error)))
    assert all("spilling" in why or "hared memory" in why for _, why in refused), refused
    assert 0 not in dict(refused), "the rule's own must compile"
    assert len(case.candidates(layer)) - len(refused) >= 3
