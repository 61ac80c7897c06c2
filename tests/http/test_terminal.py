"""Answers on a terminal."""

import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paged.http.cli import main
from paged.http.options import SamplingOptions
from paged.http.terminal import converse
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.errors import ConfigError
from tests.http.fakes import FakeEngine

OPTIONS = SamplingOptions()


@pytest.fixture
def run(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(AsyncEngine, "from_config", lambda config: engine)
    return lambda *argv: main(argv)


def reader(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Somebody who types these lines, then Ctrl-D."""
    coming: Iterator[Any] = iter([*lines, EOFError])

    def read(prompt: str) -> str:
        line = next(coming)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_generate_continues_each_prompt(
    run: Callable[..., int], engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--prompt", "a", "b", "--temperature", "0", "--stop", "x") == 0
    assert capsys.readouterr().out == "Hello!\nHello!\n"
    assert [seen.text for seen in engine.seen] == ["a", "b"]
    assert (engine.seen[0].params.temperature, engine.seen[0].params.stop) == (0, ["x"])


def test_generate_reads_standard_input(
    run: Callable[..., int], engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run("generate") == 0
    assert engine.seen[0].text == "from a pipe"


@pytest.mark.parametrize("typed", ["", " \n"])
def test_no_prompt_is_said_before_the_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    monkeypatch.setattr(AsyncEngine, "from_config", lambda config: pytest.fail("it was loaded"))
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    assert main(["generate"]) == 2
    asked, error = capsys.readouterr().err.splitlines()
    assert "Ctrl-D" in asked
    assert error.startswith("paged: error: There is no prompt: give --prompt")


def test_generate_stops_somewhere(run: Callable[..., int], engine: FakeEngine) -> None:
    run("generate", "--prompt", "a")
    engine.max_model_len = 1000
    run("generate", "--prompt", "a")
    run("generate", "--prompt", "a", "--max-tokens", "3")
    assert [seen.params.max_tokens for seen in engine.seen] == [62, 256, 3]


def test_text_needs_a_tokenizer(engine: FakeEngine) -> None:
    engine.tokenizer = None
    with pytest.raises(ConfigError, match="tokenizer"):
        converse(engine, OPTIONS, None, reader(), print)


def test_a_conversation_remembers(engine: FakeEngine) -> None:
    written: list[str] = []
    converse(engine, OPTIONS, "Be", reader("a", "", " b "), written.append)
    assert "".join(written) == "Hello!\nHello!\n\n"
    assert engine.seen[0].text == "system:Be|user:a|assistant:"
    assert engine.seen[1].text == "system:Be|user:a|assistant:Hello!|user:b|assistant:"
    assert engine.seen[0].params.max_tokens is None


@pytest.mark.parametrize("farewell", ["exit", "quit", KeyboardInterrupt])
def test_a_conversation_ends(engine: FakeEngine, farewell: Any) -> None:
    converse(engine, OPTIONS, None, reader(farewell, "never said"), print)
    assert engine.seen == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdin", [Terminal, io.StringIO])
def test_who_types_is_told_how_to_leave(
    run: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stdin: type[io.StringIO],
) -> None:
    monkeypatch.setattr("sys.stdin", stdin("hello\n"))
    assert run("chat") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert ("Ctrl-D" in first) == (stdin is Terminal)
    assert last.endswith("> ")  # and a newline, for the shell


def test_ctrl_c_cuts_an_answer_short(engine: FakeEngine) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if written == ["H", "e"]:
            raise KeyboardInterrupt

    converse(engine, OPTIONS, None, reader("a", "b"), write)
    assert "".join(written) == "He ...\nHello!\n\n"
    assert len(engine.aborted) == 1
    assert engine.seen[1].text == "user:a|assistant:He|user:b|assistant:"


def test_what_cannot_be_answered_is_forgotten(engine: FakeEngine) -> None:
    written: list[str] = []
    converse(engine, OPTIONS, None, reader("x" * 99, "a"), written.append)
    assert written[0] == "(a prompt of 115 tokens)\n"
    assert engine.seen[1].text == "user:a|assistant:"
