"""What is asked of a fleet, and when: trees of turns, each of which begins with all before it.

A prompt of its own is a tree of one turn. A conversation is a line: each turn comes some seconds
after the answer to the one before. Where an agent hands work to others, the line branches. Tokens
are made up, with as much in common as the tree says: only that matters to the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from paged.runtime.bench.workloads import lognormal_lengths


@dataclass(frozen=True, slots=True)
class Turn:
    """A request that begins with what was said before it.

    Attributes:
        num_new: tokens of the prompt beyond what was said before.
        num_output: tokens to generate.
        pause: seconds after the answer before it.
        then: what follows its answer.
    """

    num_new: int
    num_output: int
    pause: float = 0.0
    then: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """What somebody wants of the fleet.

    Attributes:
        seconds: when its first turn comes.
        prompt: tokens that it begins with, which others may begin with, too.
        first: the first turn. What turns add is nobody else's.
    """

    seconds: float
    prompt: list[int]
    first: Turn


def num_turns(turn: Turn) -> int:
    """Requests of a turn and what follows it."""
    return 1 + sum(map(num_turns, turn.then))


@dataclass(frozen=True)
class Lengths:
    """Token counts as chats have them, lognormal: many short, a few long."""

    mean: float
    sigma: float = 1.0
    shortest: int = 4
    longest: int = 1024

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        return lognormal_lengths(rng, count, self.sigma, self.shortest, self.longest, self.mean)


@dataclass(frozen=True)
class Chats:
    """Conversations with people, with the lengths that ShareGPT's have.

    Attributes:
        system: tokens of the system prompt that all begin with; 0 for none.
        turns: mean number of turns, drawn from a geometric distribution.
        pause: mean seconds between an answer and the next question, drawn from an exponential one.
    """

    system: int = 64
    turns: float = 3.5
    pause: float = 20.0
    question: Lengths = Lengths(220)
    answer: Lengths = Lengths(200)

    def tree(self, rng: np.random.Generator, number: int) -> Tree:
        """A conversation."""
        count = int(rng.geometric(1 / self.turns))
        questions, answers = self.question.draw(rng, count), self.answer.draw(rng, count)
        pauses = rng.exponential(self.pause, count).tolist()
        return Tree(0.0, _system_prompt(0, self.system), _line(questions, answers, pauses))


@dataclass(frozen=True)
class Agents:
    """Programs that call a model over and over: long prompts, most of which was there before.

    Each application has a long prompt of its own (instructions, tools). A task goes on step by
    step; after some of them it is split over helpers, which begin with all that was said so far.

    Attributes:
        apps: applications.
        system: tokens of an application's prompt.
        steps: of a task before it is split, and of each helper.
        helpers: of a task.
        pause: mean seconds between an answer and the next step: a tool runs.
    """

    apps: int = 16
    system: int = 2000
    steps: int = 5
    helpers: int = 3
    pause: float = 2.0
    result: Lengths = Lengths(250)
    action: Lengths = Lengths(100, longest=512)

    def tree(self, rng: np.random.Generator, number: int) -> Tree:
        """A task."""
        helpers = tuple(self._steps(rng) for _ in range(self.helpers))
        app = int(rng.integers(self.apps))
        return Tree(0.0, _system_prompt(app, self.system), self._steps(rng, helpers))

    def _steps(self, rng: np.random.Generator, then: tuple[Turn, ...] = ()) -> Turn:
        results, actions = self.result.draw(rng, self.steps), self.action.draw(rng, self.steps)
        pauses = rng.exponential(self.pause, self.steps).tolist()
        return _line(results, actions, pauses, then)


@dataclass(frozen=True)
class Alike:
    """Requests of one size, each for itself.

    Attributes:
        prompt, output: tokens.
        shared: tokens that all begin with, on top of `prompt`.
    """

    prompt: int = 1024
    output: int = 128
    shared: int = 0

    def tree(self, rng: np.random.Generator, number: int) -> Tree:
        """A request."""
        return Tree(0.0, _system_prompt(0, self.shared), Turn(self.prompt, self.output))


Workload = Chats | Agents | Alike


def trees(workload: Workload, num_requests: int, seed: int) -> list[Tree]:
    """As many as it takes for that many requests, or some more to complete the last one."""
    rng = np.random.default_rng(seed)
    made: list[Tree] = []
    count = 0
    while count < num_requests:
        made.append(workload.tree(rng, len(made)))
        count += num_turns(made[-1].first)
    return made


def tokens_of(number: int, count: int) -> list[int]:
    """Tokens that nobody else has who has another number."""
    return [number, *([1] * (count - 1))] if count else []


@cache
def _system_prompt(number: int, count: int) -> list[int]:
    return tokens_of(number, count)


def _line(
    new: Sequence[int],
    outputs: Sequence[int],
    pauses: Sequence[float],
    then: tuple[Turn, ...] = (),
) -> Turn:
    """Turns one after the other, and what follows the last."""
    for each in zip(reversed(new), reversed(outputs), reversed(pauses), strict=True):
        then = (Turn(*each, then),)
    return then[0]


@dataclass(frozen=True)
class Bursts:
    """A rate that is higher for a while, again and again, and lower between, the mean unchanged.

    Attributes:
        factor: times the mean rate during a burst.
        seconds: that it lasts.
        every: seconds from the beginning of one to that of the next.
    """

    factor: float
    seconds: float
    every: float

    def __post_init__(self) -> None:
        if not self.seconds < self.every or self.factor * self.seconds > self.every:
            raise ValueError(
                f"bursts of {self.factor:g} times the mean for {self.seconds:g} of {self.every:g} "
                f"seconds leave less than nothing for the rest: make them shorter or rarer, at "
                f"most {self.every / self.factor:g} seconds"
            )

    def warp(self, times: np.ndarray) -> np.ndarray:
        """Arrivals of an even rate, moved to where these rates would have them."""
        knots, passed = self._curve(times.max(initial=0.0))
        return np.interp(times, passed, knots)

    def even(self, seconds: float) -> float:
        """In how many seconds of an even rate as many come as in these, from the first burst on."""
        return float(np.interp(seconds, *self._curve(seconds)))

    def _curve(self, seconds: float) -> tuple[np.ndarray, np.ndarray]:
        """When rates change, and seconds of the mean rate that have passed by then."""
        share = self.seconds / self.every
        calm = (1 - self.factor * share) / (1 - share)
        num_bursts = int(seconds // self.every) + 2
        begins = self.every * np.arange(num_bursts)
        knots = np.stack([begins, begins + self.seconds], axis=1).ravel()
        rates = np.tile([self.factor, calm], num_bursts)[:-1]
        return knots, np.concatenate([[0.0], np.cumsum(np.diff(knots) * rates)])
