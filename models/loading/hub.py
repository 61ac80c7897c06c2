"""Fetching a model from the Hugging Face hub, or finding it in its cache."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

from paged.models.loading.checkpoint import ModelNotFoundError

# The formats we read, and what describes them; not the same weights in a second format.
_WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "params/*"]
_UNWANTED = ["consolidated*", "original/*", "onnx/*"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json", "params/*"]


def download(
    name: str, *, revision: str | None = None, download_dir: str | None = None, weights: bool = True
) -> Path:
    """The local folder of a hub model; HF_HUB_OFFLINE=1 keeps to what the cache has.

    Args:
        name: "owner/model".
        weights: False leaves the weight files out.

    Raises:
        ModelNotFoundError: it cannot be had, with the reason in one line.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    unwanted = _UNWANTED if weights else [*_UNWANTED, *_WEIGHTS]
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=_WANTED,
            ignore_patterns=unwanted,
        )
    except LocalEntryNotFoundError as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub does not answer"
        raise ModelNotFoundError(
            f"model {name!r} is not in the local Hugging Face cache and {reason}; "
            "give a folder or a GGUF file, or fetch it while online"
        ) from error
    except GatedRepoError as error:
        raise ModelNotFoundError(
            f"model {name!r} is behind a licence: accept it on its page on the hub, "
            "then log in here with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no model {name!r}, or a private one: check the name, "
            "or log in with `hf auth login`"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(f"cannot fetch model {name!r}: {first_line}") from error
    return Path(folder)


def describing_files(folder: Path) -> Iterator[Path]:
    """The files of a model's folder, other than its weights, that a download of it would bring."""
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        wanted = any(fnmatch(name, pattern) for pattern in _WANTED)
        unwanted = any(fnmatch(name, pattern) for pattern in (*_UNWANTED, *_WEIGHTS))
        if wanted and not unwanted and path.is_file():
            yield path
