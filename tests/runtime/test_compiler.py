"""How compiling many programs ends before its time."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from jax.stages import Compiled

from paged.runtime.compiler import compiler


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_no_program_is_begun(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    names: list[str] = []

    def compile_slowly(what: tuple[tuple[str], str], make: object) -> str:
        names.append(what[0][0])
        begun.release()
        threading.Event().wait(0.2)
        return "program"

    monkeypatch.setattr("paged.runtime.compiler.load_or_compile", compile_slowly)
    futures: list[Future[Compiled]] = []

    def compile_all() -> None:
        with compiler("a model") as submit:
            for number in range(200):
                futures.append(submit((str(number),), (print, (), ())))
            assert begun.acquire(timeout=10)
            raise error

    with pytest.raises(error):
        compile_all()
    assert all(future.done() for future in futures)
    assert sum(not future.cancelled() for future in futures) == len(names) < 100
