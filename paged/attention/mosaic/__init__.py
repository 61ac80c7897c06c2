"""Attention over pages in Mosaic GPU, the form of Pallas that is to stay, for Hopper GPUs.

Its warpgroups and copies are told what to do one by one: some compute while another walks the page
tables and copies ahead of them.
"""

from paged.attention.mosaic.prefill import TILE_SIZE, mosaic_prefill, prefill_attention, supports

__all__ = ["TILE_SIZE", "mosaic_prefill", "prefill_attention", "supports"]
