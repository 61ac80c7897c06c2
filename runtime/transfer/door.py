"""Where decode engines connect to a prefill engine, and how pages leave it.

Each connection has two threads: one receives, one waits for pages to come from the device and hands
them over. The engine's thread waits for neither; a descriptor tells it that there is news.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from contextlib import suppress
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from paged.cache import PageStack
from paged.groups import Windows, entries_behind
from paged.runtime.config import EngineConfig
from paged.runtime.disk_pages import borrowed
from paged.runtime.errors import ConfigError
from paged.runtime.greeting import NotAdmitted, in_one_line
from paged.runtime.line import Line
from paged.runtime.transfer.handshake import KEY_VARIABLE, admit
from paged.runtime.transfer.landing import LineWay, PageParts, SharedWay, Way
from paged.runtime.transfer.messages import (
    Cancel,
    Failed,
    Finished,
    Landed,
    Prefill,
    ToPrefill,
)

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 64
_MOST_BYTES = 2**26  # of a message: a prompt takes some 5 a token
_TIME_TO_END = 1.0
# Seconds to the next who is let in after one for whom there was no descriptor, thread or room.
_AFTER_FAILURE = 1.0


class Job:
    """A prompt to compute, and how far its pages are handed over. The engine's thread has it.

    Args:
        windows: of the groups of layers.

    Attributes:
        num_full: pages of it, all of them full.
        first: of those, the first that is wanted in each group.
        num_handed: of those, how many from the first on are or need not be handed over.
        is_over: nothing is to be handed over any more.

    Raises:
        ValueError: it makes no sense.
    """

    def __init__(
        self, connection: Connection, asked: Prefill, page: PageParts, windows: Windows
    ) -> None:
        page_size = page[0].shape[1]
        self.connection, self.asked = connection, asked
        self.num_full = (len(asked.token_ids) - 1) // page_size
        self.first, self.num_handed = asked.first, list(asked.first)
        needed = [entries_behind(each, self.num_full * page_size, page_size) for each in windows]
        if len(self.first) != len(windows) or any(
            not least <= start <= self.num_full
            for start, least in zip(self.first, needed, strict=True)
        ):
            raise ValueError(f"pages from {self.first} on, of {self.num_full}")
        num_pages = sum(self.num_full - start for start in self.first)
        if not num_pages:
            raise ValueError("a prompt without a page that is wanted")
        self.way = _way_to(connection.line, asked, page, num_pages)
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether all pages have been given to the connection."""
        return all(each == self.num_full for each in self.num_handed)

    def number_of(self, group: int, entry: int) -> int:
        """The number of a page among all that are wanted."""
        before = sum(self.num_full - start for start in self.first[:group])
        return before + entry - self.first[group]


class Gone(NamedTuple):
    """A decode engine wants one of its prompts no more, or none of them, for it is gone."""

    connection: Connection
    number: int | None


class _Content(NamedTuple):
    """Pages on their way."""

    job: Job
    first: int
    stack: PageStack


class Connection:
    """That of a decode engine.

    Attributes:
        name: for people.
        num_waiting: pages that have left the device, and are not handed over yet.
    """

    def __init__(self, line: Line, name: str) -> None:
        self.line, self.name = line, name
        self.num_waiting = 0
        self._lock = threading.Lock()
        self._outbox: SimpleQueue[_Content | Finished | Failed | None] = SimpleQueue()

    def hand_over(self, job: Job, first: int, stack: PageStack) -> None:
        """Have pages handed over when they have come from the device."""
        self._count(len(stack[0]))
        self._outbox.put(_Content(job, first, stack))

    def tell(self, message: Finished | Failed) -> None:
        """Have the decode engine hear, after what was handed over."""
        self._outbox.put(message)

    def end(self) -> None:
        """Send nothing more."""
        self._outbox.put(None)
        self.line.close()

    def send_all(self) -> None:
        """A thread: hand over what there is, until the end."""
        while (item := self._outbox.get()) is not None:
            try:
                if not isinstance(item, _Content):
                    self.line.send(item)
                elif not item.job.is_over:
                    self._put(item)
            except (OSError, RuntimeError):  # it is gone, or what the device computed is
                self.line.close()  # whoever receives finds the end
            if isinstance(item, _Content):
                self._count(-len(item.stack[0]))
            del item  # else its memory would be kept until the next one comes

    def _put(self, content: _Content) -> None:
        """Hand pages over, layer by layer."""
        way, number = content.job.way, content.job.asked.number
        parts = [np.asarray(borrowed(part)) for part in content.stack]
        for layer in range(parts[0].shape[1]):
            for index, part in enumerate(parts):
                way.put(index, layer, content.first, part[:, layer])
        self.line.send(Landed(number, content.first, len(parts[0])))

    def _count(self, change: int) -> None:
        with self._lock:
            self.num_waiting += change


