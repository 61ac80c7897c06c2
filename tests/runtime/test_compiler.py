"""How compiling many programs ends before its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paged.runtime import compiler
from paged.runtime.compiler import compile_all
from paged.runtime.lowering import Job, Key


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_no_program_is_begun(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    names: list[Key] = []

    def compile_slowly(what: tuple[Key, Any], make: object) -> str:
        names.append(what[0])
        begun.release()
        threading.Event().wait(0.2)
        return "program"

    def interrupted(futures: object) -> Iterator[Any]:
        assert begun.acquire(timeout=10)
        raise error

    monkeypatch.setattr(compiler, "load_or_compile", compile_slowly)
    monkeypatch.setattr(compiler, "as_completed", interrupted)
    jobs: list[tuple[Key, Job]] = [((str(number),), Job(print, ())) for number in range(200)]
    with pytest.raises(error):
        compile_all("a model", jobs)
    assert 0 < len(names) < 100
    so_far = len(names)
    threading.Event().wait(0.5)
    assert len(names) == so_far
