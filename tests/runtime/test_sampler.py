"""Token choice against plain numpy, and the promise that a row never depends on its neighbours."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.runtime.sampler import (
    SamplerState,
    SamplingMode,
    SamplingRows,
    _kept,
    _restrict,
    choose_tokens,
    count_tokens,
    load_history,
    load_masks,
    load_rules,
    num_words,
    token_logprobs,
)

VOCAB = 97


def make_rows(num_rows: int, **fields: object) -> SamplingRows:
    """Neutral rows, with the given fields for all or each of them."""
    neutral: dict[str, object] = {
        "slots": np.arange(num_rows),
        "samples": True,
        "seed": np.stack([np.zeros(num_rows), np.arange(num_rows)], axis=1),
        "output_index": 0,
        "top_k": VOCAB,
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    dtypes = {"slots": "i4", "samples": "?", "seed": "u4", "output_index": "i4", "top_k": "i4"}
    arrays = {}
    for name, default in neutral.items():
        value = np.asarray(fields.get(name, default)).astype(dtypes.get(name, "f4"))
        shape = (num_rows, 2) if name == "seed" else (num_rows,)
        arrays[name] = jnp.asarray(np.broadcast_to(value, shape))
    return SamplingRows(**arrays)


def make_logits(num_rows: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)), jnp.float32)


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    """The filters' definition, by sorting one row."""
    probs = np.exp(logits - logits.max()).astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    kept = [i for i in order[:top_k] if probs[i] >= min_p * probs.max()]
    mass, chosen = 0.0, set()
    for i in kept:
        chosen.add(int(i))
        mass += probs[i]
        if mass >= top_p * probs[kept].sum():
            break
    return chosen


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(1, 1, 0), (5, 1, 0), (VOCAB, 0.9, 0), (20, 0.5, 0), (VOCAB, 1, 0.1), (30, 0.8, 0.05)],
)
def test_filters_keep_what_sorting_keeps(top_k: int, top_p: float, min_p: float) -> None:
    logits = make_logits(8)
    rows = make_rows(8, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = np.asarray(_kept(logits, rows, rows.temperature))
    for before, after in zip(np.asarray(logits), kept, strict=True):
        expected = kept_by_sorting(before, top_k, top_p, min_p)
        assert set(np.flatnonzero(after).tolist()) == expected


def test_rows_with_different_filters_share_a_step() -> None:
    logits = make_logits(4)
    rows = make_rows(
        4, top_k=[1, VOCAB, 7, 2], top_p=[1.0, 0.3, 1.0, 0.1], temperature=[1, 1, 1, 0]
    )
    kept = np.asarray(_kept(logits, rows, jnp.ones(4)))
    expected = [kept_by_sorting(np.asarray(logits[i]), *f, 0) for i, f in
                enumerate([(1, 1.0), (VOCAB, 0.3), (7, 1.0), (VOCAB, 1.0)])]  # fmt: skip
    assert [set(np.flatnonzero(row).tolist()) for row in kept] == expected


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(VOCAB, 1.0, 0.0), (12, 1.0, 0.0), (40, 0.8, 0.01)]
)
def test_samples_follow_what_the_filters_leave(top_k: int, top_p: float, min_p: float) -> None:
    """Pearson's chi-square over the kept tokens, and none of the others, ever."""
    [logits] = np.asarray(make_logits(1, seed=3)) / 2
    num = 20_000
    rows = make_rows(
        num,
        seed=[[5, 6]],
        output_index=np.arange(num),
        temperature=0.8,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    tokens = jax.jit(choose_tokens, static_argnames="mode")(
        jnp.broadcast_to(logits, (num, VOCAB)), rows, None, mode=SamplingMode.FILTERED
    )
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)
    kept = sorted(kept_by_sorting(logits / 0.8, top_k, top_p, min_p))
    assert counts[kept].sum() == num
    expected = num * np.asarray(jax.nn.softmax(jnp.asarray(logits)[np.asarray(kept)] / 0.8))
    freedom = len(kept) - 1
    distance = ((counts[kept] - expected) ** 2 / expected).sum()
    assert abs(distance - freedom) < 5 * (2 * freedom) ** 0.5


def test_top_p_of_almost_nothing_keeps_the_most_likely() -> None:
    logits = make_logits(4)
    tokens = choose_tokens(logits, make_rows(4, top_p=1e-6), None, SamplingMode.FILTERED)
    assert tokens.tolist() == jnp.argmax(logits, -1).tolist()


@pytest.mark.parametrize("mode", list(SamplingMode))
def test_temperature_zero_is_greedy_in_every_mode(mode: SamplingMode) -> None:
    logits = make_logits(4)
    state = SamplerState.zeros(4, VOCAB, 2)
    rows = make_rows(4, temperature=0, top_k=3, top_p=0.5)
    assert choose_tokens(logits, rows, state, mode).tolist() == jnp.argmax(logits, -1).tolist()


