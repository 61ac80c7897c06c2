"""What was measured: written by `benchmarks/tune_attention.py`, for each kind of device.

A GPU or heads that are not here are measured when an engine first needs them.
"""

from __future__ import annotations

from paged.attention.tiling import (
    Key,
    MosaicDecode,
    MosaicPrefill,
    Tilings,
    TritonDecode,
    TritonPrefill,
)

__all__ = ["TUNED", "MosaicDecode", "MosaicPrefill", "TritonDecode", "TritonPrefill"]

TUNED: dict[str, dict[Key, Tilings]] = {
    "NVIDIA H200": {
        (128, 4, 16, "bfloat16"): Tilings(
            decode=((256, MosaicDecode()),),
            prefill=((2048, MosaicPrefill(span=128)),),
        ),
        (128, 4, 16, "float8_e4m3fn"): Tilings(
            decode=((256, MosaicDecode()),),
            prefill=((2048, MosaicPrefill(span=128)),),
        ),
        (128, 4, 16, "int8"): Tilings(
            decode=((256, TritonDecode(span=64)),),
            prefill=((2048, MosaicPrefill(span=128)),),
        ),
    },
}
