"""What the documents promise is there: files, commands, flags and targets."""

import re
import shlex
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

import paged
from paged.http.cli import parse

ROOT = Path(__file__).parent.parent
DOCUMENTS = (
    *("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/RESULTS.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
)
README = (ROOT / "README.md").read_text()


def blocks(name: str, language: str) -> list[str]:
    """A document's code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


def commands(*names: str) -> list[list[str]]:
    """The documents' commands, as a shell would split them, up to where the output goes."""
    shown = [block for name in names for block in blocks(name, "bash")]
    lines = [line for block in shown for line in block.replace("\\\n", "").splitlines()]
    found = [shlex.split(line, comments=True) for line in lines]
    return [[*takewhile(lambda word: word[0] not in "|>", words)] for words in found if words]


def anchors(text: str) -> set[str]:
    """The anchors that a code host, and our site, make of headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name: str) -> None:
    document = ROOT / name
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    ours = [target for target in targets if not target.startswith("http")]
    assert [target for target in ours if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("name", ["docs/faults.md", "docs/threat_model.md"])
def test_what_is_said_to_be_shown_is_tested(name: str) -> None:
    for file, test in re.findall(r"`([\w/.]+\.py)::(\w+)`", (ROOT / name).read_text()):
        found = [ROOT / "tests" / folder / file for folder in ("http", "")]
        text = "".join(path.read_text() for path in found if path.exists())
        assert f"def {test}(" in text, f"{file} has no {test}"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_into_documents_lead_to_a_heading(name: str) -> None:
    document = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text()):
        text = (document.parent / target if target else document).read_text()
        assert anchor in anchors(text), f"{target}#{anchor}"


def test_messages_point_to_a_failure_and_every_failure_is_pointed_to() -> None:
    pages = [
        path.read_text() for folder in ("models", "runtime", "http") for path in python(folder)
    ]
    named = {found for page in pages for found in re.findall(r"docs/failures\.md#([\w-]+)", page)}
    headings = re.findall(r"^## (.*)$", (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
    assert named == {heading.lower().replace(" ", "-") for heading in headings}


def python(folder: str) -> Iterator[Path]:
    """The sources in one of the four folders."""
    return (ROOT / folder).rglob("*.py")


@pytest.mark.parametrize(
    "words", [words for words in commands(*DOCUMENTS) if words[0] == "paged"], ids=" ".join
)
def test_commands_are_understood(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [models] = blocks("docs/several_models.md", "yaml")
    (tmp_path / "models.yaml").write_text(models)
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse(words[1:]), Namespace)


def test_flags_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = README + (ROOT / "docs/gpu.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `--")]
    with pytest.raises(SystemExit):
        parse(["serve", "--help"])
    known = capsys.readouterr().out
    flags = [flag for row in rows for flag in re.findall(r"--[a-z-]+", row)]
    assert len(flags) > 5
    assert [flag for flag in flags if f"  {flag} " not in known] == []


def test_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {words[1] for words in commands("README.md") if words[0] == "make"}
    assert targets == {"serve", "test"}
    assert [target for target in targets if f"\n{target}: " not in makefile] == []


def test_an_extra_that_is_not_there_is_refused() -> None:
    done = subprocess.run(
        ["make", "--dry-run", "serve", "EXTRAS=cuda13,cuda14"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "EXTRAS must be cuda12 or cuda13, got cuda14" in done.stderr


def test_python_compiles_and_its_names_are_there() -> None:
    shown = [(name, block) for name in DOCUMENTS for block in blocks(name, "python")]
    for document, block in shown:
        compile(block, document, "exec")
        for names in re.findall(r"from paged import (.*)", block):
            assert [name for name in names.split(", ") if not hasattr(paged, name)] == []


def test_every_benchmark_is_explained() -> None:
    text = (ROOT / "benchmarks/README.md").read_text()
    programs = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))
    assert [name for name in programs if f"`{name}" not in text] == []
