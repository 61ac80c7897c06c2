"""Pages in files: read as they were written, by later starts too; what is damaged is ignored."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.runtime import disk_pages
from paged.runtime.disk_pages import DiskPages, FoundPage
from paged.runtime.fingerprint import fingerprint
from tests.runtime.remote import spawned, wait_until

PAGE = (
    jax.ShapeDtypeStruct((2, 4, 3), jnp.bfloat16),
    jax.ShapeDtypeStruct((2, 4), jnp.uint32),
)
PAGE_BYTES = 2 * 4 * 3 * 2 + 2 * 4 * 4 + 32
ROOM = 100 * PAGE_BYTES


def write(pages: DiskPages, *numbers: int, seconds: float = 0) -> None:
    stack = tuple(jnp.stack(parts) for parts in zip(*map(content_of, numbers), strict=True))
    pages.write(list(map(name_of, numbers)), stack, seconds=seconds)


def content_of(number: int) -> tuple[jax.Array, ...]:
    values = number + jnp.arange(24.0).reshape(2, 4, 3)
    return values.astype(jnp.bfloat16), jnp.full((2, 4), number, jnp.uint32)


def name_of(number: int) -> bytes:
    return bytes([number]) * 34


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[DiskPages]:
    pages = DiskPages(tmp_path, ROOM, PAGE)
    yield pages
    pages.close()


def written(folder: Path, *numbers: int, room: int = ROOM) -> None:
    """Leave pages there, as a start before did."""
    pages = DiskPages(folder, room, PAGE)
    write(pages, *numbers, seconds=60)
    pages.close()


def check(found: list[FoundPage], *numbers: int) -> None:
    assert [content for content, _ in found] == list(map(name_of, numbers))
    for (_, arrays), number in zip(found, numbers, strict=True):
        for array, expected in zip(arrays, content_of(number), strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


def settle(pages: DiskPages) -> None:
    """Wait until the writer has done all that it was given."""
    pages._writer.submit(lambda: None).result()


def test_pages_are_read_as_they_were_written(pages: DiskPages) -> None:
    write(pages, 1, 2)
    settle(pages)
    assert len(pages) == 2
    check(pages.fetch([name_of(2), name_of(1)]).result(), 2, 1)
    assert pages.num_read == 2
    assert pages.seconds_per_page > 0


def test_a_later_start_finds_them(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    pages = DiskPages(tmp_path, ROOM, PAGE)
    assert [name_of(number) in pages for number in (1, 2, 3, 4)] == [True, True, True, False]
    check(pages.fetch([name_of(3)]).result(), 3)
    pages.close()


def test_the_least_recently_used_go_when_the_room_is_full(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3, room=2 * PAGE_BYTES)
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        name_of(number).hex() for number in (2, 3)
    ]


def test_what_is_cleared_is_gone_with_what_waits_to_be_written(
    pages: DiskPages, tmp_path: Path
) -> None:
    write(pages, 1, 2, 3)
    pages.clear()
    write(pages, 4)
    settle(pages)
    assert [number for number in range(1, 5) if name_of(number) in pages] == [4]
    assert [path.stem for path in tmp_path.iterdir()] == [name_of(4).hex()]


def test_what_is_forgotten_is_gone_but_may_be_written_again(
    pages: DiskPages, tmp_path: Path
) -> None:
    write(pages, 1, 2)
    settle(pages)
    gate = Event()
    pages._writer.submit(gate.wait)
    write(pages, 3, 4)
    pages.forget([name_of(number) for number in (1, 3, 5)])
    assert name_of(1) not in pages
    write(pages, 3)  # by another sequence, with other content
    gate.set()
    settle(pages)
    assert [number for number in range(1, 6) if name_of(number) in pages] == [2, 3, 4]
    assert sorted(path.stem for path in tmp_path.iterdir()) == [
        name_of(number).hex() for number in (2, 3, 4)
    ]
    assert not pages._unwanted


@pytest.mark.parametrize("place", ["digest", "stack"])
def test_what_cannot_be_written_does_not_wait_for_ever(
    pages: DiskPages,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(disk_pages, "_digest" if place == "digest" else "borrowed", fail)
        write(pages, 1, 2, 3)
        settle(pages)
    assert pages.num_waiting == 0
    assert "3 pages were not written" in caplog.text
    write(pages, 1)
    settle(pages)
    assert len(pages) == 1


def test_a_start_with_less_room_keeps_what_was_used_last(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    pages = DiskPages(tmp_path, PAGE_BYTES, PAGE)
    settle(pages)
    assert [path.stem for path in tmp_path.iterdir()] == [name_of(3).hex()]
    pages.close()


def test_a_clear_while_the_writer_makes_room(pages: DiskPages) -> None:
    write(pages, 1, 2, 3)
    settle(pages)
    pages.max_pages = 2

    class ClearedFirst:
        def __enter__(self) -> None:
            pages._known.clear()

        def __exit__(self, *_: object) -> None:
            pass

    pages._lock = ClearedFirst()  # type: ignore[assignment]
    pages._forget_oldest()
    assert len(pages) == 0


def test_what_is_no_page_of_this_model_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 1, 2, 3, 4)
    paths = [tmp_path / f"{name_of(number).hex()}.page" for number in range(5)]
    (tmp_path / "notes.txt").write_text("foreign")
    (tmp_path / "notes.page").write_text("foreign")
    paths[1].write_bytes(paths[1].read_bytes()[:-1])
    damaged = bytearray(paths[2].read_bytes())
    damaged[-1] ^= 1
    paths[2].write_bytes(damaged)
    paths[3].write_bytes(paths[4].read_bytes())  # another's, whole
    with caplog.at_level(logging.WARNING):
        pages = DiskPages(tmp_path, ROOM, PAGE)
        check(pages.fetch([name_of(number) for number in (2, 3, 4, 5)]).result(), 4)
        assert [name_of(number) in pages for number in (1, 2, 3, 4)] == [False, False, False, True]
        pages.close()
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"Ignored 3 files in {tmp_path} that are no pages"
    assert [text.split(" is ignored: ")[0] for text in told[1:3]] == [str(paths[2]), str(paths[3])]


def test_what_others_are_writing_or_left_is_no_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, 1)
    names = [f"{name_of(2).hex()}.{'0' * 16}", f"{'1' * 16}.measured", "notes.txt"]
    for at, name in enumerate([*names, f"{name_of(3).hex()}.{'2' * 16}"]):
        (tmp_path / name).write_bytes(b"half")
        hours = 2 if at < len(names) else 0
        os.utime(tmp_path / name, (time.time() - 3600 * hours,) * 2)
    (tmp_path / "gone.page").symlink_to(tmp_path / "nowhere")  # between two looks
    pages = DiskPages(tmp_path, ROOM, PAGE)
    pages.close()
    assert name_of(1) in pages
    assert [(tmp_path / name).exists() for name in names] == [False, False, True]
    assert (tmp_path / f"{name_of(3).hex()}.{'2' * 16}").exists()
    [record] = caplog.records
    assert record.getMessage() == f"Ignored 1 files in {tmp_path} that are no pages"


def test_two_may_share_a_folder(pages: DiskPages, tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    other = DiskPages(tmp_path, PAGE_BYTES, PAGE)
    write(other, 3, seconds=60)
    other.close()  # it has removed 1 and 2
    assert name_of(3) not in pages
    write(pages, 1)
    pages._writer.submit(lambda: None).result()
    check(pages.fetch([name_of(number) for number in (1, 2, 3)]).result(), 1, 3)


def test_a_disk_that_is_full_costs_only_the_page(
    pages: DiskPages, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        write(pages, 1, 2, 3)
        settle(pages)
    [record] = caplog.records
    assert "No space left on device" in record.getMessage()
    assert name_of(1) not in pages
    write(pages, 1)
    settle(pages)
    check(pages.fetch([name_of(1)]).result(), 1)


def test_closing_leaves_out_what_takes_too_long(
    pages: DiskPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = stick_at_the_third(monkeypatch, lambda: pages)
    write(pages, *range(20))
    wait_until(lambda: len(begun) == 3)
    pages.close(0.1)
    assert len(pages) == 3
    assert pages.num_left_out == 17
    assert pages.num_waiting == 0


def stick_at_the_third(
    monkeypatch: pytest.MonkeyPatch, pages: Callable[[], DiskPages]
) -> list[Path]:
    """Have the third write last until the pages are closed.

    Returns:
        The files whose writing has begun, so far.
    """
    write_bytes, begun = Path.write_bytes, list[Path]()

    def stuck(path: Path, content: bytes) -> int:
        begun.append(path)
        if len(begun) == 3:
            wait_until(lambda: pages()._is_closed)
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", stuck)
    return begun


_WRITER = """
import sys
from pathlib import Path
from paged.runtime.disk_pages import DiskPages
from tests.runtime.test_disk_pages import PAGE, ROOM, write

