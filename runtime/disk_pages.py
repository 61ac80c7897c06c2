"""Files of page contents that outlive the process: the third tier of the prefix cache.

A folder holds the pages of one model, whose weights, shapes and source name it. What goes to host
memory is written here too, by a thread, and nobody waits for it: where more comes than the disk
takes, some is left out. A file is a digest and what it is of, under a name that is the hash of the
tokens; whatever is not as it should be counts as not there. A file gets its name when it is whole:
whoever ends the process in the middle leaves no other.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from threading import Condition, Lock
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from paged.cache import PageStack

logger = logging.getLogger(__name__)

_ENDING = ".page"
_DIGEST_BYTES = 32
_NOT_WRITTEN = "%s was not written: %s"
_READERS = 4
# Host memory that waits to be written stays taken: so not too much of it.
_MOST_WAITING = 256
_MEASURED_BYTES = 2**26
# Names of files that are being written, and seconds after which none of them still is.
_UNFINISHED = re.compile(r"[0-9a-f]+\.[0-9a-f]{16}|[0-9a-f]{16}\.measured")
_LONGEST_WRITE = 3600

FoundPage = tuple[bytes, tuple[NDArray[Any], ...]]
"""The hash of some content, and the content."""
Fetched = Future[list[FoundPage]]
"""Pages that are being read."""


class DiskPages:
    """Writes and reads the pages in a folder; all calls but `close` return at once.

    Servers of the same model may share a folder: each knows what it found there and what it wrote,
    and takes what another has removed for a page that cannot be read.

    Attributes:
        max_pages: that there is room for.
        seconds_per_page: what reading takes, as measured at the start and since.
        seconds_to_write: what writing a page takes, as measured at the start.
        num_waiting: pages that wait to be written.
        num_read: pages that were read.
        num_left_out: pages that the disk was too slow to take.
    """

    def __init__(self, folder: Path, max_bytes: int, page: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Find what is there.

        Args:
            page: shapes and types of a page's content.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder = folder
        self._page = page
        self._bytes = _DIGEST_BYTES + sum(part.size * part.dtype.itemsize for part in page)
        self.max_pages = max_bytes // self._bytes
        self.num_read = self.num_left_out = self.num_waiting = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # prompts can be read out of pages
        self.seconds_to_write, self.seconds_per_page = self._measure()
        self._lock = Lock()
        self._num_clears = 0
        self._unwanted = Counter[bytes]()  # forgotten, and not removed yet
        self._fails = False  # the last write
        self._known = OrderedDict.fromkeys(self._find())  # least recently used first
        self._room = Condition()
        self._is_closed = False
        self._writer = ThreadPoolExecutor(1, "paged-disk-writer")
        self._readers = ThreadPoolExecutor(_READERS, "paged-disk-reader")
        self._writer.submit(self._forget_oldest)  # there may have been room for more

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._known

    def write(self, page_hashes: Sequence[bytes], stack: PageStack, *, seconds: float = 0) -> None:
        """Have pages written that are not here yet.

        Args:
            stack: their content, a row each.
            seconds: to wait for each that the disk does not take yet; after that it is left out.
        """
        missing = {}
        for row, page_hash in enumerate(page_hashes):
            if page_hash in self._known:
                self._use(page_hash)
            elif self._take_room(seconds):
                missing[row] = page_hash
            else:
                self.num_left_out += 1
        if missing:
            self._writer.submit(self._write_all, missing, stack, self._num_clears)

    def fetch(self, page_hashes: Sequence[bytes]) -> Fetched:
        """Have pages read; those that cannot be are left out."""
        return self._readers.submit(self._read_all, page_hashes)

    def clear(self) -> None:
        """Forget all pages, those that wait to be written too, and have their files removed."""
        with self._lock:
            forgotten = list(self._known)
            self._known.clear()
            self._num_clears += 1
        self._writer.submit(self._remove, forgotten)

    def forget(self, page_hashes: Sequence[bytes]) -> None:
        """Have pages removed, those that wait to be written too; written later they come back."""
        with self._lock:
            self._unwanted.update(page_hashes)
            for page_hash in page_hashes:
                self._known.pop(page_hash, None)
        self._writer.submit(self._remove_unwanted, page_hashes)

    def close(self, seconds: float | None = None) -> None:
        """Write what waits to be written; what is not in so many seconds is left out."""
        self._readers.shutdown(cancel_futures=True)
        with self._room:
            done = self._room.wait_for(lambda: not self.num_waiting, seconds)
        self._is_closed = True
        self._writer.shutdown(cancel_futures=not done)
        self.num_left_out += self.num_waiting
        self.num_waiting = 0

    def _find(self) -> Iterator[bytes]:
        """Hashes of the pages in the folder, least recently used first.

        What a process left there that was killed while it wrote is removed.
        """
        files = [*_files(self._folder)]
        num_foreign = 0
        for path, stat in sorted(files, key=lambda file: file[1].st_mtime_ns):
            page_hash = _hash_in(path)
            if page_hash is not None and stat.st_size == self._bytes:
                yield page_hash
            elif not _UNFINISHED.fullmatch(path.name):
                num_foreign += 1
            elif time.time() - stat.st_mtime > _LONGEST_WRITE:
                path.unlink(missing_ok=True)
        if num_foreign:
            logger.warning("Ignored %d files in %s that are no pages", num_foreign, self._folder)

    def _measure(self) -> tuple[float, float]:
        """Seconds that a page takes to be written and to be read: by the disk, no cache of it."""
        path = self._folder / f"{secrets.token_hex(8)}.measured"
        count = max(_MEASURED_BYTES // self._bytes, 1)
        try:
            started = time.perf_counter()
            path.write_bytes(bytes(count * self._bytes))
            with path.open("rb") as file:
                os.fsync(file.fileno())
                written = (time.perf_counter() - started) / count
                if sys.platform == "linux":
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                started = time.perf_counter()
                file.read()
                return written, (time.perf_counter() - started) / count
        finally:
            path.unlink(missing_ok=True)

    def _take_room(self, seconds: float) -> bool:
        """Count a page among those that wait; False if there are too many of them for so long."""
        with self._room:
            if not self._room.wait_for(lambda: self.num_waiting < _MOST_WAITING, seconds):
                return False
            self.num_waiting += 1
            return True

    def _path(self, page_hash: bytes) -> Path:
        return self._folder / f"{page_hash.hex()}{_ENDING}"

    def _use(self, page_hash: bytes) -> None:
        with self._lock:
            if page_hash in self._known:
                self._known.move_to_end(page_hash)

    def _remove(self, page_hashes: Sequence[bytes]) -> None:
        for page_hash in page_hashes:
            self._path(page_hash).unlink(missing_ok=True)

    def _remove_unwanted(self, page_hashes: Sequence[bytes]) -> None:
        """What was to be written when they were forgotten has been passed over by now."""
        self._remove(page_hashes)
        with self._lock:
            self._unwanted.subtract(page_hashes)
            self._unwanted += Counter()  # without those that are not counted any more

    def _write_all(self, page_hashes: dict[int, bytes], stack: PageStack, num_clears: int) -> None:
        """Write the rows of a stack that are wanted."""
        left = len(page_hashes)
        try:
            parts = [np.asarray(borrowed(part)) for part in stack]
            for row, page_hash in page_hashes.items():
                if self._is_closed:
                    return
                self._write(page_hash, [part[row] for part in parts], num_clears)
                self._settle(1)
                left -= 1
        except Exception:  # the device's, of a step that failed, or of memory
            logger.exception("%d pages were not written", left)
            self._settle(left)

    def _settle(self, count: int) -> None:
        """So many pages do not wait any more."""
        with self._room:
            self.num_waiting -= count
            self._room.notify_all()

    def _write(self, page_hash: bytes, arrays: list[NDArray[Any]], num_clears: int) -> None:
        path = self._path(page_hash)
        unfinished = path.with_suffix(f".{secrets.token_hex(8)}")
        try:
            body = b"".join(array.tobytes() for array in arrays)
            unfinished.write_bytes(_digest(page_hash, body) + body)
            with self._lock:
                if num_clears == self._num_clears and page_hash not in self._unwanted:
                    unfinished.replace(path)
                    self._known[page_hash] = None
            self._forget_oldest()
            self._fails = False
        except OSError as error:
            # Once, and not again for each of the thousands that a full disk does not take.
            logger.log(logging.DEBUG if self._fails else logging.WARNING, _NOT_WRITTEN, path, error)
            self._fails = True
        finally:
            unfinished.unlink(missing_ok=True)

    def _forget_oldest(self) -> None:
        oldest = []
        with self._lock:
            while len(self._known) > self.max_pages:
                oldest.append(self._known.popitem(last=False)[0])
        self._remove(oldest)

    def _read_all(self, page_hashes: Sequence[bytes]) -> list[FoundPage]:
        started = time.perf_counter()
        found = []
        for page_hash in page_hashes:
            arrays = self._read(page_hash)
            if arrays is not None:
                found.append((page_hash, arrays))
        seconds = time.perf_counter() - started
        if found:
            with self._lock:
                self.num_read += len(found)
                self.seconds_per_page += (seconds / len(found) - self.seconds_per_page) / 4
        return found

    def _read(self, page_hash: bytes) -> tuple[NDArray[Any], ...] | None:
        """What a file holds; None, and the page forgotten, where it does not hold that."""
        path = self._path(page_hash)
        try:
            file = path.read_bytes()
            if file[:_DIGEST_BYTES] != _digest(page_hash, file[_DIGEST_BYTES:]):
                raise ValueError("its digest is another")
            path.touch()
        except (OSError, ValueError) as error:
            logger.warning("%s is ignored: %s", path, error)
            with self._lock:
                self._known.pop(page_hash, None)
            return None
        self._use(page_hash)
        return tuple(self._parts(file))

    def _parts(self, file: bytes) -> Iterator[NDArray[Any]]:
        offset = _DIGEST_BYTES
        for part in self._page:
            yield np.frombuffer(file, part.dtype, part.size, offset).reshape(part.shape)
            offset += part.size * part.dtype.itemsize


def borrowed(array: jax.Array) -> jax.Array:
    """The same memory. Of the array itself, once read, JAX would keep a copy while it lives."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """The files in a folder, but for those that another process removes meanwhile."""
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            yield path, path.stat()


def _hash_in(path: Path) -> bytes | None:
    """The hash that names a page's file; None for another file."""
    try:
        return bytes.fromhex(path.stem) if path.suffix == _ENDING else None
    except ValueError:
        return None


def _digest(page_hash: bytes, body: bytes) -> bytes:
    return blake2b(page_hash + body, digest_size=_DIGEST_BYTES, person=b"paged disk").digest()
