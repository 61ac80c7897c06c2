"""What a config.json that Paged wrote says of weights that were quantised by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paged.errors import ConfigError
from paged.models.config_values import shown
from paged.models.quantized.ggml import KEPT_TYPES, GgmlTensors
from paged.models.quantized.making import METHODS, made_on_load
from paged.models.quantized.rules import NamesRule, Quantization

METHOD = "paged"


def own_settings(quantization: Quantization, exclude: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of weights quantised by a flag, but for excluded patterns."""
    types = {
        rule.scheme.kind: sorted(rule.names)
        for rule in quantization.rules
        if isinstance(rule, NamesRule) and isinstance(rule.scheme, GgmlTensors)
    }
    said: dict[str, Any] = {"weights": quantization.name, "exclude": list(exclude)}
    return {"quant_method": METHOD, **said, **({"types": types} if types else {})}


def own_quantization(settings: Mapping[str, Any]) -> Quantization:
    """The reverse of `own_settings`.

    Raises:
        ConfigError: it did not write these.
    """
    weights, exclude = settings.get("weights"), settings.get("exclude")
    if not isinstance(exclude, list) or not all(isinstance(each, str) for each in exclude):
        raise ConfigError(f"'exclude' must be a list of patterns, found {shown(exclude)}")
    if weights in METHODS:
        return made_on_load(weights, exclude)
    types = settings.get("types")
    if weights != "gguf" or not isinstance(types, dict) or not set(types) <= set(KEPT_TYPES):
        raise ConfigError(
            f"weights {shown(weights)} of quant_method {METHOD!r} are not supported; supported: "
            f"{', '.join(METHODS)}, and gguf with 'types' of {', '.join(KEPT_TYPES)}"
        )
    rules = [NamesRule(GgmlTensors(kind), frozenset(of)) for kind, of in types.items()]
    return Quantization("gguf", tuple(rules)).without(exclude)