pages = DiskPages(Path(sys.argv[1]), 10 * ROOM, PAGE)
print("ready", flush=True)
for number in range(250):
    write(pages, number, seconds=60)
"""


def test_a_writer_that_is_killed_leaves_whole_pages(tmp_path: Path) -> None:
    found: list[int] = []
    for most in (5, 25):
        argv = [sys.executable, "-c", _WRITER, str(tmp_path)]
        with spawned(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            wait_until(partial(_are_more, tmp_path, most), seconds=60)
            process.kill()
        pages = DiskPages(tmp_path, 10 * ROOM, PAGE)
        found = [number for number in range(250) if name_of(number) in pages]
        check(pages.fetch(list(map(name_of, found))).result(), *found)
        assert len(pages) == len(found) > most, "none of them is damaged"
        pages.close()


def _are_more(folder: Path, count: int) -> bool:
    return len(list(folder.glob("*.page"))) > count


def test_a_fingerprint_is_that_of_every_weight() -> None:
    weights = {"a": jnp.arange(6.0, dtype=jnp.bfloat16), "b": jnp.arange(5, dtype=jnp.int8)}
    name = fingerprint(weights, "llama")
    assert name == fingerprint(jax.tree.map(jnp.array, weights), "llama")
    swapped = weights | {"a": weights["a"][jnp.asarray([1, 0, 2, 3, 4, 5])]}
    others = [
        fingerprint(weights, "gemma"),
        fingerprint(weights | {"b": weights["b"].at[4].set(-4)}, "llama"),
        fingerprint(weights | {"a": weights["a"].astype(jnp.float32)}, "llama"),
        fingerprint(swapped, "llama"),
    ]
    assert len({name, *others}) == 5
