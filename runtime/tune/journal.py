"""The evidence: a file of every run, by which a tune that was stopped goes on where it was."""

from __future__ import annotations

import fcntl
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from paged.runtime.bench.results import RunResult, Value
from paged.runtime.errors import ConfigError
from paged.runtime.tune.levers import Facts, Values
from paged.runtime.tune.search import Trial

NAME = "runs.jsonl"
_BEGINNING = b'{"task":'


class Task(msgspec.Struct, frozen=True):
    """What is tuned, and for what. A journal is of one task.

    Attributes:
        model: as it was named.
        flags: of the engine that are not the defaults, before anything is tuned.
        workload: a digest of its requests and of when they come.
        goals: milliseconds by time.
        max_concurrency: None for as they arrive.
    """

    model: str | None
    flags: dict[str, Any]
    workload: str
    goals: dict[str, float]
    max_concurrency: int | None = None


class Start(msgspec.Struct, frozen=True):
    """What the baseline's engine said of itself.

    Attributes:
        values: what its flags came to.
        device: what it ran on.
    """

    values: dict[str, Value]
    facts: Facts
    device: str


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run, or why there was none.

    Attributes:
        is_final: the same settings would fail again, as far as anyone can tell.
    """

    values: dict[str, Value]
    lever: str = ""
    run: RunResult | None = None
    error: str | None = None
    is_final: bool = True


@dataclass(frozen=True)
class _Header:
    task: Task
    start: Start


class Journal:
    """The runs in a folder, and those that are added.

    Attributes:
        start: of the first run, perhaps days ago; None as long as there is none.
    """

    def __init__(self, folder: Path, task: Task) -> None:
        """Open it, or begin one with the first run.

        Raises:
            ConfigError: it is of another task, or cannot be read or written.
        """
        self._path, self._task = folder / NAME, task
        self._runs: dict[str, list[_Line]] = defaultdict(list)
        self.start: Start | None = None
        try:
            lines = _whole_lines(self._path)
        except OSError as error:
            raise ConfigError(f"--output-dir {folder}: {error.strerror}") from error
        if lines:
            self._read(lines)

    def begin(self, start: Start) -> None:
        """What the baseline was, before its first run. Raises ConfigError if it cannot be kept."""
        self.start = start
        self._append(_Header(self._task, start))

    def recalled(self, trial: Trial) -> Trial | None:
        """The trial with its next run as it was; None if that is still to come."""
        known = self._runs[_key(trial.values)]
        if len(known) <= len(trial.runs):
            return None
        return _with(trial, known[len(trial.runs)])

    def add(
        self, trial: Trial, run: RunResult | None, error: str | None, *, is_final: bool = True
    ) -> Trial:
        """The trial with a run, or with an error instead, which is kept at once.

        Args:
            is_final: a tune that goes on need not try again what failed so.

        Raises:
            ConfigError: it cannot be written.
        """
        line = _Line(dict(trial.values), trial.lever, run, error, is_final)
        self._append(line)
        return _with(trial, line)

    def _append(self, line: Any) -> None:
        try:
            with self._path.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be written: {error.strerror}") from error

    def _read(self, lines: list[bytes]) -> None:
        try:
            header = msgspec.json.decode(lines[0], type=_Header)
            runs = [msgspec.json.decode(line, type=_Line) for line in lines[1:]]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path} is no journal of `paged tune`: {error}") from error
        if header.task != self._task:
            raise ConfigError(
                f"{self._path} is of another tune ({_difference(header.task, self._task)}): give "
                "another --output-dir, or remove the folder"
            )
        self.start = header.start
        for line in (each for each in runs if each.is_final):
            self._runs[_key(line.values)].append(line)


@contextmanager
def kept_alone(folder: Path) -> Iterator[None]:
    """A folder, made if there is none, whose journal is this process's alone meanwhile.

    Raises:
        ConfigError: another tune has it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / NAME).open("ab")
    except OSError as error:
        raise ConfigError(f"--output-dir {folder}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            others = isinstance(error, BlockingIOError)
            why = "another `paged tune` is at work there" if others else error.strerror
            raise ConfigError(f"--output-dir {folder}: {why}; give another folder") from error
        yield


def _whole_lines(path: Path) -> list[bytes]:
    """The lines of a file, if there is one.

    A last one that a stop or a full disk cut in two is taken off it; the rest is not written again.
    """
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if not whole and not text.startswith(_BEGINNING):
        return text.splitlines()  # somebody else's, to be left alone
    if whole != text:
        os.truncate(path, len(whole))
    return whole.splitlines()


def _with(trial: Trial, line: _Line) -> Trial:
    runs = trial.runs if line.run is None else (*trial.runs, line.run)
    return replace(trial, runs=runs, error=line.error)


def _key(values: Values) -> str:
    return json.dumps(values, sort_keys=True)


def _difference(one: Task, other: Task) -> str:
    names = [name for name in Task.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return "; ".join(f"{name}: {getattr(one, name)} there" for name in names)
