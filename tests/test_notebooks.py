"""The notebooks run from the first cell to the last, and are committed as readers see them best."""

import ast
import inspect
import os
import re
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from paged import EngineConfig, SamplingParams

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES, MAX_COLUMNS = 120_000, 120
MOST_SECONDS = 600  # of a cell: where the machine has much else to do, a start compiles that long
FLAGS = {field.name for field in fields(EngineConfig)}
KEYWORDS = {
    "LLM": FLAGS,
    "AsyncEngine": FLAGS,
    "SamplingParams": set(inspect.signature(SamplingParams).parameters),
}


@pytest.mark.slow
@pytest.mark.timeout(3 * MOST_SECONDS)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where readers start it, in its own folder, as if Paged were installed."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    resources = {"metadata": {"path": str(path.parent)}}
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=MOST_SECONDS, kernel_name="python3", resources=resources
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_small_and_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert not [output for output in outputs if output.get("name") == "stderr"], "progress bars"
    assert not [output for output in outputs if output.output_type == "error"]
    assert path.stat().st_size <= MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_was_run_in_order(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    kinds = [kind for cell in cells for output in cell.outputs for kind in output.get("data", ())]
    assert "image/png" in kinds, "it has a plot, and was saved with it"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_tells_nothing_of_the_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    texts = [cell.source for cell in notebook.cells] + [
        text for cell in code_cells(path) for output in cell.outputs for text in shown(output)
    ]
    folders = r"(?<!\w)/(home|root|tmp|work|Users|usr|mnt)/\S*"
    assert [found[0] for text in texts for found in re.finditer(folders, text)] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_reads_well_as_a_file(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    lines = [line for each in cells if each.cell_type == "markdown" for line in texts_of(each)]
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_that_a_notebook_uses_are_there(path: Path) -> None:
    for cell in code_cells(path):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        for node in ast.walk(compile(cell.source, path.name, "exec", flags)):
            assert list(missing(node)) == []


def texts_of(cell: Any) -> list[str]:
    """The lines of a cell."""
    lines: list[str] = cell.source.splitlines()
    return lines


def code_cells(path: Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(output: Any) -> Iterator[str]:
    """The texts of an output."""
    yield output.get("text", "")
    yield from (text for kind, text in output.get("data", {}).items() if "image" not in kind)


def missing(node: ast.AST) -> Iterator[str]:
    """What a piece of code names that is not there: of our modules, and of our keywords."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("paged"):
        module = import_module(str(node.module))
        yield from (each.name for each in node.names if not hasattr(module, each.name))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        known = KEYWORDS.get(node.func.id)
        given = [keyword.arg for keyword in node.keywords if keyword.arg]
        yield from (name for name in given if known and name not in known)
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "limits":
        assert isinstance(node.value, ast.Dict)
        keys = [ast.literal_eval(key) for key in node.value.keys if key]
        yield from (key for key in keys if key not in FLAGS)
