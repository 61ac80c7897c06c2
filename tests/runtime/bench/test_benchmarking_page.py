"""What docs/benchmarking.md shows is there: commands, flags, datasets, files and fields."""

import re
import shlex
from argparse import Namespace
from dataclasses import fields
from typing import Any

import pytest

from paged.http.cli import parse
from paged.runtime.bench.options import FROM_FILES, GENERATED, LoadOptions, WorkloadOptions
from paged.runtime.bench.results import BenchResult, StepTime, Times
from tests.runtime.benchmark import ROOT

PAGE = ROOT / "docs/benchmarking.md"
TEXT = PAGE.read_text()


def commands() -> list[str]:
    """The page's commands, with the flags that are kept in a variable put in."""
    bash = "".join(re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", "")
    [small] = re.findall(r'SMALL="(.*)"', bash)
    lines = bash.replace("$SMALL", small).splitlines()
    return [line for line in lines if line.startswith("paged ")]


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str) -> None:
    assert isinstance(parse(shlex.split(command, comments=True)[1:]), Namespace)


def test_every_dataset_and_load_is_told() -> None:
    names = re.findall(r"^\| `(\w+)` \|", TEXT, re.MULTILINE)
    assert set(GENERATED + FROM_FILES) <= set(names)
    known = {f"--{each.name.replace('_', '-')}" for each in fields(LoadOptions)}
    known |= {f"--{each.name.replace('_', '-')}" for each in fields(WorkloadOptions)}
    rates = re.findall(r"^\| `(--[a-z-]+)", TEXT, re.MULTILINE)
    assert set(rates) <= known
    assert len(rates) > 4


@pytest.mark.parametrize("record", [BenchResult, Times, StepTime])
def test_fields_of_the_file_are_told(record: type[Any]) -> None:
    prose = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
    told = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", prose))))
    assert {each.name for each in fields(record)} <= told


def test_pictures_are_there() -> None:
    pictures = re.findall(r'(?:\]\(|src=")([\w.]+\.png)', TEXT)
    assert len(pictures) == 3
    assert [name for name in pictures if not (PAGE.parent / name).exists()] == []