class Door:
    """Lets decode engines in, and tells the engine what they want.

    Args:
        listener: where they connect.
        facts: what must be the same there, see `paged.runtime.transfer.handshake`.
        page: what a page is made of.
        windows: of the groups of layers.

    Attributes:
        port: of the listener.
    """

    def __init__(
        self, listener: socket.socket, facts: dict[str, str], page: PageParts, windows: Windows
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener, self._facts = listener, facts
        self._page, self._windows = page, windows
        self._news: list[Job | Gone] = []
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # rings while there is news
        self._lock = threading.Lock()
        self._lines: set[Line] = set()
        self._connections: set[Connection] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._let_in, name="paged-door", daemon=True)
        self._thread.start()

    @property
    def has_news(self) -> bool:
        """Whether `news` gives something."""
        return bool(self._news)

    @property
    def num_waiting(self) -> int:
        """Pages that have left the device, and are not handed over yet."""
        with self._lock:
            return sum(each.num_waiting for each in self._connections)

    @property
    def num_connected(self) -> int:
        """Decode engines that may ask."""
        return len(self._connections)

    def fileno(self) -> int:
        """What is readable while there is news."""
        return self._bell

    def news(self) -> list[Job | Gone]:
        """What has come, in its order."""
        with self._lock:
            found = list(self._news)
            self._news.clear()
            if found and not self._is_closed:
                os.eventfd_read(self._bell)
        return found

    def close(self) -> None:
        """Let nobody in any more, and end all connections. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._news.clear()
            lines = list(self._lines)
            os.close(self._bell)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which ends the wait of the thread
        self._listener.close()
        for line in lines:
            line.close()
        self._thread.join(_TIME_TO_END)

    def _tell(self, news: Job | Gone) -> None:
        with self._lock:  # together, else the bell might ring on when there is no news
            if not self._is_closed:
                self._news.append(news)
                os.eventfd_write(self._bell, 1)

    def _let_in(self) -> None:
        while True:
            try:
                connection, (host, port, *_) = self._listener.accept()
                self._begin(connection, f"{host}:{port}")
            except (OSError, RuntimeError) as error:
                if self._is_closed:
                    return
                logger.warning("Somebody who has connected is not served: %s", error)
                time.sleep(_AFTER_FAILURE)

    def _begin(self, connection: socket.socket, name: str) -> None:
        """Have a thread serve whoever has connected. Raises RuntimeError: there is none for it."""
        line = Line(connection, ToPrefill)
        with self._lock:
            self._lines.add(line)
            has_room = len(self._lines) <= _MOST_CONNECTIONS and not self._is_closed
        thread = threading.Thread(
            target=self._serve, args=(line, name), name=f"paged-decode-{name}", daemon=True
        )
        try:
            if not has_room:
                raise RuntimeError(f"{_MOST_CONNECTIONS} others are connected")
            thread.start()
        except RuntimeError:
            self._hang_up(line)
            raise

    def _hang_up(self, line: Line) -> None:
        with self._lock:
            self._lines.discard(line)
        line.close()

    def _serve(self, line: Line, name: str) -> None:
        """A thread: one decode engine, from its first word to its last."""
        try:
            admit(line, self._facts)
        except (NotAdmitted, EOFError, OSError, ValueError) as error:
            logger.warning("Decode engine %s is not admitted: %s", name, in_one_line(error))
        else:
            logger.info("Decode engine %s is connected", name)
            self._receive(Connection(line, name))
        finally:
            self._hang_up(line)

    def _receive(self, connection: Connection) -> None:
        with self._lock:
            self._connections.add(connection)
        sender = threading.Thread(target=connection.send_all, name="paged-pages", daemon=True)
        sender.start()
        reason = ""
        try:
            while True:
                match connection.line.receive(most=_MOST_BYTES):
                    case Prefill() as asked:
                        self._tell(Job(connection, asked, self._page, self._windows))
                    case Cancel(number=number):
                        self._tell(Gone(connection, number))
                    case other:
                        raise ValueError(f"it sends {type(other).__name__} out of turn")
        except (EOFError, ValueError) as error:
            reason = in_one_line(error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.end()
            self._tell(Gone(connection, None))
            if not self._is_closed:
                logger.info("Decode engine %s is gone: %s", connection.name, reason)


def listen(config: EngineConfig) -> socket.socket | None:
    """The socket at which decode engines connect; None where none are wanted.

    Raises:
        ConfigError: it cannot be had, or anybody could come in.
    """
    host, port = config.kv_transfer_host, config.kv_transfer_port
    if port is None:
        return None
    if not _is_loopback(host) and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"--kv-transfer-host {host} lets other machines in: set {KEY_VARIABLE} to a secret, "
            "the same on prefill and decode engines"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"--kv-transfer-host {host} --kv-transfer-port {port} cannot be listened on "
            f"({error.strerror or error}): give an address of this machine and a free port"
        ) from error


def check_port(config: EngineConfig) -> None:
    """Find out, before anything takes long, whether `listen` will do. Raises as it does."""
    if (listener := listen(config)) is not None:
        listener.close()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _way_to(line: Line, asked: Prefill, page: PageParts, num_pages: int) -> Way:
    """By memory where both engines have it, else by the connection."""
    if asked.shared is not None:
        with suppress(OSError, ValueError):
            return SharedWay(asked.shared, page, num_pages)
    return LineWay(line, asked.number)
