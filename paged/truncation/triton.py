"""The threshold by two kernels: one reads all logits once, one then finds each row's threshold.

The first is spread over the whole GPU, also for a single row. It cuts the vocabulary into groups of
neighbours and notes of each group its maximum and its share of the softmax. The second has one
program per row. It knows from the maxima alone a value that the threshold cannot lie below (as many
maxima as are wanted lie above it), so that it need look only into the groups that reach it: a few
dozen of two thousand for usual filters, all of them where a flat distribution is cut at its middle.

A threshold is looked for by halving twice at a time: three values between two bounds are tried in
one pass. As soon as few logits are left between the bounds, they are brought together and the
other passes see only them. All sums run in an order that depends on the vocabulary's size alone,
whatever the number of rows, so that a row's threshold never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from paged.kernels import Ref
from paged.truncation.order import key_of, min_p_key, number_of

# Neighbours that make a group: 256 bytes, read as a whole or not at all.
_GROUP = 64
# Groups that a program of the first kernel takes: 16 KiB.
_GROUPS_SUMMARISED = 64
# Groups that a program of the second kernel reads at a time.
_GROUPS_AT_A_TIME = 32
_AT_A_TIME = _GROUPS_AT_A_TIME * _GROUP
# Values tried in a pass: two halvings.
_TRIED = 3
_LOWEST = jnp.finfo(jnp.float32).min


def thresholds_triton(
    logits: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `paged.truncation.truncation_thresholds`."""
    num_rows, vocab_size = logits.shape
    num_groups = pl.cdiv(vocab_size, _GROUP)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    summary = jax.ShapeDtypeStruct((num_rows, num_groups), jnp.float32)
    maxima, sums = pl.pallas_call(
        _summarise_kernel,
        name="paged_summarise_logits",
        grid=(num_rows, pl.cdiv(num_groups, _GROUPS_SUMMARISED)),
        in_specs=[anywhere] * 2,
        out_specs=[anywhere] * 2,
        out_shape=[summary, summary],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
    )(logits, temperature)
    thresholds, _, _ = pl.pallas_call(
        partial(_threshold_kernel, interpret=interpret),
        name="paged_threshold",
        grid=(num_rows,),
        in_specs=[anywhere] * 7,
        out_specs=[anywhere] * 3,
        # The second and third are its working memory: Triton kernels get none but as outputs.
        out_shape=[
            jax.ShapeDtypeStruct((num_rows,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows, num_groups), jnp.int32),
            jax.ShapeDtypeStruct((num_rows, _AT_A_TIME), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
    )(logits, temperature, top_k, top_p, min_p, maxima, sums)
    return thresholds


def _summarise_kernel(
    logits_ref: Ref, temperature_ref: Ref, maxima_ref: Ref, sums_ref: Ref
) -> None:
    """Maximum, and sum of exponentials relative to it, of some groups of one row: both [R, G]."""
    row = pl.program_id(0)
    group = pl.program_id(1) * _GROUPS_SUMMARISED + jnp.arange(_GROUPS_SUMMARISED)
    x = _load_groups(logits_ref, row, group)
    maximum = x.max(axis=1)
    above = x - jnp.maximum(maximum, _LOWEST)[:, None]  # of nothing but -inf the sum is 0
    total = jnp.exp(above * (1 / temperature_ref[row])).sum(axis=1)
    exists = group < maxima_ref.shape[1]
    plgpu.store(maxima_ref.at[row, group], maximum, mask=exists)
    plgpu.store(sums_ref.at[row, group], total, mask=exists)


def _load_groups(logits_ref: Ref, row: jax.Array, group: jax.Array) -> jax.Array:
    """Logits [len(group), _GROUP] of groups of a row; -inf beyond the vocabulary."""
    token = group[:, None] * _GROUP + jnp.arange(_GROUP)[None, :]
    mask = token < logits_ref.shape[1]
    return plgpu.load(logits_ref.at[row, token], mask=mask, other=-jnp.inf)


def _store_dense(
    ref: Ref, row: jax.Array, start: jax.Array, values: jax.Array, mask: jax.Array
) -> None:
    """Store the chosen values side by side in `ref` [R, N] from `start` on, as far as they fit."""
    room = ref.shape[1]
    place = jnp.where(mask, start + lax.cumsum(mask.astype(jnp.int32)) - 1, room)
    plgpu.store(ref.at[row, place], values, mask=place < room)


class _Bracket(NamedTuple):
    """What is known of a threshold.

    Attributes:
        low, high: int32 keys; the threshold is at least `low`, and below `high`.
        num_low, num_high: int32, how many numbers are at least as high as either; `num_low` may be
            too large.
        above: float32, what those from `high` on measure together.
    """

    low: jax.Array
    high: jax.Array
    num_low: jax.Array
    num_high: jax.Array
    above: jax.Array

    @property
    def found(self) -> jax.Array:
        """Whether no number, or equal ones alone, may lie between."""
        return (self.high <= self.low + 1) | (self.num_low - self.num_high <= 1)

    def raised(self, holds: jax.Array, key: jax.Array, num: jax.Array) -> _Bracket:
        """With another lower bound where `holds`."""
        low, num_low = jnp.where(holds, key, self.low), jnp.where(holds, num, self.num_low)
        return self._replace(low=low, num_low=num_low)

    def lowered(
        self, holds: jax.Array, key: jax.Array, num: jax.Array, above: jax.Array
    ) -> _Bracket:
        """With another upper bound where `holds`."""
        return self._replace(
            high=jnp.where(holds, key, self.high),
            num_high=jnp.where(holds, num, self.num_high),
            above=jnp.where(holds, above, self.above),
        )


# Weighs numbers; None lets each count one.
_Weigh = Callable[[jax.Array], jax.Array] | None
# Of the numbers that reach each of some thresholds: the counts, int32, then the weights, float32,
# unless each counts one.
_Tally = list[jax.Array]


class _Row(NamedTuple):
    """One row, as the second kernel looks at it.

    Attributes:
        row: its index.
        sharpness, peak: scalars, the inverse of the temperature and the highest logit.
        maxima: of all groups, padded to a power of two by -inf.
        logits: [R, V].
        groups: [R, G] int32, room for a list of groups.
        gathered: [R, _AT_A_TIME] float32, room for a few logits.
        interpret: whether there are no threads to wait for each other.
    """

    row: jax.Array
    sharpness: jax.Array
    peak: jax.Array
    maxima: jax.Array
    logits: Ref
    groups: Ref
    gathered: Ref
    interpret: bool

    def weigh(self, x: jax.Array) -> jax.Array:
        """Probabilities, relative to the most likely token's."""
        return jnp.exp((x - self.peak) * self.sharpness)

    def list_groups(self, low: jax.Array) -> jax.Array:
        """Note which groups reach the number `low`; returns how many do."""
        group = jnp.arange(self.maxima.shape[0])
        reaches = (self.maxima >= low) & (group < self.groups.shape[1])
        _store_dense(self.groups, self.row, jnp.int32(0), group, reaches)
        self.wait_for_stores()
        return reaches.astype(jnp.int32).sum()

    def wait_for_stores(self) -> None:
        """Let every thread see what the others have stored."""
        if not self.interpret:
            plgpu.debug_barrier()

    def load(self, turn: jax.Array, num_groups: jax.Array) -> jax.Array:
        """Logits [_GROUPS_AT_A_TIME, _GROUP] of the listed groups; -inf beyond them."""
        place = turn * _GROUPS_AT_A_TIME + jnp.arange(_GROUPS_AT_A_TIME)
        nowhere = pl.cdiv(self.logits.shape[1], _GROUP)
        group = plgpu.load(self.groups.at[self.row, place], mask=place < num_groups, other=nowhere)
        return _load_groups(self.logits, self.row, group)


def _threshold_kernel(
    logits_ref: Ref,
    temperature_ref: Ref,
    top_k_ref: Ref,
    top_p_ref: Ref,
    min_p_ref: Ref,
    maxima_ref: Ref,
    sums_ref: Ref,
    thresholds_ref: Ref,
    groups_ref: Ref,
    gathered_ref: Ref,
    *,
    interpret: bool,
) -> None:
    """The threshold of one row, from its logits and the maxima and sums of its groups."""
    index = pl.program_id(0)
    num_groups = maxima_ref.shape[1]
    group = jnp.arange(pl.next_power_of_2(num_groups))
    exists = group < num_groups
    maxima = plgpu.load(maxima_ref.at[index, group], mask=exists, other=-jnp.inf)
    sums = plgpu.load(sums_ref.at[index, group], mask=exists, other=0.0)
    temperature, top_k, top_p = temperature_ref[index], top_k_ref[index], top_p_ref[index]
    peak = jnp.maximum(maxima.max(), _LOWEST)
    refs = (logits_ref, groups_ref, gathered_ref)
    row = _Row(index, 1 / temperature, peak, maxima, *refs, interpret)

    low = min_p_key(peak, temperature, min_p_ref[index])
    low = lax.cond(
        top_k < logits_ref.shape[1],
        lambda: _search(row, low, None, top_k.astype(jnp.float32)),
        lambda: low,
    )

    def nucleus() -> jax.Array:
        total = lax.cond(
            number_of(low) > -jnp.inf,
            lambda: _mass(row, number_of(low)),
            lambda: (sums * row.weigh(maxima)).sum(),
        )
        return _search(row, low, row.weigh, top_p * total)

    low = lax.cond(top_p < 1, nucleus, lambda: low)
    thresholds_ref[index] = number_of(low)


def _mass(row: _Row, low: jax.Array) -> jax.Array:
    """Sum of the weights of a row's logits from `low` on."""
    num_groups = row.list_groups(low)

    def add(turn: jax.Array, total: jax.Array) -> jax.Array:
        x = row.load(turn, num_groups)
        return total + jnp.where(x >= low, row.weigh(x), 0.0)

    start = jnp.zeros((_GROUPS_AT_A_TIME, _GROUP), jnp.float32)
    return lax.fori_loop(0, pl.cdiv(num_groups, _GROUPS_AT_A_TIME), add, start).sum()


def _search(row: _Row, low: jax.Array, weigh: _Weigh, wanted: jax.Array) -> jax.Array:
    """The key of the highest threshold from `low` on above which `wanted` is still found.

    `low` itself where there is none.
    """
    high, none = key_of(row.peak) + 1, jnp.int32(0)
    many = jnp.int32(2 * row.logits.shape[1])  # too large, also where there is a single token
    bracket = _Bracket(low, high, many, none, jnp.float32(0))
    # One element of each group stands for it: what they reach together, all logits reach too.
    bracket = _narrow(bracket, partial(_tally, row.maxima, weigh=weigh), wanted)

    num_groups = row.list_groups(number_of(bracket.low))
    bracket = _Bracket(bracket.low, high, num_groups * _GROUP, none, jnp.float32(0))
    tally = partial(_tally_listed, row, num_groups, weigh=weigh)
    bracket = _narrow(bracket, tally, wanted, few=_AT_A_TIME)

    between = _gather(row, num_groups, bracket)
    bracket = bracket._replace(num_low=bracket.num_low - bracket.num_high, num_high=none)
    tally = partial(_tally, between, weigh=weigh)
    return _narrow(bracket, tally, wanted, above=bracket.above).low


def _narrow(
    bracket: _Bracket,
    tally: Callable[[list[jax.Array]], _Tally],
    wanted: jax.Array,
    *,
    few: int = 1,
    above: jax.Array | float = 0.0,
) -> _Bracket:
    """Halve the bracket until the threshold is found, or at most `few` numbers lie between.

    The highest threshold is looked for at which `above` and the tally reach `wanted`.
    """

    def wide(bracket: _Bracket) -> jax.Array:
        return ~bracket.found & (bracket.num_low - bracket.num_high > few)

    def halve_twice(bracket: _Bracket) -> _Bracket:
        low, high = bracket.low, bracket.high
        step = jnp.maximum((high >> 2) - (low >> 2), 1)
        keys = [jnp.minimum(low + step * i, high) for i in range(1, _TRIED + 1)]
        sums = tally([number_of(key) for key in keys])
        counts, weights = sums[:_TRIED], sums[_TRIED:] or [x.astype(jnp.float32) for x in sums]
        sides = [
            (above + weight >= wanted, key, count, above + weight)
            for key, count, weight in zip(keys, counts, weights, strict=True)
        ]
        for holds, key, count, _ in sides:
            bracket = bracket.raised(holds, key, count)
        for holds, key, count, weight in reversed(sides):
            bracket = bracket.lowered(~holds, key, count, weight)
        return bracket

    return lax.while_loop(wide, halve_twice, bracket)


def _reaching(x: jax.Array, thresholds: list[jax.Array], weigh: _Weigh) -> list[jax.Array]:
    """For each threshold, 1 where `x` reaches it, else 0; then the same with weights."""
    reaches = [x >= threshold for threshold in thresholds]
    counts = [reach.astype(jnp.int32) for reach in reaches]
    if weigh is None:
        return counts
    weights = weigh(x)
    return counts + [jnp.where(reach, weights, 0.0) for reach in reaches]


def _tally(x: jax.Array, thresholds: list[jax.Array], *, weigh: _Weigh) -> _Tally:
    """What of `x` reaches each threshold."""
    return [each.sum() for each in _reaching(x, thresholds, weigh)]


def _tally_listed(
    row: _Row, num_groups: jax.Array, thresholds: list[jax.Array], *, weigh: _Weigh
) -> _Tally:
    """What of a row's listed groups reaches each threshold."""

    def add(turn: jax.Array, sums: list[jax.Array]) -> list[jax.Array]:
        x = row.load(turn, num_groups)
        return [a + b for a, b in zip(sums, _reaching(x, thresholds, weigh), strict=True)]

    nothing = jnp.full((_GROUPS_AT_A_TIME, _GROUP), -jnp.inf)
    start = [jnp.zeros_like(each) for each in _reaching(nothing, thresholds, weigh)]
    turns = pl.cdiv(num_groups, _GROUPS_AT_A_TIME)
    return [each.sum() for each in lax.fori_loop(0, turns, add, start)]


def _gather(row: _Row, num_groups: jax.Array, bracket: _Bracket) -> jax.Array:
    """The logits of a row's listed groups between the bounds, [_AT_A_TIME] padded by -inf.

    Where there are more (all of them equal, then), some of them.
    """
    low, high = number_of(bracket.low), number_of(bracket.high)
    room = jnp.arange(_AT_A_TIME)

    def add(turn: jax.Array, found: jax.Array) -> jax.Array:
        x = row.load(turn, num_groups).reshape(_AT_A_TIME)
        between = (x >= low) & ~(x >= high)
        _store_dense(row.gathered, row.row, found, x, between)
        return found + between.astype(jnp.int32).sum()

    turns = pl.cdiv(num_groups, _GROUPS_AT_A_TIME)
    found = lax.fori_loop(0, turns, add, jnp.int32(0))
    row.wait_for_stores()
    return plgpu.load(row.gathered.at[row.row, room], mask=room < found, other=-jnp.inf)
