"""Compiled programs on disk: found again, told apart, and made anew where they are damaged."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.stages import Compiled

from paged.runtime.compiler import Compiler
from paged.runtime.compiles import use_compile_cache
from paged.runtime.lowering import Job
from paged.runtime.program_store import kept_once, load_or_compile, named_apart
from paged.runtime.steps import SlotState


class Maker:
    """Compiles `add` for slots, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Compiled:
        self.calls += 1

        def add(slots: SlotState) -> tuple[SlotState, None]:
            return jax.tree.map(lambda x: x + 1, slots), None

        named = named_apart(add, "add")
        return jax.jit(named, donate_argnums=0).lower(zeros()).compile()


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


def test_a_start_says_what_it_compiled(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paged.runtime.compiler")
    jobs = [(("add", number), Job(jnp.add, (jnp.zeros(number), 1.0))) for number in (1, 2)]
    for some in (jobs[:1], jobs, jobs):
        with Compiler() as compiler:
            compiler.programs("nothing else", some)
    assert [message.rpartition(",")[0] for message in caplog.messages] == [
        "1 programs compiled, 0 from the cache",
        "1 programs compiled, 1 from the cache",
        "0 programs compiled, 2 from the cache",
    ]


def test_programs_are_told_apart(folder: Path) -> None:
    make = Maker()
    load_or_compile("add", make)
    load_or_compile("another", make)
    assert make.calls == 2


def test_what_jax_is_told_in_between_tells_programs_apart(folder: Path) -> None:
    make = Maker()
    load_or_compile("add", make)
    with_default = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        load_or_compile("add", make)
    finally:
        jax.config.update("jax_default_matmul_precision", with_default)
    assert make.calls == 2


def scatter(pages: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """What XLA makes a function of on a CPU, which not every program has."""
    return pages.at[target].set(pages[source], mode="drop", unique_indices=True)


def test_a_program_is_whole_also_where_jax_knows_it(folder: Path) -> None:
    """Another flag, or a file that was lost: the same function is made again in another process."""
    args = (jnp.zeros((10, 4)), jnp.arange(3), jnp.arange(3, 6))

    def make() -> Compiled:
        return jax.jit(named_apart(scatter, "scatter")).lower(*args).compile()

    for what in ("one flag", "another"):
        load_or_compile(what, make)
        jax.clear_caches()
    load_or_compile("another", lambda: pytest.fail("it was kept"))(*args)


def half(kept: bytes) -> bytes:
    return kept[: len(kept) // 2]


def with_a_hole(kept: bytes) -> bytes:
    middle = len(kept) // 2
    return kept[:middle] + bytes(64) + kept[middle + 64 :]


@pytest.mark.parametrize("damage", [half, with_a_hole, lambda kept: b""])
def test_a_damaged_file_is_replaced(
    folder: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    make = Maker()
    load_or_compile("add", make)
    [kept] = folder.glob("*.program")
    kept.write_bytes(damage(kept.read_bytes()))
    assert ones(load_or_compile("add", make))
    assert "made anew" in caplog.text
    assert ones(load_or_compile("add", make))
    assert make.calls == 2
    assert [path.name for path in folder.iterdir() if path.stem == kept.stem] == [kept.name]


def test_the_file_of_another_program_is_replaced(folder: Path) -> None:
    make = Maker()
    load_or_compile("add", make)
    [kept] = folder.glob("*.program")
    load_or_compile("another", make)
    [other] = set(folder.glob("*.program")) - {kept}
    kept.replace(other)
    load_or_compile("another", make)
    assert make.calls == 3


def test_a_disk_that_is_full_holds_nothing_unfinished(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_some(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_some)
    before = set(folder.iterdir())
    assert ones(load_or_compile("add", Maker()))
    assert "not kept for the next start" in caplog.text
    assert {path for path in set(folder.iterdir()) - before if "jit" not in path.name} == set()


def test_a_folder_that_may_not_be_read_costs_only_time(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert load_or_compile("add", Maker()) is not None
    assert "Permission denied" in caplog.text


def test_without_a_folder_nothing_is_kept_also_where_an_engine_before_had_one(folder: Path) -> None:
    make = Maker()
    use_compile_cache("")
    assert ones(load_or_compile("add", make))
    assert ones(load_or_compile("add", make))
    assert make.calls == 2
    assert list(folder.iterdir()) == []


def test_each_folder_is_used_by_jax_too(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    jax.jit(lambda x: x + 1)(jnp.zeros(3))
    other = tmp_path_factory.mktemp("other")
    use_compile_cache(str(other))
    jax.jit(lambda x: x + 2)(jnp.zeros(3))
    assert any(folder.glob("jit_*"))
    assert any(other.glob("jit_*"))


def test_what_is_of_no_use_is_forgotten(folder: Path) -> None:
    make = Maker()
    load_or_compile("old", make)
    [old] = folder.glob("*.program")
    months_ago = old.stat().st_mtime - 70 * 24 * 3600
    os.utime(old, (months_ago, months_ago))
    load_or_compile("old", make)  # used again: it is young now
    load_or_compile("new", make)
    assert old.exists()
    assert make.calls == 2
    os.utime(old, (months_ago, months_ago))
    load_or_compile("newest", make)
    assert not old.exists()
    assert len(list(folder.glob("*.program"))) == 2


def test_a_program_is_written_once(folder: Path) -> None:
    with kept_once():
        load_or_compile("it", Maker())
    assert len(list(folder.glob("*.program"))) == 1
    assert not list(folder.glob("jit_*"))
    jax.jit(lambda x: x + 3)(jnp.zeros(3))
    assert any(folder.glob("jit_*")), "JAX's own cache keeps what others compile, as before"
