"""What a folder says of how its model's vectors are made, in the files of sentence-transformers.

`modules.json` lists what comes after what; each module has a folder with its own settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged.errors import ConfigError
from paged.models.config_values import count, flag, shown
from paged.models.json_files import NotAnObject, parse_value, read_config
from paged.models.pooling import ACTIVATIONS, DenseModule, Kind, Pooling

LISTING = "modules.json"
_ORDER = re.compile(r"Transformer Pooling( Dense)*( Normalize)*")
# Settings of the first module, by the names that its releases gave the file.
_TEXT_SETTINGS = "sentence_*_config.json"
_KINDS: dict[str, Kind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_NAMED_KINDS: dict[str, Kind] = {"cls": "cls", "lasttoken": "last", "max": "max", "mean": "mean"}


@dataclass(frozen=True)
class EmbeddingSettings:
    """What a folder says beside its config.json's shapes.

    Attributes:
        pooling: None where it says nothing.
        max_length: most tokens of a text; None leaves it to the model.
        lowercase: texts are put in lower case first.
        dimensions: to which vectors may be cut; () for none, None for any.
        activation: what a classifier's scores end in; None where it says nothing.
    """

    pooling: Pooling | None = None
    max_length: int | None = None
    lowercase: bool = False
    dimensions: tuple[int, ...] | None = ()
    activation: str | None = None


def read_settings(folder: Path) -> EmbeddingSettings:
    """The settings of a model's folder.

    Raises:
        ConfigError: a file is damaged, or asks for what is not supported.
    """
    model = _read_first(folder, "config.json")
    text = _read_first(folder, _TEXT_SETTINGS)
    longest = text.get("max_seq_length")
    return EmbeddingSettings(
        pooling=_pooling(folder),
        max_length=None if longest is None else count(text, "max_seq_length"),
        lowercase=flag(text, "do_lower_case"),
        dimensions=_dimensions(model),
        activation=_score_activation(model),
    )


def _pooling(folder: Path) -> Pooling | None:
    if not (folder / LISTING).exists():
        return None
    modules = _modules(folder / LISTING)
    names = [name for name, _ in modules]
    if not _ORDER.fullmatch(" ".join(names)):
        raise ConfigError(
            f"{folder / LISTING} has the modules {shown(names)}; supported are Transformer, "
            "Pooling, any number of Dense, and Normalize, in this order"
        )

    def settings(of: str) -> list[tuple[str, dict[str, Any]]]:
        paths = [path for name, path in modules if name == of]
        return [(path, read_config(folder / path / "config.json")) for path in paths]

    [(_, pooling)] = settings("Pooling")
    dense = tuple(_dense(path, each) for path, each in settings("Dense"))
    return Pooling(_kind(pooling), dense, "Normalize" in names)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module."""
    try:
        entries = parse_value(path.read_bytes())
        if not isinstance(entries, list):
            raise TypeError(f"it holds {shown(entries)}")
        return [(str(each["type"]).rpartition(".")[2], str(each["path"])) for each in entries]
    except (OSError, NotAnObject, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no list of modules: {error}") from error


def _kind(settings: Mapping[str, Any]) -> Kind:
    if isinstance(settings.get("pooling_mode"), str):
        asked = [settings["pooling_mode"]]
        known = _NAMED_KINDS
    else:
        asked = [name for name in settings if name.startswith("pooling_mode_") and settings[name]]
        known = _KINDS
    if len(asked) != 1 or asked[0] not in known:
        raise ConfigError(
            f"pooling by {' and '.join(asked) or 'nothing'} is not supported; supported is one of "
            f"{', '.join(known)}"
        )
    return known[asked[0]]


def _dense(path: str, settings: Mapping[str, Any]) -> DenseModule:
    activation = _activation(settings.get("activation_function", "torch.nn.Tanh"))
    return DenseModule(
        folder=path,
        inputs=count(settings, "in_features"),
        outputs=count(settings, "out_features"),
        bias=flag({"bias": True, **settings}, "bias"),
        activation=activation,
    )


def _activation(name: Any) -> str:
    """A function by the name of its class in torch."""
    known = str(name).rpartition(".")[2]
    if known not in ACTIVATIONS:
        raise ConfigError(
            f"activation {shown(name)} is not supported; supported: {', '.join(ACTIVATIONS)}"
        )
    return known


def _score_activation(model: Mapping[str, Any]) -> str | None:
    """As releases of sentence-transformers write it, older ones last."""
    newer = model.get("sentence_transformers")
    name = newer.get("activation_fn") if isinstance(newer, dict) else None
    name = name or model.get("sbert_ce_default_activation_function")
    return None if name is None else _activation(name)


def _dimensions(model: Mapping[str, Any]) -> tuple[int, ...] | None:
    key = "matryoshka_dimensions"
    if sizes := model.get(key):
        if not isinstance(sizes, list):
            raise ConfigError(f"{key!r} must be a list of numbers, found {shown(sizes)}")
        return tuple(count({key: size}, key) for size in sizes)
    return None if flag(model, "is_matryoshka") else ()


def _read_first(folder: Path, pattern: str) -> dict[str, Any]:
    """The first file of a pattern, {} where there is none: every entry of it has a default."""
    paths = sorted(folder.glob(pattern))
    return read_config(paths[0]) if paths else {}
