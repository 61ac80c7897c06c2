"""Choosing the next tokens on the device: pure functions over logits and per-slot state.

Programs of growing cost, one of which a step needs: `GREEDY` takes the maximum, `RANDOM` adds
temperature, `FILTERED` adds the top-k, top-p and min-p filters, `ADJUSTED` adds token rules and
penalties, `LOGPROBS` also reports log-probabilities. They are separate programs because a condition
inside one would make the host wait for the device.

Noise is a function of (seed of the sequence, index of the output token): the same seed gives the
same tokens whatever else is in the batch, before and after a preemption.

Axis letters: R rows, S slots, V vocabulary, K token rules a slot can hold.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from paged.models.mesh import highest, own_part
from paged.runtime.config import MAX_LOGPROBS
from paged.truncation import truncation_thresholds

EVERY_TOKEN = -1
"""A word of a token mask with all its bits set."""

NO_TOKEN = -1
"""In place of a token that cannot be chosen."""

_BITS = 32
_NEVER = jnp.finfo(jnp.float32).min
# What rules leave at least of the tokens that a grammar allows, so that they stay above all others
# even where rules forbid every one of them; at any temperature it is neither -inf nor likely.
_LAST_RESORT = -1e30
# Neighbours in the vocabulary that are looked at together: about the root of its size divided by
# MAX_LOGPROBS, so that as many maxima of groups are sorted as tokens of the groups that are kept.
_GROUP = 64


class SamplingMode(IntEnum):
    """What a step's sampling must be able to do; each mode includes those before it."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    ADJUSTED = 3
    LOGPROBS = 4


@struct.dataclass
class SamplingRows:
    """How each row of a step wants its token.

    Attributes:
        slots: [R] int32.
        samples: [R] bool; rows without keep their last token.
        seed: [R, 2] uint32.
        output_index: [R] int32, how many output tokens the sequence has before this one.
        top_k: [R] int32; V or more is off.
        temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty:
            [R] float32; temperature 0 is greedy.
    """

    slots: jax.Array
    samples: jax.Array
    seed: jax.Array
    output_index: jax.Array
    top_k: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array


@struct.dataclass
class SamplerState:
    """Per-slot memory of sequences with penalties, token rules or a grammar.

    Others leave it untouched.

    Attributes:
        output_counts: [S, V] int16 occurrences of each token in the output.
        in_prompt: [S, V] bool.
        rule_token: [S, K] int32 token a rule is about; V or more is no rule.
        rule_bias: [S, K] float32 added to its logit; with inf among them, only tokens that have
            it can be chosen.
        rule_until: [S, K] int32, number of output tokens up to which the rule holds.
        allowed: [S, W] int32, a bit for each token that may come next, 32 to a word.
    """

    output_counts: jax.Array
    in_prompt: jax.Array
    rule_token: jax.Array
    rule_bias: jax.Array
    rule_until: jax.Array
    allowed: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, num_rules: int) -> SamplerState:
        rules = (num_slots, num_rules)
        return cls(
            output_counts=jnp.zeros((num_slots, vocab_size), jnp.int16),
            in_prompt=jnp.zeros((num_slots, vocab_size), jnp.bool_),
            rule_token=jnp.full(rules, vocab_size, jnp.int32),
            rule_bias=jnp.zeros(rules, jnp.float32),
            rule_until=jnp.zeros(rules, jnp.int32),
            allowed=jnp.full((num_slots, num_words(vocab_size)), EVERY_TOKEN, jnp.int32),
        )


@struct.dataclass
class TokenLogprobs:
    """Log-probabilities of given tokens and of the most likely ones, for N positions.

    Attributes:
        logprob: [N] float32; rank: [N] int32, 1 for the most likely.
        top_logprob: [N, MAX_LOGPROBS] float32, best first; top_token: [N, MAX_LOGPROBS] int32.
    """

    logprob: jax.Array
    rank: jax.Array
    top_logprob: jax.Array
    top_token: jax.Array


