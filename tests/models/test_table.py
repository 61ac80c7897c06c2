"""docs/models.md says which models run: it is held to the registry, GGUF files and goldens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paged.models.loading import gguf_checkpoint
from paged.models.registry import ENCODERS, FAMILIES
from tests.models.harness import GOLDENS, load_golden
from tests.models.test_gguf import K_QUANTS, MODELS, WRITABLE

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")

KNOWN = {**FAMILIES, **ENCODERS}
# Its GGUF files call themselves Llama's.
MIXTRAL = ("llama", ["MixtralForCausalLM"])


def table() -> list[list[list[str]]]:
    """For each row and column of the page's first table, what it names as code."""
    first = re.search(r"(^\|.*\n)+", PAGE, re.MULTILINE)
    assert first
    rows = [line.split("|")[1:-1] for line in first[0].splitlines() if line.startswith("| `")]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]


def test_every_class_has_a_row() -> None:
    named = [architecture for row in table() for architecture in row[0]]
    assert sorted(named) == sorted(KNOWN)


@pytest.mark.parametrize("row", table(), ids=lambda row: str(row[0][0]))
def test_a_row_says_what_is_there(row: list[list[str]]) -> None:
    classes, _, _, gguf, goldens = row
    assert len({id(KNOWN[name]) for name in classes}) == 1, "these are several families"
    names = [str(path.relative_to(GOLDENS).with_suffix("")) for path in GOLDENS.rglob("*.json")]
    found = [each for each in names if load_golden(each)["config"]["architectures"][0] in classes]
    assert sorted(goldens) == sorted(found)
    known = {
        name: architecture.model for name, architecture in gguf_checkpoint._ARCHITECTURES.items()
    }
    assert gguf == [name for name in known if known[name] in classes or (name, classes) == MIXTRAL]


def test_every_architecture_of_gguf_files_is_read_from_one() -> None:
    tested = {load_golden(name)["config"]["architectures"][0] for name in MODELS}
    assert tested == {row[0][0] for row in table() if row[3]}


def test_the_types_of_gguf_tensors_are_those_that_are_tested() -> None:
    listed = re.findall(r"\b(?:B?F\d+|Q\d_[01K])\b", PAGE)
    assert set(listed) == {"F32", *WRITABLE, *K_QUANTS}
