"""Seeded workloads: the same seed gives the same requests on every machine and for every engine.

Prompts are random token ids, so that no tokenizer is needed and no two prompts share a prefix
unless they are meant to. Only NumPy's generator decides; another seed gives prompts that share no
prefix with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paged.runtime.bench.baselines import BASELINES, ChatBaseline
from paged.runtime.bench.options import MOST
from paged.runtime.errors import ConfigError

# Ids are drawn from [LOWEST_ID, HIGHEST_ID): clear of the special tokens that Llama-type
# vocabularies keep at both ends.
LOWEST_ID, HIGHEST_ID = 1000, 127_999
# Standard deviation of log lengths: at 10 every length is the shortest or the longest.
_WIDEST = 10


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        prompt: token ids, or text if it came from a file of texts.
        num_input_tokens: the prompt's length; 0 for a text that was not tokenised.
        num_output_tokens: tokens to generate.
        arrival: seconds after the start of a run at which it comes, if nothing else says when.
        kind: the group that reports tell of it in; "" for none.
        priority: lower goes first, under the priority policy.
    """

    prompt: list[int] | str
    num_input_tokens: int
    num_output_tokens: int
    arrival: float = 0.0
    kind: str = ""
    priority: int = 0


@dataclass(frozen=True)
class IdRange:
    """Token ids to draw from: `low` up to, not including, `high`."""

    low: int = LOWEST_ID
    high: int = HIGHEST_ID

    @classmethod
    def below(cls, vocab_size: int | None) -> IdRange:
        """The usual range, cut to a smaller vocabulary; None leaves it whole."""
        high = min(HIGHEST_ID, vocab_size or HIGHEST_ID)
        return cls(min(LOWEST_ID, high // 2), high)

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """So many ids. Raises ConfigError for more than any model takes."""
        if count > MOST:
            raise ConfigError(f"A prompt has at most {MOST:,} tokens, got {count:,}")
        return rng.integers(self.low, self.high, size=count).tolist()


def random_requests(
    num_requests: int,
    input_len: int,
    output_len: int,
    *,
    seed: int,
    ids: IdRange,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
) -> list[BenchRequest]:
    """Fixed lengths, or lengths drawn evenly from (1 - range_ratio) to (1 + range_ratio) times.

    Args:
        prefix_len: tokens that all prompts begin with, on top of input_len.

    Raises:
        ConfigError: a length below 1, or a ratio outside [0, 1).
    """
    if input_len < 1 or output_len < 1 or prefix_len < 0:
        raise ConfigError(
            "Input and output lengths must be at least 1 and the prefix length at least 0, got "
            f"{input_len}, {output_len} and {prefix_len}"
        )
    if not 0 <= range_ratio < 1:
        raise ConfigError(f"--random-range-ratio must be at least 0 and below 1, got {range_ratio}")
    rng = np.random.default_rng(seed)
    prefix = ids.draw(rng, prefix_len) if prefix_len else []
    inputs = _even_lengths(rng, num_requests, input_len, range_ratio)
    outputs = _even_lengths(rng, num_requests, output_len, range_ratio)
    return [_request(prefix + ids.draw(rng, i), o) for i, o in zip(inputs, outputs, strict=True)]


def lognormal_requests(
    num_requests: int,
    *,
    seed: int,
    ids: IdRange,
    input_mean: float = 220.0,
    output_mean: float = 200.0,
    sigma: float = 1.0,
    min_len: int = 4,
    max_len: int = 1024,
) -> list[BenchRequest]:
    """Lengths as chats have them: many short, a few long.

    Args:
        input_mean, output_mean: means in tokens, before lengths are clipped.
        sigma: standard deviation of the logarithm of a length.

    Raises:
        ConfigError: lengths that cannot be drawn.
    """
    can_be = min(input_mean, output_mean) > 0 and 0 <= sigma <= _WIDEST
    if not can_be or not 1 <= min_len <= max_len:
        raise ConfigError(
            f"Lognormal lengths need means above 0, sigma from 0 to {_WIDEST} and "
            f"1 <= shortest <= longest, got means {input_mean} and {output_mean}, sigma {sigma}, "
            f"shortest {min_len}, longest {max_len}"
        )
    rng = np.random.default_rng(seed)
    lengths = partial(lognormal_lengths, rng, num_requests, sigma, min_len, max_len)
    inputs, outputs = lengths(input_mean), lengths(output_mean)
    return [_request(ids.draw(rng, i), o) for i, o in zip(inputs, outputs, strict=True)]


def prefix_repetition_requests(
    num_requests: int,
    *,
    seed: int,
    ids: IdRange,
    num_prefixes: int,
    prefix_len: int,
    suffix_len: int,
    output_len: int,
) -> list[BenchRequest]:
    """A few long prefixes, each followed by many suffixes, in random order.

    Raises:
        ConfigError: no prefix, a length that cannot be, or fewer requests than prefixes.
    """
    if not 1 <= num_prefixes <= num_requests or min(prefix_len, suffix_len, output_len) < 1:
        raise ConfigError(
            "Repeated prefixes need 1 <= prefixes <= requests and lengths of at least 1, got "
            f"{num_prefixes} prefixes, {num_requests} requests and lengths "
            f"{prefix_len}, {suffix_len}, {output_len}"
        )
    rng = np.random.default_rng(seed)
    prefixes = [ids.draw(rng, prefix_len) for _ in range(num_prefixes)]
    turns = rng.permutation(np.arange(num_requests) % num_prefixes)
    return [_request(prefixes[turn] + ids.draw(rng, suffix_len), output_len) for turn in turns]


def prefix_tree_requests(
    num_requests: int,
    *,
    seed: int,
    ids: IdRange,
    depth: int,
    branching: int,
    level_len: int,
    suffix_len: int,
    output_len: int,
) -> list[BenchRequest]:
    """Each prompt goes down a random way in a tree of prefixes, and ends in a suffix of its own.

    A level of the tree has `branching` times as many prefixes as the one above it, which are each
    `level_len` tokens longer.

    Raises:
        ConfigError: a number below 1.
    """
    sizes = {
        "depth": depth,
        "branching": branching,
        "level_len": level_len,
        "suffix_len": suffix_len,
        "output_len": output_len,
    }
    if min(sizes.values()) < 1:
        raise ConfigError(f"A tree of prefixes needs numbers of at least 1, got {sizes}")
    rng = np.random.default_rng(seed)
    levels: dict[tuple[int, ...], list[int]] = {}
    requests = []
    for _ in range(num_requests):
        way = tuple(rng.integers(branching, size=depth).tolist())
        prompt: list[int] = []
        for place in (way[: level + 1] for level in range(depth)):
            if place not in levels:
                levels[place] = ids.draw(rng, level_len)
            prompt += levels[place]
        requests.append(_request(prompt + ids.draw(rng, suffix_len), output_len))
    return requests


def baseline_requests(
    name: str, num_requests: int | None, *, seed: int | None, ids: IdRange
) -> list[BenchRequest]:
    """A baseline workload, or its first requests.

    Args:
        num_requests: None for all of them; C (a batch) and E (a closed loop) must be told.
        seed: None for the workload's own.

    Raises:
        ConfigError: more requests than the workload has, or none given where it has no size.
    """
    baseline = BASELINES[name]
    size = baseline.num_requests
    if size is None and num_requests is None:
        raise ConfigError(f"Workload {name} has no size of its own: give --num-prompts")
    if size is not None and num_requests is not None and num_requests > size:
        raise ConfigError(
            f"Workload {name} has {size} requests, --num-prompts asks for {num_requests}"
        )
    wanted = num_requests or size or 0
    seed = baseline.seed if seed is None else seed
    if isinstance(baseline, ChatBaseline):
        return lognormal_requests(baseline.num_requests, seed=seed, ids=ids)[:wanted]
    return random_requests(
        wanted,
        baseline.input_len,
        baseline.output_len,
        seed=seed,
        ids=ids,
        prefix_len=baseline.prefix_len,
    )


def reversed_prompt(request: BenchRequest) -> BenchRequest:
    """The same work, but nothing that a prefix cache could keep for the request itself."""
    prompt = request.prompt
    turned = " ".join(reversed(prompt.split())) if isinstance(prompt, str) else prompt[::-1]
    return replace(request, prompt=turned)


def _request(prompt: list[int], num_output_tokens: int) -> BenchRequest:
    return BenchRequest(prompt, len(prompt), num_output_tokens)


def _even_lengths(
    rng: np.random.Generator, count: int, length: int, range_ratio: float
) -> list[int]:
    """Exact lengths take nothing from the generator."""
    if range_ratio == 0:
        return [length] * count
    low = max(int(np.floor(length * (1 - range_ratio))), 1)
    high = int(np.ceil(length * (1 + range_ratio)))
    return rng.integers(low, high + 1, size=count).tolist()


def lognormal_lengths(
    rng: np.random.Generator, count: int, sigma: float, shortest: int, longest: int, mean: float
) -> list[int]:
    """Of so many prompts or answers, with this mean before they are clipped."""
    mu = np.log(mean) - sigma * sigma / 2
    lengths = np.rint(rng.lognormal(mu, sigma, count))
    return np.clip(lengths, shortest, longest).astype(int).tolist()
