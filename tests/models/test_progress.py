"""How a long start is told."""

import logging
import sys

import pytest

from paged.models.loading import progress as module
from paged.models.loading.progress import progress

Log = pytest.LogCaptureFixture
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def not_watched(monkeypatch: pytest.MonkeyPatch, caplog: Log) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 0.0)
    caplog.set_level(logging.INFO, logger=module.__name__)


def load() -> None:
    with progress(2_000_000_000, "Loading", "B", show=True) as advance:
        advance(500_000_000)


def test_a_log_gets_lines(caplog: Log, capsys: Capture) -> None:
    load()
    with progress(46, "Compiling", " programs", show=True) as advance:
        advance(12)
    assert caplog.messages == ["Loading: 0.5 of 2.0 GB", "Compiling: 12 of 46"]
    assert capsys.readouterr().err == ""


def test_lines_come_now_and_then(caplog: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS_BETWEEN_LINES", 60.0)
    load()
    assert caplog.messages == []


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_who_watches_gets_a_bar(
    where: str, caplog: Log, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "terminal":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    else:
        monkeypatch.setitem(sys.modules, "ipykernel", sys)
    load()
    assert "Loading:  25%" in capsys.readouterr().err
    assert caplog.messages == []


def test_silence_can_be_asked_for(caplog: Log, capsys: Capture) -> None:
    with progress(2, "Loading", "B", show=False) as advance:
        advance(1)
    assert (caplog.messages, capsys.readouterr().err) == ([], "")
