"""Attention over pages in Pallas kernels (Triton lowering) for NVIDIA GPUs.

`decode` reads each page once for all the query heads that share it and spreads long rows over many
programs; `prefill` runs the chunks of prompts tile by tile; `spans` is what both do with one span
of keys and values. On a platform without a GPU the same kernels run in Pallas' interpreter, slowly,
which is how they are tested there.
"""

from paged.attention.triton.decode import decode_attention
from paged.attention.triton.prefill import TILE_SIZE, prefill_attention

__all__ = ["TILE_SIZE", "decode_attention", "prefill_attention"]
