"""What `quantization_config` of a config.json says, as schemes of this package.

GPTQ, AWQ, FP8 and compressed-tensors each have their own names, layouts and ways to except modules.
What a scheme cannot say is refused here, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged.errors import ConfigError
from paged.models.config_values import flag, shown
from paged.models.quantized.bitsandbytes import Nf4Groups, ScbChannels
from paged.models.quantized.channels import FLOAT8, INT8
from paged.models.quantized.own import METHOD, own_quantization
from paged.models.quantized.rules import Quantization, Rule, Scheme, from_part
from paged.models.quantized.stored import (
    AwqGroups,
    GptqGroups,
    Int8Groups,
    PackedGroups,
    StoredChannels,
    StoredTiles,
)

_HEAD = ".*(lm_head|output_layer)"
# Of DeepSeek, whose settings do not say that it is in full precision.
_ROUTER = r".*\.mlp\.gate"


def published_quantization(data: Mapping[str, Any]) -> Quantization | None:
    """How a checkpoint is quantised, from its config.json; None for not at all.

    Raises:
        ConfigError: in a way that is not supported.
    """
    settings = data.get("quantization_config")
    if not settings:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if not isinstance(method, str) or method not in _READERS or not isinstance(settings, dict):
        raise ConfigError(
            f"quantized checkpoints of quant_method {shown(method)} are not supported; supported: "
            f"{', '.join(_READERS)}, and GGUF files"
        )
    return _READERS[method](settings)


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    bits = _one_of(settings, "bits", (4, 8))
    _one_of(settings, "checkpoint_format", ("gptq", "gptq_v2", None))
    if settings.get("dynamic"):
        raise ConfigError("GPTQ settings of single modules ('dynamic') are not supported")
    group = _group(settings, "group_size")
    scheme = GptqGroups(
        bits=bits,
        group=group,
        symmetric=flag({"sym": True, **settings}, "sym"),
        ordered=flag(settings, "desc_act") and group is not None,
        one_less=settings.get("checkpoint_format") != "gptq_v2",
    )
    excluded = () if flag(settings, "lm_head") else (_HEAD,)
    excepted = _names(settings, "modules_to_not_convert")
    return Quantization("gptq", (Rule(scheme, (".*",)),), (*excluded, *excepted))


def _awq(settings: Mapping[str, Any]) -> Quantization:
    bits, group = settings.get("w_bit"), settings.get("q_group_size")
    settings = {"bits": bits, "group_size": group, **settings}
    _one_of(settings, "bits", (4,))
    version = str(settings.get("version") or "gemm").lower()
    if version != "gemm" or not flag({"zero_point": True, **settings}, "zero_point"):
        raise ConfigError(
            f"AWQ checkpoints of version {version!r} with zero_point "
            f"{shown(settings.get('zero_point'))} are not supported; supported: gemm with true"
        )
    scheme = AwqGroups(4, _group(settings, "group_size"), symmetric=False)
    excepted = _names(settings, "modules_to_not_convert")
    return Quantization("awq", (Rule(scheme, (".*",)),), (_HEAD, *excepted))


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    _one_of(settings, "activation_scheme", ("dynamic", "static", None))
    _one_of(settings, "fmt", ("e4m3", None))
    tiles = settings.get("weight_block_size")
    if tiles not in (None, [128, 128]):
        raise ConfigError(
            f"weight_block_size {shown(tiles)} is not supported; supported: [128, 128]"
        )
    scheme = StoredTiles("weight_scale_inv") if tiles else StoredChannels(FLOAT8, per_tensor=True)
    excepted = [
        name
        for key in ("ignored_layers", "modules_to_not_convert")
        for name in _names(settings, key)
    ]
    return Quantization("fp8", (Rule(scheme, (".*",)),), (_HEAD, _ROUTER, *excepted))


def _bitsandbytes(settings: Mapping[str, Any]) -> Quantization:
    four = flag(settings, "load_in_4bit") or flag(settings, "_load_in_4bit")
    scheme: Scheme = ScbChannels(8, None)
    if four:
        _one_of(settings, "bnb_4bit_quant_type", ("nf4",))
        scheme = Nf4Groups()
    excepted = _names(settings, "llm_int8_skip_modules")
    return Quantization("bitsandbytes", (Rule(scheme, (".*",)),), (_HEAD, *excepted))


def _compressed(settings: Mapping[str, Any]) -> Quantization:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ConfigError(f"compressed-tensors need 'config_groups', found {shown(groups)}")
    if settings.get("sparsity_config"):
        raise ConfigError("sparse checkpoints of compressed-tensors are not supported")
    rules = [_rule(group, settings.get("format")) for group in groups.values()]
    rules.sort(key=lambda rule: ".*" in rule.names)  # names go before the class of all
    excluded = [_expression(name) for name in _strings(settings, "ignore")]
    return Quantization("compressed-tensors", tuple(rules), tuple(excluded))


def _rule(group: Any, outer_format: Any) -> Rule:
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise ConfigError(f"a group of compressed-tensors needs 'weights', found {shown(group)}")
    names = tuple(_expression(name) for name in _strings(group, "targets"))
    return Rule(_compressed_scheme(group, group.get("format") or outer_format), names)


def _compressed_scheme(group: Mapping[str, Any], kind: Any) -> Scheme:
    weights, quantizes = group["weights"], group.get("input_activations") is not None
    reader = _COMPRESSED.get(kind)
    scheme = reader(weights, quantizes) if reader else None
    if scheme is None:
        said = ", ".join(
            f"{key} {shown(weights.get(key))}"
            for key in ("num_bits", "type", "strategy", "symmetric")
        )
        raise ConfigError(
            f"compressed-tensors of format {shown(kind)} with {said} and "
            f"{'' if quantizes else 'no '}input_activations are not supported; supported: "
            "pack-quantized of 4 or 8 bits (group, channel) without input_activations; "
            "float-quantized of 8 bits (tensor, channel, block of 128 by 128) with them; "
            "int-quantized of 8 bits (tensor, channel), symmetric, with or without"
        )
    return scheme


def _packed(weights: Mapping[str, Any], quantizes: bool) -> Scheme | None:
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    if quantizes or bits not in (4, 8) or strategy not in ("group", "channel"):
        return None
    return PackedGroups(
        bits=bits,
        group=_group(weights, "group_size") if strategy == "group" else None,
        symmetric=flag({"symmetric": True, **weights}, "symmetric"),
        ordered=weights.get("actorder") in ("group", "dynamic", True) and strategy == "group",
    )


def _floats(weights: Mapping[str, Any], quantizes: bool) -> Scheme | None:
    strategy = weights.get("strategy")
    if not quantizes or weights.get("num_bits") != 8:
        return None
    if strategy == "block" and weights.get("block_structure") in ([128, 128], "128x128"):
        return StoredTiles("weight_scale")
    if strategy in ("tensor", "channel"):
        return StoredChannels(FLOAT8, per_tensor=strategy == "tensor")
    return None


def _integers(weights: Mapping[str, Any], quantizes: bool) -> Scheme | None:
    strategy = weights.get("strategy")
    symmetric = flag({"symmetric": True, **weights}, "symmetric")
    if weights.get("num_bits") != 8 or not symmetric or strategy not in ("tensor", "channel"):
        return None
    per_tensor = strategy == "tensor"
    if quantizes:
        return StoredChannels(INT8, per_tensor=per_tensor)
    return Int8Groups(8, None, per_tensor=per_tensor)


_COMPRESSED: dict[Any, Callable[[Mapping[str, Any], bool], Scheme | None]] = {
    "pack-quantized": _packed,
    "float-quantized": _floats,
    "int-quantized": _integers,
}
_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
    METHOD: own_quantization,
}


def _one_of(settings: Mapping[str, Any], key: str, allowed: Sequence[Any]) -> Any:
    value = settings.get(key)
    if value not in allowed or isinstance(value, bool):
        named = ", ".join(shown(each) for each in allowed if each is not None)
        raise ConfigError(
            f"{key} {shown(value)} of {shown(settings.get('quant_method'))} is not supported; "
            f"supported: {named}"
        )
    return value


def _group(settings: Mapping[str, Any], key: str) -> int | None:
    """Inputs that share a scale; None, where the file has -1, for all of them."""
    value = settings.get(key)
    if type(value) is not int or (value != -1 and (value < 32 or value & (value - 1))):
        raise ConfigError(
            f"{key} {shown(value)} is not supported; supported: -1 and powers of 2 from 32 on"
        )
    return None if value == -1 else value


def _names(settings: Mapping[str, Any], key: str) -> list[str]:
    return [from_part(name) for name in _strings(settings, key)]


def _strings(settings: Mapping[str, Any], key: str) -> list[str]:
    value = settings.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{key!r} must be a list of names, found {shown(value)}")
    return value


def _expression(name: str) -> str:
    """The expression for what compressed-tensors call a target: a class, a name or "re:"."""
    if name == "Linear":
        return ".*"
    if not name.startswith("re:"):
        return from_part(name)
    try:
        re.compile(name[3:])
    except re.error as error:
        raise ConfigError(f"{name!r} is no regular expression: {error}") from error
    return f"(?:{name[3:]}).*"
