"""A prefill engine and a decode engine of one tiny model, in one process."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from paged.models.loading import ModelSource
from paged.runtime.core import EngineCore
from paged.runtime.line import Line
from paged.runtime.load_costs import FREE
from paged.runtime.messages import EngineRequest, TransferStats
from paged.runtime.runner import StepRunner
from paged.runtime.transfer.door import Gone
from paged.runtime.transfer.messages import Cancel
from tests.runtime.remote import wait_until
from tests.runtime.test_core import make_core, run

LEAST = 16
"""Tokens above which the prefill engine is asked."""

_NOBODYS = 2**40  # the number of no prompt

Tokens = dict[tuple[str, int], list[int]]


class Pair:
    """Both engines. The decode engine is driven by the test, the prefill engine by `working`."""

    def __init__(self, prefill: EngineCore, decode: EngineCore) -> None:
        self.prefill, self.decode = prefill, decode

    def await_connection(self) -> None:
        wait_until(
            lambda: self.decode.remote.num_connected == 1 == self.prefill.served.num_connected
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Have the prefill engine step meanwhile."""
        is_over, failures = threading.Event(), list[Exception]()

        def work() -> None:
            try:
                while not is_over.is_set():
                    if self.prefill.has_work:
                        self.prefill.step()
                    else:
                        time.sleep(0.001)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
        assert not failures

    def alone(self, *requests: EngineRequest) -> Tokens:
        """What the decode engine answers by itself. Nothing is cached before or after."""
        remote, peers = self.decode.remote, self.decode.remote._peers
        assert self.decode.reset_prefix_cache()
        remote._peers = []
        try:
            return run(self.decode, *requests)
        finally:
            remote._peers = peers
            assert self.decode.reset_prefix_cache()

    @property
    def stats(self) -> TransferStats:
        """Of the decode engine."""
        return self.decode.stats().transfer

    def hear_all(self) -> None:
        """Wait until the prefill engine has heard what it was sent, and ends of connections.

        Else what a test before has cancelled would come as the news that another waits for.
        """
        door, told = self.prefill.served._door, set[Line]()
        assert door is not None
        [peer] = self.decode.remote._peers

        def is_heard() -> bool:
            line = peer._line
            if line is not None and line not in told:
                told.add(line)
                peer._outbox.put((line, Cancel(_NOBODYS)))
            serving = [t for t in threading.enumerate() if t.name.startswith("paged-decode-")]
            heard = [each for each in list(door._news) if isinstance(each, Gone)]
            return len(serving) == 1 and any(each.number == _NOBODYS for each in heard)

        wait_until(is_heard)

    def num_computed(self) -> int:
        """Tokens of prompts that the prefill engine has computed, when it has nothing left."""
        wait_until(self.prefill_is_idle)
        return self.prefill.stats().prompt_tokens

    def settle(self) -> None:
        """Have the prefill engine do what is left to it, and both forget everything."""
        wait_until(self.prefill_is_idle)
        bell = self.prefill.fileno()
        assert bell is not None
        rings = select.select([bell], [], [], 0)[0]
        assert self.prefill.has_work or not rings, "it would be woken for nothing, for ever"
        assert self.decode.reset_prefix_cache()
        assert self.prefill.reset_prefix_cache()
        assert self.decode.remote.num_under_way == 0
        self.decode._pool.check()
        self.prefill._pool.check()

    def prefill_is_idle(self) -> bool:
        while self.prefill.has_work:
            self.prefill.step()
        return not self.prefill.served._jobs


@contextmanager
def opened(source: ModelSource, compile_cache: str, **flags: Any) -> Iterator[Pair]:
    """Both, connected; `flags` are for both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "measure_loads", lambda runner: FREE)
        prefill = make_core(source, compile_cache, kv_transfer_port=0, **flags)
        decode = make_core(
            source,
            compile_cache,
            kv_offloading_size=2**-8,
            prefill_servers=(f"127.0.0.1:{prefill.served.port}",),
            min_remote_prefill_tokens=LEAST,
            **flags,
        )
    pair = Pair(prefill, decode)
    try:
        pair.await_connection()
        yield pair
    finally:
        decode.close()
        prefill.close()
