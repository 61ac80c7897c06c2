"""The memory that pages arrive in, and the two ways into it.

A landing has room for all pages of a prompt that are wanted, layer by layer, so that a layer of
consecutive pages is one piece of memory. It has no name in any file system: a process of the same
machine and user opens it by the decode engine's own descriptor, and it is gone with the last
process that has it, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from paged.runtime.line import Line
from paged.runtime.transfer.messages import Piece, Shared

PageParts = Sequence[jax.ShapeDtypeStruct]
"""Shapes [layers, ..] and types of a page's content: values, then their scales if there are."""

_NAME = "paged-pages"
_TOKEN_BYTES = 16


class Landing:
    """Memory for so many pages.

    Attributes:
        parts: for each part of a page [layers, num_pages, ..].
        shared: how another process opens the same memory; None where that cannot be.
    """

    def __init__(self, page: PageParts, num_pages: int) -> None:
        """Take the memory. Raises OSError if it cannot be had."""
        self._descriptor: int | None = None
        self.shared: Shared | None = None
        try:
            self.parts = _parts_in(self._take(_size_of(page, num_pages)), page, num_pages)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let no other process open it any more. It lives as long as somebody looks into it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, size: int) -> mmap.mmap:
        token = secrets.token_bytes(_TOKEN_BYTES)
        if sys.platform == "linux":
            self._descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, size + _TOKEN_BYTES)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
            self.shared = Shared(path, _this_machine(), token)
        descriptor = -1 if self._descriptor is None else self._descriptor
        memory = mmap.mmap(descriptor, size + _TOKEN_BYTES)
        memory[size:] = token
        return memory


class Way(Protocol):
    """How content gets into the landing of another process."""

    def put(self, part: int, layer: int, first: int, content: NDArray[Any]) -> None:
        """Hand over one layer [N, ..] of the pages from `first` on.

        Raises:
            OSError: the other process is gone.
        """


class SharedWay:
    """Memory that both processes have.

    Raises:
        OSError, ValueError: it is another machine's, or cannot be opened.
    """

    def __init__(self, shared: Shared, page: PageParts, num_pages: int) -> None:
        if shared.machine != _this_machine():
            raise ValueError("the memory is another machine's")
        # In another container the path may lead to anything, which must not even be opened.
        if not str(Path(shared.path).readlink()).startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{shared.path} is no memory for pages")
        size = _size_of(page, num_pages)
        descriptor = os.open(shared.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not is_sealed or os.fstat(descriptor).st_size != size + _TOKEN_BYTES:
                raise ValueError(f"{shared.path} has another size")
            memory = mmap.mmap(descriptor, size + _TOKEN_BYTES)
        finally:
            os.close(descriptor)
        if memory[size:] != shared.token:
            raise ValueError(f"{shared.path} is another prompt's memory")
        self._parts = _parts_in(memory, page, num_pages)

    def put(self, part: int, layer: int, first: int, content: NDArray[Any]) -> None:
        """See `Way`."""
        self._parts[part][layer, first : first + len(content)] = content


class LineWay:
    """The connection: a message, and the bytes behind it."""

    def __init__(self, line: Line, number: int) -> None:
        self._line = line
        self._number = number

    def put(self, part: int, layer: int, first: int, content: NDArray[Any]) -> None:
        """See `Way`."""
        piece = Piece(self._number, part, layer, first, len(content))
        self._line.send(piece, memory_of(np.ascontiguousarray(content)))


def memory_of(array: NDArray[Any]) -> memoryview:
    """The bytes of a contiguous array, of whatever type."""
    return memoryview(array.reshape(-1).view(np.uint8))


def _size_of(page: PageParts, num_pages: int) -> int:
    return num_pages * sum(part.size * part.dtype.itemsize for part in page)


def _parts_in(memory: mmap.mmap, page: PageParts, num_pages: int) -> list[NDArray[Any]]:
    parts, offset = [], 0
    for part in page:
        layers, *rest = part.shape
        count = part.size * num_pages
        flat: NDArray[Any] = np.frombuffer(memory, part.dtype, count, offset)
        parts.append(flat.reshape(layers, num_pages, *rest))
        offset += count * part.dtype.itemsize
    return parts


def _this_machine() -> str:
    """A name that no other machine has, nor this one after it was started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
