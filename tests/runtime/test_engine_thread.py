"""What the engine's thread sleeps in."""

from __future__ import annotations

import os

from paged.runtime.engine_thread import EngineThread
from tests.runtime.fakes import FakeCore, engine


def test_it_is_woken_in_a_process_that_was_started_without_standard_input() -> None:
    """Its bell is descriptor 0 then."""
    kept = os.dup(0)
    os.close(0)
    try:
        thread = EngineThread(engine(FakeCore()))
        assert thread._bell == 0
        assert thread.call(lambda engine: engine.stats().num_running).result(30) == 0
        thread.shutdown()
    finally:
        os.dup2(kept, 0)
        os.close(kept)
