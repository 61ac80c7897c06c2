"""What a tune found: for the terminal, for `paged serve --config`, and for whoever must decide."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged.runtime.config import EngineConfig
from paged.runtime.tune.levers import LEVERS, Values
from paged.runtime.tune.search import Trial, Verdict, changed

CONFIG, PAGE = "flags.yaml", "report.html"
"""The files that a tune leaves, beside its runs."""
_COSTLY = {lever.name for lever in LEVERS if lever.costs_precision}


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All that was tried.

    Attributes:
        config: what the user told the engine.
        baseline: what the flags that are tuned came to then.
        is_cut_short: there would have been more to try.
    """

    config: EngineConfig
    model: str | None
    device: str
    goals: Mapping[str, float]
    baseline: Values
    verdicts: tuple[Verdict, ...]
    is_cut_short: bool = False

    @property
    def best(self) -> Trial | None:
        """The last one kept; None if not even the baseline ran."""
        kept = [verdict.trial for verdict in self.verdicts if verdict.is_kept]
        return kept[-1] if kept else None

    @property
    def flags(self) -> dict[str, Any]:
        """The user's flags, and on top those that gained."""
        gained = changed(self.best.values, self.baseline) if self.best else {}
        return {**told_flags(self.config), **gained}


def told_flags(config: EngineConfig) -> dict[str, Any]:
    """What a user said of the engine beside the model's name."""
    defaults = {each.name: each.default for each in fields(EngineConfig) if each.name != "model"}
    told = vars(config)
    return {name: told[name] for name in defaults if told[name] != defaults[name]}


def line_of(verdict: Verdict, baseline: Values) -> str:
    """A trial in a line."""
    trial = verdict.trial
    what = as_flags(changed(trial.values, baseline)) or "the flags given"
    name = f"{trial.lever or 'baseline'}: {what}"
    if trial.error:
        return f"{name}: failed, {trial.error}"
    result = ", ".join(_figures(trial))
    if not trial.lever:
        return f"{name}: {result}"
    decision = "kept" if verdict.is_kept else "not kept"
    return f"{name}: {result} ({verdict.gain:+.1%}: {decision})"


def _figures(trial: Trial) -> Iterator[str]:
    if trial.runs[-1].goals:
        yield f"{trial.goodput:.2f} requests/s within the goals"
    yield f"{trial.throughput:.1f} output tokens/s"
    for name in trial.runs[-1].goals or ("e2el",):
        yield f"{name} P99 {p99(trial, name):.0f} ms"


def p99(trial: Trial, name: str) -> float:
    """Milliseconds, the mean over the runs; 0 where nobody saw it."""
    return trial.mean(lambda run: run.times[name].p99 if name in run.times else 0.0)


def as_flags(values: Mapping[str, Any]) -> str:
    """As they are typed into a shell."""
    return " ".join(_as_flag(name, value) for name, value in values.items())


def _as_flag(name: str, value: Any) -> str:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{flag}" if value else f"--no-{flag}"
    if isinstance(value, Mapping):
        value = json.dumps(value)
    return f"--{flag} {shlex.join(map(str, value if isinstance(value, tuple) else (value,)))}"


def as_yaml(findings: Findings) -> str:
    """The flags as a file for `--config`, of whose language JSON's values are a part."""
    lines = [
        f"{name.replace('_', '-')}: {json.dumps(value)}\n"
        for name, value in {"model": findings.model, **findings.flags}.items()
        if value is not None
    ]
    return "".join(lines) or "{}\n"


def summary(findings: Findings, folder: str) -> Iterator[str]:
    """Lines that sum it all up, of a tune whose baseline ran."""
    assert findings.best is not None
    gained = changed(findings.best.values, findings.baseline)
    model = f" {findings.model}" if findings.model else ""
    if gained:
        yield f"Best: paged serve{model} {as_flags(findings.flags)}"
        yield f"The same in a file: paged serve --config {folder}/{CONFIG}"
    else:
        yield "Best: the flags given. Nothing gained."
    kept = dict.fromkeys(each.trial.lever for each in findings.verdicts if each.is_kept)
    if costly := [lever for lever in kept if lever in _COSTLY]:
        yield (
            f"Answers change by {' and '.join(costly)}: look at docs/quantization.md, or tune with "
            "--keep-precision"
        )
    yield f"Every trial as a picture: {folder}/{PAGE}"
    if findings.is_cut_short:
        yield "There would have been more to try: the same command with a larger --max-runs goes on"