def num_words(vocab_size: int) -> int:
    """Words of a token mask."""
    return -(-vocab_size // _BITS)


def token_logprobs(logits: jax.Array, tokens: jax.Array) -> TokenLogprobs:
    """Log-probabilities under `logits` [N, V] float32 at `tokens` [N]."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    top, top_token = _most_likely(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return TokenLogprobs(
        logprob=(chosen - total)[:, 0],
        rank=1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32),
        top_logprob=top - total,
        top_token=top_token,
    )


def _most_likely(logits: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The `num` highest logits of each row and their tokens, as `lax.top_k` but in one pass.

    They stand in the `num` groups of neighbours whose maxima are highest, and only these are
    sorted: sorting whole rows takes a hundred times longer, and twice the memory of the logits.
    """
    num_rows, vocab_size = logits.shape
    num_groups = -(-vocab_size // _GROUP)
    if num_groups <= num:
        return lax.top_k(logits, num)
    padding = ((0, 0), (0, num_groups * _GROUP - vocab_size))
    groups = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(num_rows, -1, _GROUP)
    # In the order of the vocabulary, so that of equal logits the first is taken, as in whole rows.
    group = jnp.sort(lax.top_k(groups.max(axis=2), num)[1], axis=1)
    token = (group[:, :, None] * _GROUP + jnp.arange(_GROUP)).reshape(num_rows, -1)
    candidates = jnp.take_along_axis(logits, token, axis=1, mode="fill", fill_value=-jnp.inf)
    top, place = lax.top_k(candidates, num)
    return top, jnp.take_along_axis(token, place, axis=1)


def choose_tokens(
    logits: jax.Array,
    rows: SamplingRows,
    state: SamplerState | None,
    mode: SamplingMode,
    vocab_size: int | None = None,
) -> jax.Array:
    """The next token of each row: [R] int32 from logits [R, V] float32.

    `state` is needed from ADJUSTED on, and makes FILTERED do the same.

    Args:
        vocab_size: V, of which up to RANDOM the logits may be this device's share alone (see
            `paged.models.mesh`); None for all.
    """
    share = logits.shape[1]
    vocab_size = vocab_size or share
    if mode == SamplingMode.GREEDY:
        return highest(logits, vocab_size)
    if state is not None:
        logits = _penalise(_apply_rules(logits, rows, state), rows, state)
        logits = _restrict(logits, state.allowed[rows.slots])
    greedy = rows.temperature == 0
    temperature = jnp.where(greedy, 1.0, rows.temperature)
    scores = logits / temperature[:, None]
    noise = own_part(_gumbel(rows, vocab_size), share, axis=1)
    scores += jnp.where(greedy[:, None], 0.0, noise)
    if mode >= SamplingMode.FILTERED:
        scores = jnp.where(_kept(logits, rows, temperature), scores, _NEVER)
    return highest(scores, vocab_size)


def checked_tokens(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Tokens [R] chosen by logits [R, V], `NO_TOKEN` where NaN or infinity has chosen.

    Where a row holds NaN, so does its chosen place: the maximum of numbers and NaN is NaN.
    """
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return jnp.where(jnp.isnan(chosen) | (chosen == jnp.inf), NO_TOKEN, tokens)


def count_tokens(state: SamplerState, rows: SamplingRows, tokens: jax.Array) -> SamplerState:
    """Count each sampling row's new token [R] in its slot, up to what an int16 holds."""
    num_slots, highest = state.output_counts.shape[0], jnp.iinfo(jnp.int16).max
    counts = rows.samples & (state.output_counts[rows.slots, tokens] < highest)
    slots = jnp.where(counts, rows.slots, num_slots)
    return replace(state, output_counts=state.output_counts.at[slots, tokens].add(1, mode="drop"))


def load_history(
    state: SamplerState, slot: jax.Array, tokens: jax.Array, num_prompt: jax.Array, fresh: jax.Array
) -> SamplerState:
    """Enter the known tokens of a sequence that was given `slot`.

    Args:
        tokens: [C] int32, padded with V or more; the first `num_prompt` belong to the prompt.
        fresh: [] bool; forget what the slot held before (the first call for a sequence).
    """
    index = jnp.arange(tokens.shape[0])
    nowhere = state.output_counts.shape[1]
    prompt = jnp.where(index < num_prompt, tokens, nowhere)
    output = jnp.where(index < num_prompt, nowhere, tokens)
    counts = jnp.where(fresh, 0, state.output_counts[slot]).at[output].add(1, mode="drop")
    in_prompt = (state.in_prompt[slot] & ~fresh).at[prompt].set(True, mode="drop")
    return replace(
        state,
        output_counts=state.output_counts.at[slot].set(counts),
        in_prompt=state.in_prompt.at[slot].set(in_prompt),
    )


def load_rules(
    state: SamplerState, slot: jax.Array, token: jax.Array, bias: jax.Array, until: jax.Array
) -> SamplerState:
    """Set the token rules of a slot: token, bias and until are [K] (see `SamplerState`)."""
    return replace(
        state,
        rule_token=state.rule_token.at[slot].set(token),
        rule_bias=state.rule_bias.at[slot].set(bias),
        rule_until=state.rule_until.at[slot].set(until),
    )


def load_masks(state: SamplerState, slots: jax.Array, masks: jax.Array) -> SamplerState:
    """Set what may come next: masks [C, W] (see `SamplerState`) of slots [C], beyond S for none."""
    return replace(state, allowed=state.allowed.at[slots].set(masks, mode="drop"))


def _restrict(logits: jax.Array, allowed: jax.Array) -> jax.Array:
    """Logits [R, V] where the masks [R, W] say so; a row without a mask is left as it is."""
    num_rows, vocab_size = logits.shape
    bits = (allowed[:, :, None] >> jnp.arange(_BITS)) & 1
    bits = bits.reshape(num_rows, -1)[:, :vocab_size]
    has_mask = jnp.any(allowed != EVERY_TOKEN, axis=1, keepdims=True)
    lowest = jnp.where(has_mask, _LAST_RESORT, -jnp.inf)
    return jnp.where(bits != 0, jnp.maximum(logits, lowest), -jnp.inf)


def _apply_rules(logits: jax.Array, rows: SamplingRows, state: SamplerState) -> jax.Array:
    holds = rows.output_index[:, None] < state.rule_until[rows.slots]
    bias = jnp.where(holds, state.rule_bias[rows.slots], 0.0)
    place = (jnp.arange(logits.shape[0])[:, None], state.rule_token[rows.slots])
    allows = bias == jnp.inf
    allowed = jnp.zeros(logits.shape, jnp.bool_).at[place].max(allows, mode="drop")
    logits = jnp.where(allowed | ~allows.any(axis=1, keepdims=True), logits, -jnp.inf)
    return logits.at[place].add(jnp.where(allows, 0.0, bias), mode="drop")


def _penalise(logits: jax.Array, rows: SamplingRows, state: SamplerState) -> jax.Array:
    """Repetition penalty (Keskar et al. 2019) over prompt and output; OpenAI's two over output."""
    counts = state.output_counts[rows.slots]
    in_output = counts > 0
    repetition = rows.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(in_output | state.in_prompt[rows.slots], scaled, logits)
    logits -= rows.frequency_penalty[:, None] * counts
    return logits - rows.presence_penalty[:, None] * in_output


def _kept(logits: jax.Array, rows: SamplingRows, temperature: jax.Array) -> jax.Array:
    """[R, V] bool, what the filters of each row leave; all of a greedy row, which needs none."""
    greedy = rows.temperature == 0
    thresholds = truncation_thresholds(
        logits,
        temperature,
        jnp.where(greedy, logits.shape[1], rows.top_k),
        jnp.where(greedy, 1.0, rows.top_p),
        jnp.where(greedy, 0.0, rows.min_p),
    )
    return logits >= thresholds[:, None]


def _gumbel(rows: SamplingRows, vocab_size: int) -> jax.Array:
    """[R, V] Gumbel noise: adding it to logits and taking the maximum samples their softmax."""

    def row(seed: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), index)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    return jax.vmap(row)(rows.seed, rows.output_index)
