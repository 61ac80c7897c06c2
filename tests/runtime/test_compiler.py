"""How compiling many programs ends before its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paged.runtime import compiler
from paged.runtime.compiler import Compiler
from paged.runtime.lowering import Job, Key


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_after_an_error_no_program_is_begun(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    names: list[Key] = []

    def compile_slowly(what: tuple[Key, Any], make: object, devices: object) -> str:
        names.append(what[0])
        begun.release()
        threading.Event().wait(0.2)
        return "program"

    def interrupted(futures: object) -> Iterator[Any]:
        assert begun.acquire(timeout=30)
        raise error

    monkeypatch.setattr(compiler, "load_or_compile", compile_slowly)
    monkeypatch.setattr(compiler, "as_completed", interrupted)
    jobs: list[tuple[Key, Job]] = [((str(number),), Job(print, ())) for number in range(200)]
    with pytest.raises(error), Compiler() as every:
        every.programs("a model", jobs)
    assert 0 < len(names) < 100
    so_far = len(names)
    threading.Event().wait(0.5)
    assert len(names) == so_far


def test_what_was_begun_is_waited_for_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[Key] = []

    def compile_slowly(what: tuple[Key, Any], make: object, devices: object) -> Key:
        names.append(what[0])
        threading.Event().wait(0.1)
        return what[0]

    monkeypatch.setattr(compiler, "load_or_compile", compile_slowly)
    jobs: list[tuple[Key, Job]] = [((str(number),), Job(print, ())) for number in range(3)]
    with Compiler() as every:
        every.begin("a model", jobs[:2])
        found: dict[Key, Any] = dict(every.programs("a model", jobs))
        assert found == {key: key for key, _ in jobs}
        every.begin("another model", jobs[:1])[("0",)].result()
    assert sorted(names) == [("0",), ("0",), ("1",), ("2",)]
