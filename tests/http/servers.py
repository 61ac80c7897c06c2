"""Servers in processes of their own, for tests of how they live and end."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.runtime.remote import spawned

ROOT = Path(__file__).parent.parent.parent


class Server:
    def __init__(self, process: subprocess.Popen[str], pattern: str) -> None:
        assert process.stdout
        self.process = process
        self.ready = process.stdout.readline()
        [self.url] = re.findall(pattern, self.ready.strip())

    def stream(self, max_tokens: int = 50) -> Generator[str]:
        """Lines of an answer, as they come."""
        body: dict[str, Any] = {"prompt": "a", "max_tokens": max_tokens, "stream": True}
        with httpx2.stream("POST", f"{self.url}/completions", json=body, timeout=60) as reply:
            yield from filter(None, reply.iter_lines())

    def wait_after(self, number: signal.Signals) -> float:
        """Seconds that it takes to leave."""
        start = time.monotonic()
        self.process.send_signal(number)
        self.process.wait(20)
        return time.monotonic() - start


@contextmanager
def started(program: str, *argv: str, pattern: str = r"https?://\S+/v1$") -> Iterator[Server]:
    """The server that a program starts, in a process group of its own, as a shell would do it.

    Its address is what the line that it prints when it is ready matches.
    """
    with spawned(
        [sys.executable, "-c", program, *argv],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        yield Server(process, pattern)
