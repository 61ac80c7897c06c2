"""The connection of a decode engine to a prefill engine, and the prompts that are under way on it.

Two threads of its own wait for the network: one receives, and connects again when the connection
is lost, one sends. The engine's thread waits for neither.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paged.cache import PageStack
from paged.runtime.greeting import NotAdmitted, in_one_line
from paged.runtime.line import Line
from paged.runtime.steps import MOVE_SIZES
from paged.runtime.transfer.handshake import introduce
from paged.runtime.transfer.landing import Landing, PageParts, memory_of
from paged.runtime.transfer.messages import (
    Cancel,
    Failed,
    Finished,
    Landed,
    Piece,
    Prefill,
    ToDecode,
)

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**16  # of a message: content follows it, and is none
_TIME_TO_CONNECT = 5.0
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 15.0
# Seconds that the threads get to end; they are daemons, which no exit waits for.
_TIME_TO_END = 1.0


class Outcome(NamedTuple):
    """How the handing over of a prompt's pages has ended.

    Attributes:
        name: one of `paged.runtime.transfer.asking.OUTCOMES`.
        reason: for people; "" where the name says all.
    """

    name: str
    reason: str = ""


class Handover:
    """A prompt that a prefill engine computes.

    Attributes:
        names: in the prefix cache, of the pages that are wanted.
        num_tokens: that the prefill engine was asked for.
        landing: where they arrive.
        landed: those that have: the first of them, and their content.
        outcome: there when no more will come.
        last_news: when something was last heard of it; seconds, `time.monotonic`.
        started: when it was asked for.
    """

    def __init__(self, names: Sequence[bytes], num_tokens: int, landing: Landing) -> None:
        self.names, self.num_tokens, self.landing = names, num_tokens, landing
        self.landed: deque[tuple[int, PageStack]] = deque()
        self.outcome: Future[Outcome] = Future()
        self.started = self.last_news = time.monotonic()
        self._lock = threading.Lock()

    def end(self, name: str, reason: str = "") -> None:
        """Expect no more, unless it has ended already."""
        with self._lock:
            if not self.outcome.done():
                self.landing.close()
                self.outcome.set_result(Outcome(name, in_one_line(reason)))


class Peer:
    """A prefill engine.

    Args:
        address: of the engine, "host:port".
        facts: what must be the same there, see `paged.runtime.transfer.handshake`.
        page: what a page is made of.
        stack: takes the content of pages to where host pages are.

    Attributes:
        name: for people.
    """

    def __init__(
        self,
        address: str,
        facts: dict[str, str],
        page: PageParts,
        stack: Callable[[Sequence[NDArray[Any]]], PageStack],
    ) -> None:
        host, _, port = address.rpartition(":")
        self.name = address
        self._address = host.strip("[]"), int(port)
        self._facts, self._page, self._stack = facts, page, stack
        self._lock = threading.Lock()
        self._line: Line | None = None
        self._is_silent = False
        self._live: dict[int, Handover] = {}
        self._num_asked = 0
        self._told: str | None = None
        self._closed = threading.Event()
        self._outbox: SimpleQueue[tuple[Line, Prefill | Cancel] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=run, name=f"paged-prefill-{address}", daemon=True)
            for run in (self._run, self._send)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def can_be_asked(self) -> bool:
        """Whether it is connected, and has said something since a prompt took too long."""
        return self._line is not None and not self._is_silent

    @property
    def num_tokens(self) -> int:
        """Of the prompts that it computes for this engine."""
        with self._lock:
            return sum(each.num_tokens for each in self._live.values())

    def ask(
        self, handover: Handover, token_ids: list[int], salt: str, priority: int, first: list[int]
    ) -> None:
        """Ask for a prompt, see `Prefill`; if the connection is lost, the handover ends with it."""
        with self._lock:
            if self._line is None:
                handover.end("lost", "the connection is lost")
                return
            number = self._num_asked
            self._num_asked += 1
            self._live[number] = handover
            shared = handover.landing.shared
            message = Prefill(number, token_ids, salt, priority, first, shared)
            self._outbox.put((self._line, message))

    def cancel(self, handover: Handover) -> None:
        """End a handover that is not wanted any more, and let the prefill engine know."""
        handover.end("aborted")
        self._cancel(handover)

    def give_up(self, handover: Handover, reason: str) -> None:
        """Cancel a handover that takes too long, and ask for no other until something is heard.

        A prefill engine that works answers that at once.
        """
        handover.end("timeout", reason)
        self._cancel(handover, awaits_answer=True)

    def close(self) -> None:
        """End the connection and all that is under way on it. Idempotent."""
        self._closed.set()
        with self._lock:
            if self._line is not None:
                self._line.close()
        self._outbox.put(None)
        for thread in self._threads:
            thread.join(_TIME_TO_END)

    def _cancel(self, handover: Handover, *, awaits_answer: bool = False) -> None:
        with self._lock:
            # Of one that is not live any more, all has been said: no answer would come.
            for number in [each for each, live in self._live.items() if live is handover]:
                del self._live[number]
                self._is_silent |= awaits_answer
                if self._line is not None:
                    self._outbox.put((self._line, Cancel(number)))

    def _run(self) -> None:
        """Connect, receive, and again."""
        delay = _FIRST_DELAY
        while not self._closed.is_set():
            try:
                line = self._connected()
            except NotAdmitted as error:
                self._tell(f"Prefill server {self.name} refuses this engine: {error}")
            except (OSError, EOFError, ValueError) as error:
                self._tell(f"Prefill server {self.name} cannot be reached: {error}")
            else:
                delay = _FIRST_DELAY
                self._tell(f"Prefill server {self.name} is connected", logging.INFO)
                reason = self._receive(line)
                if not self._closed.is_set():
                    self._tell(f"Prefill server {self.name} is lost: {reason}")
            self._closed.wait(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    def _tell(self, text: str, level: int = logging.WARNING) -> None:
        """Log what has changed: many tries may fail alike."""
        text = in_one_line(text)
        if text != self._told:
            logger.log(level, "%s", text)
        self._told = text

    def _connected(self) -> Line:
        line = Line(socket.create_connection(self._address, _TIME_TO_CONNECT), ToDecode)
        try:
            introduce(line, self._facts)
        except BaseException:
            line.close()
            raise
        return line

    def _receive(self, line: Line) -> str:
        """Receive until the connection is lost; returns why it is."""
        with self._lock:
            self._line = None if self._closed.is_set() else line
            self._is_silent = False
        reason = "it was closed"
        try:
            while not self._closed.is_set():
                self._take(line, line.receive(most=_MOST_BYTES))
        except (EOFError, ValueError, RuntimeError) as error:  # the last of host memory that is out
            reason = str(error)
        finally:
            with self._lock:
                self._line, lost = None, list(self._live.values())
                self._live.clear()
            for handover in lost:
                handover.end("lost", reason)
            line.close()
        return reason

    def _take(self, line: Line, message: Any) -> None:
        """Raises ValueError: it is none that may come now."""
        if isinstance(message, Piece):
            self._is_silent = False
            line.receive_into(self._place_of(message))
            return
        if not isinstance(message, Landed | Finished | Failed):
            raise ValueError(f"it sends {type(message).__name__} out of turn")
        with self._lock:  # one step: given up in between, it would be silent after its last word
            self._is_silent = False
            ends = not isinstance(message, Landed)
            handover = (self._live.pop if ends else self._live.get)(message.number, None)
        if handover is None:
            return  # it was cancelled meanwhile
        handover.last_news = time.monotonic()
        if isinstance(message, Landed):
            self._land(handover, message.first, message.count)
        elif isinstance(message, Failed):
            handover.end("refused", message.reason)
        else:
            handover.end("done")

    def _land(self, handover: Handover, first: int, count: int) -> None:
        _check_range(first, count, len(handover.names))
        # Copied, for what arrives in memory that is shared is the prefill engine's to write.
        parts = [
            np.swapaxes(part[:, first : first + count], 0, 1).copy(order="C")
            for part in handover.landing.parts
        ]
        handover.landed.append((first, self._stack(parts)))

    def _place_of(self, piece: Piece) -> memoryview:
        """The memory that a piece is for; of one that nobody wants any more, some other."""
        if not 0 <= piece.part < len(self._page):
            raise ValueError(f"a piece of part {piece.part}, of {len(self._page)}")
        layers, *rest = self._page[piece.part].shape
        if not 0 <= piece.layer < layers:
            raise ValueError(f"a piece of layer {piece.layer}, of {layers}")
        with self._lock:
            handover = self._live.get(piece.number)
        if handover is None:
            _check_range(0, piece.count, piece.count)
            unwanted = np.empty((piece.count, *rest), self._page[piece.part].dtype)
            return memory_of(unwanted)
        _check_range(piece.first, piece.count, len(handover.names))
        handover.last_news = time.monotonic()
        layer = handover.landing.parts[piece.part][piece.layer]
        return memory_of(layer[piece.first : piece.first + piece.count])

    def _send(self) -> None:
        while (item := self._outbox.get()) is not None:
            line, message = item
            try:
                line.send(message)
            except OSError:
                line.close()  # whoever receives finds the end


def _check_range(first: int, count: int, num_pages: int) -> None:
    if count not in MOVE_SIZES or not 0 <= first <= num_pages - count:
        raise ValueError(f"{count} pages from page {first} on, of {num_pages}")