def test_samples_follow_the_distribution() -> None:
    logits = jnp.asarray([[0.0, 1.0, 2.0, -1.0] + [-30.0] * (VOCAB - 4)])
    num = 4000
    rows = make_rows(num, temperature=0.7, seed=[[1, 2]], output_index=np.arange(num))
    tokens = choose_tokens(jnp.broadcast_to(logits, (num, VOCAB)), rows, None, SamplingMode.RANDOM)
    counts = np.bincount(np.asarray(tokens), minlength=VOCAB)[:4] / num
    expected = np.asarray(jax.nn.softmax(logits[0, :4] / 0.7))
    np.testing.assert_allclose(counts, expected, atol=0.03)


@pytest.mark.parametrize(
    "mode", [SamplingMode.RANDOM, SamplingMode.FILTERED, SamplingMode.ADJUSTED]
)
def test_same_seed_same_token_whatever_the_batch(mode: SamplingMode) -> None:
    one = make_logits(1)
    state = SamplerState.zeros(8, VOCAB, 2) if mode >= SamplingMode.ADJUSTED else None
    filters: dict[str, object] = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}
    alone = choose_tokens(one, make_rows(1, seed=[[9, 8]], output_index=3, **filters), state, mode)
    crowd = jnp.concatenate([make_logits(5, seed=1), one])
    seeds = [[i, i] for i in range(5)] + [[9, 8]]
    places: dict[str, object] = {"output_index": [0, 0, 0, 0, 0, 3], "slots": [5, 4, 3, 2, 1, 0]}
    rows = make_rows(6, seed=seeds, **places, **filters)
    together = choose_tokens(crowd, rows, state, mode)
    assert together[5] == alone[0]


