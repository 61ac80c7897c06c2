"""The evidence as a page: every trial as a dot, throughput against P99, and as a row of a table."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from paged.runtime.bench.html_page import card, gallery, legend, page
from paged.runtime.bench.plots import Axis, Series, plot
from paged.runtime.bench.tables import TITLES, Table
from paged.runtime.tune.report import Findings, as_flags, p99, summary
from paged.runtime.tune.search import Trial, Verdict, changed

_GROUPS = ("kept, the first of them the flags given", "not kept")


def evidence(findings: Findings, folder_name: str) -> str:
    """A page about a tune whose baseline ran."""
    goals = ", ".join(f"{name} {limit:g} ms" for name, limit in findings.goals.items())
    about = [
        f"{findings.model or 'The demo model'} on {findings.device}, "
        f"{len(findings.verdicts)} trials",
        f"Goals: {goals}" if goals else "No goals: output tokens per second count",
        *summary(findings, folder_name),
    ]
    lines = "".join(f"<p>{escape(line)}</p>" for line in about)
    body = (
        f"<header><h1>paged tune</h1>{lines}</header>"
        f"<h2>Throughput against latency</h2>{legend(_GROUPS)}{gallery(_plots(findings))}"
        f"<h2>Trials</h2>{card(table_of(findings))}"
    )
    return page("paged tune", body)


def table_of(findings: Findings) -> Table:
    """Every trial, in the order of their runs."""
    metrics = _metrics(findings)
    goodput = ("requests/s within goals",) if findings.goals else ()
    head = ("turn", *goodput, "tokens/s", *(f"{name} P99 ms" for name in metrics), "gain", "")
    return Table("", (*head, "flags"), tuple(_row(each, findings) for each in findings.verdicts))


def _row(verdict: Verdict, findings: Findings) -> tuple[str, ...]:
    trial = verdict.trial
    flags = as_flags(changed(trial.values, findings.baseline)) or "as given"
    goodput = (f"{trial.goodput:.2f}",) if findings.goals else ()
    times = (f"{p99(trial, name):,.0f}" for name in _metrics(findings))
    figures = (*goodput, f"{trial.throughput:,.1f}", *times, f"{verdict.gain:+.1%}")
    if trial.error:
        figures = tuple("" for _ in figures)
    decision = "failed" if trial.error else "kept" if verdict.is_kept else "not kept"
    return (trial.lever or "baseline", *figures, decision, trial.error or flags)


def _plots(findings: Findings) -> Iterator[str]:
    """To the right is better, and lower is."""
    ran = [verdict for verdict in findings.verdicts if not verdict.trial.error]
    kept = [verdict.trial for verdict in ran if verdict.is_kept]
    others = [verdict.trial for verdict in ran if not verdict.is_kept]
    unit = "requests/s within goals" if findings.goals else "output tokens/s"
    for name in _metrics(findings):
        series = [
            _dots(_GROUPS[0], kept, name, findings, 0, line=True),
            _dots(_GROUPS[1], others, name, findings, 1, line=False),
        ]
        yield plot(f"P99 of {TITLES[name].lower()}", series, Axis(unit), Axis("ms"))


def _dots(
    group: str, trials: list[Trial], name: str, findings: Findings, style: int, *, line: bool
) -> Series:
    across = [trial.goodput if findings.goals else trial.throughput for trial in trials]
    up = [p99(trial, name) for trial in trials]
    return Series(group, across, up, style, dots=True, line=line)


def _metrics(findings: Findings) -> tuple[str, ...]:
    return tuple(findings.goals) or ("ttft", "tpot", "e2el")
