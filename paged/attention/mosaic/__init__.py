"""Attention over pages in Mosaic GPU, the form of Pallas that is to stay, for Hopper GPUs.

Its warpgroups and copies are told what to do one by one: some compute while another walks the page
tables and copies ahead of them.
"""

from paged.attention.mosaic.decode import decode_attention, mosaic_decode
from paged.attention.mosaic.prefill import TILE_SIZE, mosaic_prefill, prefill_attention

__all__ = [
    "TILE_SIZE",
    "decode_attention",
    "mosaic_decode",
    "mosaic_prefill",
    "prefill_attention",
]