def test_penalties_follow_their_formulas() -> None:
    state = SamplerState.zeros(2, VOCAB, 2)
    history = np.full(16, VOCAB)
    history[:6] = [3, 4, 4, 7, 7, 9]  # prompt: 3 4 4; output: 7 7 9
    state = load_history(state, jnp.int32(1), jnp.asarray(history), jnp.int32(3), jnp.bool_(True))
    logits = np.asarray(make_logits(1))[0]
    expected = logits.copy()
    for token in (3, 4, 7, 9):
        expected[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
    expected[7] -= 2 * 0.25 + 0.5
    expected[9] -= 1 * 0.25 + 0.5
    rows = make_rows(
        1,
        slots=[1],
        temperature=0,
        repetition_penalty=1.5,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    got = choose_tokens(jnp.asarray(logits)[None], rows, state, SamplingMode.ADJUSTED)
    assert int(got[0]) == int(expected.argmax())
    from paged.runtime.sampler import _penalise

    np.testing.assert_allclose(
        np.asarray(_penalise(jnp.asarray(logits)[None], rows, state))[0], expected, rtol=1e-5
    )


def test_sampled_tokens_are_counted_only_where_a_row_samples() -> None:
    state = SamplerState.zeros(3, VOCAB, 2)
    rows = make_rows(2, slots=[2, 0], samples=[True, False])
    state = count_tokens(state, rows, jnp.asarray([5, 6]))
    counts = np.asarray(state.output_counts)
    assert counts[2, 5] == 1
    assert counts.sum() == 1


def test_a_fresh_history_forgets_the_slots_last_sequence() -> None:
    state = SamplerState.zeros(1, VOCAB, 2)
    first = jnp.asarray([1, 2, 3, VOCAB])
    state = load_history(state, jnp.int32(0), first, jnp.int32(2), jnp.bool_(True))
    state = load_history(
        state, jnp.int32(0), jnp.asarray([4, VOCAB, VOCAB, VOCAB]), jnp.int32(1), jnp.bool_(True)
    )
    assert np.flatnonzero(np.asarray(state.in_prompt[0])).tolist() == [4]
    assert int(state.output_counts.sum()) == 0


def test_rules_hold_until_their_output_index() -> None:
    logits = jnp.zeros((2, VOCAB)).at[:, 10].set(5.0).at[:, 11].set(4.0)
    state = SamplerState.zeros(2, VOCAB, 3)
    for slot in (0, 1):
        state = load_rules(
            state,
            jnp.int32(slot),
            jnp.asarray([10, 12, VOCAB]),
            jnp.asarray([-jnp.inf, 4.5, 0.0]),
            jnp.asarray([3, 2**30, 0]),
        )
    rows = make_rows(2, temperature=0, output_index=[2, 3])
    assert choose_tokens(logits, rows, state, SamplingMode.ADJUSTED).tolist() == [12, 10]


def test_where_tokens_are_allowed_all_others_are_not() -> None:
    logits = jnp.zeros((3, VOCAB)).at[:, 10].set(5.0).at[:, 11].set(4.0).at[:, 12].set(-80.0)
    state = SamplerState.zeros(3, VOCAB, 4)
    rules = [[(11, jnp.inf), (12, jnp.inf)], [(11, jnp.inf), (12, jnp.inf), (12, 90.0)], [(9, 7.0)]]
    for slot, given in enumerate(rules):
        given = given + [(VOCAB, 0.0)] * (4 - len(given))
        token, bias = (jnp.asarray(each) for each in zip(*given, strict=True))
        until = jnp.full(4, 2**30)
        state = load_rules(state, jnp.int32(slot), token, bias.astype(jnp.float32), until)
    greedy = choose_tokens(logits, make_rows(3, temperature=0), state, SamplingMode.ADJUSTED)
    assert greedy.tolist() == [11, 12, 9]
    hot = {choose_tokens(logits, make_rows(3, temperature=50.0, seed=[[7, i]] * 3), state,
                         SamplingMode.ADJUSTED).tolist()[0] for i in range(40)}  # fmt: skip
    assert hot == {11, 12}


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = make_logits(3)
    tokens = jnp.asarray([0, 50, 96])
    got = token_logprobs(logits, tokens)
    expected = np.asarray(jax.nn.log_softmax(logits))
    for i, token in enumerate([0, 50, 96]):
        assert float(got.logprob[i]) == pytest.approx(expected[i, token], abs=1e-5)
        assert int(got.rank[i]) == 1 + int((expected[i] > expected[i, token]).sum())
        order = np.argsort(-expected[i])[:20]
        assert got.top_token[i].tolist() == order.tolist()
        np.testing.assert_allclose(got.top_logprob[i], expected[i, order], atol=1e-5)


@pytest.mark.parametrize("vocab_size", [19, 1000, 5003])
def test_the_most_likely_are_those_of_sorting_whole_rows(vocab_size: int) -> None:
    """Also where many are equal, of which the first in the vocabulary come first."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(np.round(rng.normal(0, 2, (6, vocab_size)), 1), jnp.float32)
    logits = logits.at[5].set(-jnp.inf).at[5, vocab_size // 2].set(0.0)
    got = token_logprobs(logits, jnp.zeros(6, jnp.int32))
    top, token = jax.lax.top_k(logits, min(20, vocab_size))
    assert got.top_token.tolist() == token.tolist()
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    np.testing.assert_array_equal(got.top_logprob, top - total)


def test_counts_stay_at_their_highest() -> None:
    state = SamplerState.zeros(1, VOCAB, 2)
    highest = np.iinfo(np.int16).max
    state = replace(state, output_counts=state.output_counts.at[0, 5].set(highest - 1))
    for _ in range(3):
        state = count_tokens(state, make_rows(1), jnp.asarray([5]))
    assert int(state.output_counts[0, 5]) == highest


def packed(allowed: np.ndarray) -> np.ndarray:
    """[N, V] bool as the words of token masks."""
    words = np.zeros((len(allowed), num_words(allowed.shape[1])), np.uint32)
    for row, token in np.argwhere(allowed):
        words[row, token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words.view(np.int32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 97, 128, 1001])
def test_masks_leave_what_their_bits_say(vocab_size: int) -> None:
    random = np.random.default_rng(vocab_size)
    allowed = random.random((4, vocab_size)) < 0.3
    allowed[np.arange(4), random.integers(0, vocab_size, 4)] = True
    logits = random.normal(0, 3, (4, vocab_size)).astype(np.float32)
    state = SamplerState.zeros(6, vocab_size, 1)
    slots = np.asarray([5, 0, 3, 2])
    # Places beyond the slots are padding.
    masks = np.concatenate([packed(allowed), np.zeros((1, num_words(vocab_size)), np.int32)])
    state = load_masks(state, jnp.asarray([*slots, 6]), jnp.asarray(masks))
    got = np.asarray(_restrict(jnp.asarray(logits), state.allowed[slots]))
    np.testing.assert_array_equal(got, np.where(allowed, logits, -np.inf))
    logits[:, ::2] = -np.inf  # as rules leave them
    untouched = np.asarray(_restrict(jnp.asarray(logits), state.allowed[np.asarray([1, 4, 1, 4])]))
    np.testing.assert_array_equal(untouched, logits)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.01},
        {"temperature": 1e6},
        {"top_k": 1},
        {"top_p": 0.1, "min_p": 0.9},
        {"repetition_penalty": 1e6, "presence_penalty": -2.0},
    ],
)
@pytest.mark.parametrize("banned", [[], [40], [40, 90]])
def test_a_grammar_goes_before_all_else(fields: dict[str, object], banned: list[int]) -> None:
    allowed = np.zeros((1, VOCAB), bool)
    allowed[0, [40, 90]] = True
    rules = np.full(2, VOCAB)
    rules[: len(banned)] = banned
    state = SamplerState.zeros(1, VOCAB, 2)
    bias, until = jnp.full(2, -jnp.inf), jnp.full(2, 100)
    state = load_rules(state, jnp.int32(0), jnp.asarray(rules), bias, until)
    state = load_masks(state, jnp.asarray([0]), jnp.asarray(packed(allowed)))
    expected = {40, 90} - set(banned) or {40, 90}
    rows = make_rows(20, slots=0, **fields)
    tokens = choose_tokens(make_logits(20), rows, state, SamplingMode.ADJUSTED)
    assert set(np.asarray(tokens).tolist()) <= expected
