"""Compiled programs on disk: found again, told apart, and made anew where they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.stages import Compiled

from paged.runtime.program_store import load_or_compile
from paged.runtime.steps import SlotState


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


class Maker:
    """Compiles `add` for slots, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Compiled:
        self.calls += 1

        def add(slots: SlotState) -> tuple[SlotState, None]:
            return SlotState(slots.page_tables + 1, slots.last_token + 1), None

        return jax.jit(add, donate_argnums=0).lower(zeros()).compile()


def zeros() -> SlotState:
    return SlotState.zeros(3, 2)


def ones(program: Compiled) -> bool:
    slots, nothing = program(zeros())
    return nothing is None and all(bool((leaf == 1).all()) for leaf in jax.tree.leaves(slots))


def test_the_same_program_is_made_once(folder: Path) -> None:
    make = Maker()
    assert ones(load_or_compile("add", make))
    again = load_or_compile("add", make)
    assert make.calls == 1
    assert ones(again)
    assert again.memory_analysis() is not None


def test_programs_are_told_apart(folder: Path) -> None:
    make = Maker()
    load_or_compile("add", make)
    load_or_compile("another", make)
    assert make.calls == 2


def test_a_damaged_file_is_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    make = Maker()
    load_or_compile("add", make)
    [kept] = folder.glob("*.program")
    kept.write_bytes(kept.read_bytes()[:100])
    assert ones(load_or_compile("add", make))
    assert "compiled again" in caplog.text
    assert ones(load_or_compile("add", make))
    assert make.calls == 2
    assert [path.name for path in folder.iterdir() if "program" in path.name] == [kept.name]


def test_without_a_folder_nothing_is_kept() -> None:
    make = Maker()
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        assert ones(load_or_compile("add", make))
        assert ones(load_or_compile("add", make))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert make.calls == 2
