"""Weights of fewer bits behind the `Linear` seam: how they are stored, made, and read.

`quantized` is the one place where a description of plain projections becomes one of quantised
projections; initialising, loading, sharding and the memory estimate follow from it as ever.
"""

from paged.models.quantized.channels import ChannelScaled, TileScaled
from paged.models.quantized.coded import E2M1, GroupCoded
from paged.models.quantized.describe import expanded_weights, quantized, weight_bytes
from paged.models.quantized.expanding import QUANTIZED, plain_kernel
from paged.models.quantized.ggml import KEPT_TYPES, GgmlTensors
from paged.models.quantized.groups import GroupScaled
from paged.models.quantized.joined import Joined
from paged.models.quantized.making import made_on_load
from paged.models.quantized.own import own_settings
from paged.models.quantized.published import published_quantization
from paged.models.quantized.rules import NamesRule, Quantization, unmatched
from paged.models.quantized.shifted import GroupShifted, ShiftedEmbedding

__all__ = [
    "E2M1",
    "KEPT_TYPES",
    "QUANTIZED",
    "ChannelScaled",
    "GgmlTensors",
    "GroupCoded",
    "GroupScaled",
    "GroupShifted",
    "Joined",
    "NamesRule",
    "Quantization",
    "ShiftedEmbedding",
    "TileScaled",
    "expanded_weights",
    "made_on_load",
    "own_settings",
    "plain_kernel",
    "published_quantization",
    "quantized",
    "unmatched",
    "weight_bytes",
]
