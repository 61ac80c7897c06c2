"""How long a step takes, as a function that is fitted to steps which ran.

The tokens of a step, padding included, decide how long its products take: weights are read for few
of them and multiplied for many, so that this is taken as linear between knots. Attention adds what
`paged.runtime.step_costs` counts: tokens of context that rows of one token read, and pairs of
tokens in chunks. Context that several rows of a step share comes from memory once, and from the
device's cache after that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from paged.runtime.buckets import Buckets
from paged.runtime.errors import ConfigError
from paged.runtime.least_squares import least_squares
from paged.runtime.plan import StepPlan
from paged.runtime.simulation.shared_pages import SharedPages
from paged.runtime.step_costs import Work

_PASSES = 4


class MeasuredStep(NamedTuple):
    """A step that ran.

    Attributes:
        tokens: padding included.
        context, pairs: see `Work`.
        milliseconds: from the end of the step before it to its own, on a device that never waited.
        again: tokens of the context that another row of the step had read before.
    """

    tokens: int
    context: float
    pairs: float
    milliseconds: float
    again: float = 0.0


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step.

    Attributes:
        tokens, dense: time of a step by its tokens, without attention; between these it is linear,
            and goes on beyond the last as it came there.
        context: of a token of context that a row of one token reads.
        pairs: of a token in a chunk, for each token before it.
        again: of a token of context that another row of the step has read before.
        cached_tokens: whose pages of a layer the device's cache holds.
    """

    tokens: tuple[float, ...]
    dense: tuple[float, ...]
    context: float
    pairs: float
    again: float
    cached_tokens: float = float("inf")

    def of(
        self, num_tokens: float, context: float = 0.0, pairs: float = 0.0, again: float = 0.0
    ) -> float:
        """Of a step of so many tokens, padding included; for the others see `MeasuredStep`."""
        tokens, dense = self.tokens, self.dense
        last = min(max(bisect_right(tokens, num_tokens), 1), len(tokens) - 1)
        slope = (dense[last] - dense[last - 1]) / (tokens[last] - tokens[last - 1])
        flat = dense[last - 1] + slope * max(num_tokens - tokens[last - 1], 0.0)
        return flat + self.attention(context, pairs, again)

    def attention(self, context: float, pairs: float, again: float) -> float:
        """Of a step, that of its attention alone."""
        return self.context * (context - again) + self.again * again + self.pairs * pairs

    def errors(self, steps: Sequence[MeasuredStep]) -> np.ndarray:
        """What it says of each step, as a share of what was measured, less 1."""
        found = [self.of(*step[:3], step.again) / step.milliseconds - 1 for step in steps]
        return np.array(found)


def fit(
    steps: Sequence[MeasuredStep],
    knots: Sequence[float] | None = None,
    cached_tokens: float = float("inf"),
) -> StepTimes:
    """The times that come nearest to measured ones, by the squares of relative errors.

    Errors count relative to what is expected of a step, as found in the pass before: relative to
    what was measured, steps that something held up would hardly count, and those that remain make
    a machine look faster than it is. No step is quicker for having more to do: what would come out
    below 0 is left out. Where no step shares pages, to read one again costs what it does at first.

    Args:
        knots: token counts between which times are linear; by default those that were measured,
            each at least twice the one before it.
        cached_tokens: see `StepTimes`.

    Raises:
        ConfigError: the steps are of one size.
    """
    points = tuple(map(float, knots or _spread_out(sorted({step.tokens for step in steps}))))
    if len(points) < 2:
        raise ConfigError(
            f"Step times need steps of two sizes at least, one twice the other; all of these "
            f"{len(steps)} have about {points[0] if points else 0:g} tokens: measure more sizes"
        )
    features = np.array([_features(step, points) for step in steps])
    measured = np.array([step.milliseconds for step in steps])
    expected = np.full(len(steps), measured.mean())
    for _ in range(_PASSES):
        found = least_squares(features / expected[:, None], measured / expected)
        expected = np.maximum(features @ found, 1e-3 * measured.mean())
    dense = np.cumsum([found[0], *(found[1:-3] * np.diff(points))])
    context, pairs, again = map(float, found[-3:])
    if not any(step.again for step in steps):
        again = context
    return StepTimes(points, tuple(map(float, dense)), context, pairs, again, cached_tokens)


def _spread_out(sizes: Sequence[int]) -> list[int]:
    """Some of the sizes, from the first to the last."""
    kept = list(sizes[:1])
    for size in sizes:
        if size >= 2 * kept[-1]:
            kept.append(size)
    if len(kept) > 1 and sizes[-1] > kept[-1]:
        kept[-1] = sizes[-1]
    return kept


def _features(step: MeasuredStep, knots: tuple[float, ...]) -> list[float]:
    """A step at the first knot, the tokens beyond each knot up to the next, and attention."""
    ends = (*knots[1:-1], float("inf"))
    beyond = [
        max(min(step.tokens, end) - start, 0) for start, end in zip(knots, ends, strict=False)
    ]
    return [1.0, *beyond, step.context - step.again, step.pairs, step.again]


@dataclass
class StepClock:
    """Times the steps of a plan as an engine with these buckets would run them.

    Attributes:
        page_size: tokens of a page.
        padding: milliseconds that went into padding so far.
        used: the buckets, as (tokens, whether they are for decoding alone).
    """

    buckets: Buckets
    times: StepTimes
    page_size: int
    padding: float = 0.0

    def __post_init__(self) -> None:
        self.used: set[tuple[int, bool]] = set()
        self._shared = SharedPages(self.page_size, self.times.cached_tokens)
        self._dense = cache(self.times.of)

    def seconds(self, plan: StepPlan) -> float:
        """A step of this plan."""
        bucket = self.buckets.pick(plan, scores_prompt=False)
        self.used.add((bucket.num_tokens, bucket.decode_only))
        num_tokens, context, pairs = Work.of(plan)
        again = self._shared.again(plan)
        dense = self._dense(bucket.num_tokens)
        self.padding += dense - self._dense(num_tokens)
        return (dense + self.times.attention(context, pairs, again)) / 1e3
