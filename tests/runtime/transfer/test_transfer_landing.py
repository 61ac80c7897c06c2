"""The memory that pages arrive in: both ways lead to the same place, and to no other."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

from paged.runtime.transfer.landing import Landing, LineWay, SharedWay, memory_of
from paged.runtime.transfer.messages import Piece, Shared
from tests.runtime.hosts.lines import line_pair

PAGE = [
    jax.ShapeDtypeStruct((3, 4, 2, 5), jnp.bfloat16),  # layers, tokens, heads, elements
    jax.ShapeDtypeStruct((3, 4, 1), jnp.uint32),
]


def contents(part: int, count: int) -> Any:
    """One layer of so many pages, no two numbers alike."""
    shape = count, *PAGE[part].shape[1:]
    return np.arange(np.prod(shape)).reshape(shape).astype(PAGE[part].dtype)


def shared_of(landing: Landing) -> Shared:
    assert landing.shared is not None
    return landing.shared


def test_what_is_put_by_memory_is_there() -> None:
    landing = Landing(PAGE, 6)
    way = SharedWay(shared_of(landing), PAGE, 6)
    way.put(0, 2, 1, contents(0, 4))
    way.put(1, 0, 5, contents(1, 1))
    landing.close()
    way.put(1, 1, 0, contents(1, 2))  # whoever has it open may go on
    values, scales = landing.parts
    assert np.array_equal(values[2, 1:5], contents(0, 4))
    assert np.array_equal(scales[0, 5:], contents(1, 1))
    assert np.array_equal(scales[1, :2], contents(1, 2))
    assert not values[:2].any()
    assert not values[2, [0, 5]].any()


def test_what_is_put_by_a_line_is_what_follows_the_message() -> None:
    landing = Landing(PAGE, 6)
    with line_pair() as (here, there):
        there._decoder = type(there._decoder)(Piece)
        LineWay(here, 7).put(0, 2, 1, np.asfortranarray(contents(0, 4)))
        piece = there.receive()
        assert piece == Piece(7, 0, 2, 1, 4)
        there.receive_into(memory_of(landing.parts[0][2][1:5]))
    assert np.array_equal(landing.parts[0][2, 1:5], contents(0, 4))
    landing.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda shared: replace(shared, machine="other"), "another machine's"),
        (lambda shared: replace(shared, token=bytes(16)), "another prompt's memory"),
        (lambda shared: replace(shared, path=f"/proc/{os.getpid()}/exe"), "no memory for pages"),
    ],
)
def test_memory_that_is_none_of_ours_is_not_written(
    change: Callable[[Shared], Shared], message: str
) -> None:
    landing = Landing(PAGE, 6)
    with pytest.raises(ValueError, match=message):
        SharedWay(change(shared_of(landing)), PAGE, 6)
    with pytest.raises(ValueError, match="another size"):
        SharedWay(shared_of(landing), PAGE, 7)
    landing.close()
    with pytest.raises(OSError, match="No such file"):
        SharedWay(shared_of(landing), PAGE, 6)


def test_memory_cannot_be_taken_from_under_whoever_writes_to_it() -> None:
    landing = Landing(PAGE, 6)
    descriptor = os.open(shared_of(landing).path, os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)
    os.close(descriptor)
    landing.close()


def test_nothing_is_left_of_it() -> None:
    gc.collect()
    before = mapped()
    landing = Landing(PAGE, 6)
    assert mapped() == before + 1
    landing.close()
    del landing
    assert mapped() == before


@pytest.mark.parametrize("step", ["ftruncate", "mmap"])
def test_memory_that_cannot_be_had_leaves_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(mmap if step == "mmap" else os, step, fail)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            Landing(PAGE, 6)
    assert descriptors() == before


def descriptors() -> int:
    """Landings that this process has open."""
    links = []
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(str(each.readlink()))
    return sum("memfd:paged-pages" in link for link in links)


def mapped() -> int:
    """Landings in the memory of this process."""
    return Path("/proc/self/maps").read_text().count("memfd:paged-pages")
