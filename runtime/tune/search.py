"""The search: a baseline, then one lever at a time, over and over until no lever gains.

It is a hill climb along the axes, and it finds the top of a hill, not of the highest one. What is
measured is noisy: what seems to gain is run once more, and the mean of both must gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from paged.runtime.bench.results import RunResult, Value
from paged.runtime.tune.levers import Facts, Lever, Values


@dataclass(frozen=True)
class Trial:
    """The workload under some settings.

    Attributes:
        values: every flag that is tuned.
        lever: whose turn it was; "" for the baseline.
        runs: none if it failed.
        error: why it failed.
    """

    values: Values
    lever: str = ""
    runs: tuple[RunResult, ...] = ()
    error: str | None = None

    def mean(self, figure: Callable[[RunResult], float | None]) -> float:
        """Of a figure over the runs; 0 of those that did not have it."""
        return sum(figure(run) or 0.0 for run in self.runs) / max(len(self.runs), 1)

    @property
    def goodput(self) -> float:
        """Requests per second that met all goals."""
        return self.mean(lambda run: run.goodput)

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return self.mean(lambda run: run.output_tokens_per_second)


@dataclass(frozen=True)
class Verdict:
    """A trial beside the best one before it.

    Attributes:
        gain: by how much it is better, as a share; negative if it is worse.
        is_kept: it is the best now.
    """

    trial: Trial
    gain: float
    is_kept: bool


Measure = Callable[[Trial], Trial]
"""Runs the workload once more: the trial with a run added, or with an error."""


@dataclass
class Search:
    """What has been tried, and what came of it.

    Attributes:
        measure: runs the workload.
        levers: in the order of their turns.
        margin: the gain that a change must bring, as a share.
        max_runs: of the workload, all trials together.
        verdicts: of all trials, in the order of their runs.
        is_cut_short: there would have been more to try.
    """

    measure: Measure
    levers: Sequence[Lever]
    facts: Facts
    margin: float
    max_runs: int
    verdicts: list[Verdict] = field(default_factory=list)
    is_cut_short: bool = False
    _num_runs: int = 0

    def run(self, baseline: Values) -> Iterator[Verdict]:
        """Verdicts as they are reached, the baseline's first; the last one kept is the answer."""
        first = self._measured(self._measured(Trial(baseline)))
        yield self._judge(first, 0.0, is_kept=not first.error)
        best = first
        has_gained = not first.error
        while has_gained:
            has_gained = False
            for lever in self.levers:
                for verdict in self._turn(lever, best):
                    yield verdict
                    if verdict.is_kept:
                        best, has_gained = verdict.trial, True

    def _turn(self, lever: Lever, best: Trial) -> Iterator[Verdict]:
        """One lever in each of its directions."""
        for move in lever.moves:
            while (change := move(best.values, self.facts)) is not None:
                values = {**best.values, **change}
                if self._knows(values):
                    break
                if self._num_runs >= self.max_runs:
                    self.is_cut_short = True
                    return
                verdict = self._try(Trial(values, lever.name), best)
                yield verdict
                if not verdict.is_kept:
                    break
                best = verdict.trial

    def _try(self, trial: Trial, best: Trial) -> Verdict:
        trial = self._measured(trial)
        if self._seems_better(trial, best):
            trial = self._measured(trial)
        return self._judge(trial, gain(trial, best), is_kept=self._seems_better(trial, best))

    def _seems_better(self, trial: Trial, best: Trial) -> bool:
        return trial.error is None and gain(trial, best) > self.margin

    def _judge(self, trial: Trial, by: float, *, is_kept: bool) -> Verdict:
        self.verdicts.append(Verdict(trial, by, is_kept))
        return self.verdicts[-1]

    def _measured(self, trial: Trial) -> Trial:
        if trial.error:
            return trial
        self._num_runs += 1
        return self.measure(trial)

    def _knows(self, values: Values) -> bool:
        return any(verdict.trial.values == values for verdict in self.verdicts)


def gain(trial: Trial, best: Trial) -> float:
    """By how much one trial is better than another, as a share of the other.

    Goals count first. As long as neither meets any, more tokens a second are a step towards them.
    """
    if trial.error:
        return -1.0
    if trial.goodput or best.goodput:
        return _ratio(trial.goodput, best.goodput)
    return _ratio(trial.throughput, best.throughput)


def changed(values: Values, baseline: Values) -> Mapping[str, Value]:
    """Those that differ from the baseline's."""
    return {name: value for name, value in values.items() if value != baseline[name]}


def _ratio(one: float, other: float) -> float:
    if other == 0:
        return float("inf") if one else 0.0
    return one / other - 1
