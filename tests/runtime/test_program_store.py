"""Compiled programs on disk: found again, told apart, and made anew where they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Compiled

from paged.cache import PagedKVCache
from paged.runtime.program_store import load_or_compile


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


class Maker:
    """Compiles `add` for a cache, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Compiled:
        self.calls += 1

        def add(cache: PagedKVCache, x: float) -> tuple[PagedKVCache, None]:
            return PagedKVCache(tuple(layer + x for layer in cache.layers)), None

        return jax.jit(add, donate_argnums=0).lower(zeros(), 1.0).compile()


def zeros() -> PagedKVCache:
    return PagedKVCache((jnp.zeros(3), jnp.zeros(2)))


def ones(program: Compiled) -> bool:
    cache, nothing = program(zeros(), 1.0)
    return nothing is None and all(bool((layer == 1).all()) for layer in cache.layers)


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
