"""What a simulated fleet did, in numbers, as a table, and what one replica more would buy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from paged.runtime.bench.tables import Table
from paged.runtime.errors import ConfigError
from paged.runtime.simulation.fleet import Outcome

PERCENTILES = (50, 90, 99)
TIMES = ("ttft", "tpot", "e2el")
Goals = Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Summary:
    """One run.

    Attributes:
        replicas: to begin with, and to the end unless they are scaled.
        routing: how a replica was chosen.
        requests: that were answered and count: those that came after the warm-up.
        too_long: turns that the model is too short for.
        seconds: from the first of them to the last token.
        request_rate, output_rate: answered requests, and their tokens, a second.
        prompt_tokens, output_tokens: of them.
        hit_rate: share of the prompt tokens that was found in prefix caches.
        milliseconds: by name (ttft, tpot, e2el, as `paged bench serve` has them) and percentile.
        goodput: share of the requests that met all goals; None without goals.
        busy: share of their time in which devices ran.
        mean_replicas: over the whole run.
        gpu_hours: all of the run's, the warm-up included.
        preemptions: sequences that had to give their pages back.
        steps: of all replicas.
        sizes: (seconds, replicas, open requests) as the autoscaler saw them.
    """

    replicas: int
    routing: str
    requests: int
    too_long: int
    seconds: float
    request_rate: float
    output_rate: float
    prompt_tokens: int
    output_tokens: int
    hit_rate: float
    milliseconds: dict[str, dict[str, float]]
    goodput: float | None
    busy: float
    mean_replicas: float
    gpu_hours: float
    preemptions: int
    steps: int
    sizes: list[tuple[float, int, int]]

    def p99(self, name: str) -> float:
        """Milliseconds."""
        return self.milliseconds[name]["p99"]

    def as_json(self) -> dict[str, Any]:
        """All of it, in plain values."""
        return asdict(self)


def summarize(
    outcome: Outcome,
    replicas: int,
    routing: str,
    *,
    gpus: int = 1,
    warmup: float = 0.0,
    goals: Goals = (),
) -> Summary:
    """The numbers of a run.

    Args:
        gpus: of a replica.
        warmup: seconds; requests that came before do not count.
        goals: limits in milliseconds by the name of the time.

    Raises:
        ConfigError: no request counts.
    """
    served = [each for each in outcome.served if each.arrival >= warmup]
    if not served:
        raise ConfigError(
            f"No request came after the warm-up of {warmup:g} s ({len(outcome.served)} before, "
            f"{outcome.num_too_long} too long for the model): simulate more seconds, a higher rate "
            f"or a longer --max-model-len"
        )
    arrival, first, last, prompt, cached, output = np.array(served).T
    seconds = float(last.max() - arrival.min())
    per_token = (last - first) / np.maximum(output - 1, 1)
    times = {"ttft": first - arrival, "tpot": per_token, "e2el": last - arrival}
    goodput = _share_within(times, goals)
    times["tpot"] = per_token[output > 1]
    return Summary(
        replicas=replicas,
        routing=routing,
        requests=len(served),
        too_long=outcome.num_too_long,
        seconds=seconds,
        request_rate=len(served) / seconds,
        output_rate=float(output.sum()) / seconds,
        prompt_tokens=int(prompt.sum()),
        output_tokens=int(output.sum()),
        hit_rate=float(cached.sum() / prompt.sum()),
        milliseconds={name: _percentiles(values) for name, values in times.items()},
        goodput=goodput,
        busy=outcome.busy_seconds / outcome.replica_seconds,
        mean_replicas=outcome.replica_seconds / outcome.end,
        gpu_hours=gpus * outcome.replica_seconds / 3600,
        preemptions=outcome.num_preemptions,
        steps=outcome.num_steps,
        sizes=outcome.sizes,
    )


def _share_within(times: Mapping[str, np.ndarray], goals: Goals) -> float | None:
    """Of requests, those that met all goals; None without any."""
    if not goals:
        return None
    met = [1e3 * times[name] <= limit for name, limit in goals]
    return float(np.all(met, axis=0).mean())


def _percentiles(seconds: np.ndarray) -> dict[str, float]:
    values = 1e3 * np.percentile(seconds if len(seconds) else [0.0], PERCENTILES)
    return {f"p{each}": float(value) for each, value in zip(PERCENTILES, values, strict=True)}


def fleet_table(summaries: Sequence[Summary]) -> Table:
    """A row for each run."""
    head = (
        *("replicas", "routing", "req/s", "out tok/s", "hits", "busy", "TTFT p50", "p99 ms"),
        *("TPOT p50", "p99 ms", "E2E p99 s", "met", "preempted", "GPU h"),
    )
    return Table("", head, tuple(map(_row, summaries)))


def _row(each: Summary) -> tuple[str, ...]:
    ttft, tpot = each.milliseconds["ttft"], each.milliseconds["tpot"]
    is_fixed = abs(each.mean_replicas - each.replicas) < 0.005 * each.replicas
    return (
        f"{each.replicas}" if is_fixed else f"~{each.mean_replicas:.1f}",
        each.routing,
        f"{each.request_rate:,.1f}",
        f"{each.output_rate:,.0f}",
        f"{each.hit_rate:.1%}",
        f"{each.busy:.0%}",
        f"{ttft['p50']:,.0f}",
        f"{ttft['p99']:,.0f}",
        f"{tpot['p50']:.1f}",
        f"{tpot['p99']:.1f}",
        f"{each.p99('e2el') / 1e3:,.1f}",
        "-" if each.goodput is None else f"{each.goodput:.1%}",
        f"{each.preemptions:,}",
        f"{each.gpu_hours:,.2f}",
    )


def by_routing(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The runs under each routing, by their replicas."""
    return {
        routing: sorted((s for s in summaries if s.routing == routing), key=lambda s: s.replicas)
        for routing in dict.fromkeys(each.routing for each in summaries)
    }


def what_more_buys(summaries: Sequence[Summary]) -> Iterator[str]:
    """A line for each step to more replicas under the same routing."""
    for runs in by_routing(summaries).values():
        for fewer, more in pairwise(runs):
            yield _bought(fewer, more)


def _bought(fewer: Summary, more: Summary) -> str:
    faster = more.request_rate / fewer.request_rate - 1
    hours = more.gpu_hours - fewer.gpu_hours
    met = ""
    if fewer.goodput is not None and more.goodput is not None:
        met = f", goals met {fewer.goodput:.1%} -> {more.goodput:.1%}"
    return (
        f"{fewer.replicas} -> {more.replicas} replicas ({more.routing}): {faster:+.1%} requests/s, "
        f"TTFT p99 {fewer.p99('ttft'):,.0f} -> {more.p99('ttft'):,.0f} ms, "
        f"TPOT p99 {fewer.p99('tpot'):.1f} -> {more.p99('tpot'):.1f} ms{met}, "
        f"{hours:+,.2f} GPU hours"
    )
