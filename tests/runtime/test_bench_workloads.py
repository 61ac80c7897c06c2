"""Workloads are the same to the last token, for ever: other engines were measured on them."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paged.runtime.bench.baselines import BASELINES
from paged.runtime.bench.datasets import sharegpt_requests
from paged.runtime.bench.options import GENERATED, WorkloadOptions
from paged.runtime.bench.selection import select_requests
from paged.runtime.bench.workload_file import read_workload
from paged.runtime.bench.workloads import (
    BenchRequest,
    IdRange,
    baseline_requests,
    lognormal_requests,
    prefix_repetition_requests,
    random_requests,
)
from paged.runtime.errors import ConfigError

# Number of requests, and a hash over every id and length, of the sets measured first.
MEASURED = {
    "B1": (1024, "66dfae76147b2aa5"),
    "B2": (512, "803ced597c066eca"),
    "B3": (64, "dc4d7f64cdbe8cfb"),
    "B4": (1000, "29cb76a5ed58d87e"),
    "C1": (1, "5380f59014d6cfea"),
    "C": (8, "8a141ba0cfc2bf76"),
    "D": (256, "a5684d0952510b44"),
    "D-unique": (256, "8f1e60a28d94a703"),
    "E": (40, "4196904e0931b7a9"),
}


def digest(requests: list[BenchRequest]) -> str:
    lines = (f"{','.join(map(str, each.prompt))}|{each.num_output_tokens}\n" for each in requests)
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def prompts(requests: list[BenchRequest]) -> list[list[int]]:
    return [each.prompt for each in requests if isinstance(each.prompt, list)]


def test_every_baseline_is_guarded() -> None:
    assert set(MEASURED) == set(BASELINES)


@pytest.mark.parametrize("name", MEASURED)
def test_baselines_are_those_that_were_measured(name: str) -> None:
    size, expected = MEASURED[name]
    wanted = size if BASELINES[name].num_requests is None else None
    requests = baseline_requests(name, wanted, seed=None, ids=IdRange())
    assert (len(requests), digest(requests)) == (size, expected)
    assert all(each.num_input_tokens == len(each.prompt) for each in requests)


@pytest.mark.parametrize("name", ["B1", "B4", "D"])
def test_fewer_prompts_are_the_first_ones(name: str) -> None:
    whole = baseline_requests(name, None, seed=None, ids=IdRange())
    assert baseline_requests(name, 5, seed=None, ids=IdRange()) == whole[:5]


def test_another_seed_shares_no_prefix() -> None:
    own, other = (prompts(baseline_requests("D", 1, seed=s, ids=IdRange())) for s in (None, 5))
    assert own[0][0] != other[0][0]


def test_a_baseline_cannot_be_larger_than_it_is() -> None:
    with pytest.raises(ConfigError, match="B3 has 64 requests, --num-prompts asks for 65"):
        baseline_requests("B3", 65, seed=None, ids=IdRange())
    with pytest.raises(ConfigError, match="E has no size of its own"):
        baseline_requests("E", None, seed=None, ids=IdRange())


@pytest.mark.parametrize("vocab_size", [2, 512, 1500, 49152])
def test_ids_stay_below_a_smaller_vocabulary(vocab_size: int) -> None:
    requests = baseline_requests("B1", 20, seed=None, ids=IdRange.below(vocab_size))
    ids = {token for prompt in prompts(requests) for token in prompt}
    assert max(ids) < vocab_size
    assert len(ids) > min(vocab_size // 4, 1000)


def test_ids_keep_their_range_in_a_larger_vocabulary() -> None:
    assert IdRange.below(128_256) == IdRange.below(None) == IdRange(1000, 127_999)


def test_random_lengths_spread_evenly_around_the_given() -> None:
    requests = random_requests(500, 100, 10, seed=1, ids=IdRange(), range_ratio=0.2)
    inputs = [each.num_input_tokens for each in requests]
    outputs = [each.num_output_tokens for each in requests]
    assert (min(inputs), max(inputs)) == (80, 120)
    assert (min(outputs), max(outputs)) == (8, 12)
    assert abs(sum(inputs) / 500 - 100) < 2


def test_a_shared_prefix_comes_on_top_of_the_length() -> None:
    made = prompts(random_requests(4, 10, 1, seed=1, ids=IdRange(), prefix_len=30))
    assert {len(prompt) for prompt in made} == {40}
    assert len({tuple(prompt[:30]) for prompt in made}) == 1
    assert len({tuple(prompt[30:]) for prompt in made}) == 4


def test_lognormal_lengths_are_clipped() -> None:
    requests = lognormal_requests(300, seed=1, ids=IdRange(), min_len=10, max_len=50)
    lengths = {n for each in requests for n in (each.num_input_tokens, each.num_output_tokens)}
    assert (min(lengths), max(lengths)) == (10, 50)


def test_prefixes_repeat_in_turns() -> None:
    made = prompts(
        prefix_repetition_requests(
            12, seed=1, ids=IdRange(), num_prefixes=3, prefix_len=20, suffix_len=5, output_len=2
        )
    )
    heads = [tuple(prompt[:20]) for prompt in made]
    assert sorted(heads.count(head) for head in set(heads)) == [4, 4, 4]
    assert len({tuple(prompt) for prompt in made}) == 12


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"input_len": 0}, "got 0, 5 and 0"),
        ({"prefix_len": -1}, "got 5, 5 and -1"),
        ({"range_ratio": 1.0}, "got 1.0"),
    ],
)
def test_impossible_lengths_are_refused(wrong: dict[str, Any], told: str) -> None:
    lengths = {"input_len": 5, "output_len": 5} | wrong
    with pytest.raises(ConfigError, match=told):
        random_requests(1, **lengths, seed=0, ids=IdRange())


def words(text: str) -> list[int]:
    """Stands in for a tokenizer."""
    return [len(word) for word in text.split()]


def talk(question: str, answer: str) -> dict[str, Any]:
    turns = [("human", question), ("gpt", answer)]
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt_takes_first_questions_of_usual_length(tmp_path: Path, as_lines: bool) -> None:
    talks = [
        talk("one two three four", "a b c d e"),
        talk("too short", "a b c d e"),
        talk("an answer too short", "a"),
        talk("long " * 1025, "a b c d e"),
        {"conversations": [{"from": "human", "value": "nobody answers this question"}]},
    ]
    path = tmp_path / "talks.json"
    path.write_text("\n".join(map(json.dumps, talks)) if as_lines else json.dumps(talks))
    [request] = sharegpt_requests(path, 1, seed=0, encode=words, output_len=None)
    assert request == BenchRequest("one two three four", 4, 5)
    with pytest.raises(ConfigError, match="holds 1 usable prompts, and 2 are needed"):
        sharegpt_requests(path, 2, seed=0, encode=words, output_len=None)
    with pytest.raises(ConfigError, match="give --tokenizer or --output-len"):
        sharegpt_requests(path, 1, seed=0, encode=None, output_len=None)


def test_custom_lines_are_texts_or_ids(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b"}\n\n{"prompt": [7, 8, 9], "output_tokens": 3}\n')
    assert read_workload(path, 2, encode=words, output_len=6) == [
        BenchRequest("a b", 2, 6),
        BenchRequest([7, 8, 9], 3, 6),
    ]
    with pytest.raises(ConfigError, match='request 1 needs "output_tokens"'):
        read_workload(path, 2, encode=words, output_len=None)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"prompt": "a"', "neither a JSON list nor JSON lines"),
        ("[" * 100_000, "neither a JSON list nor JSON lines"),
        ("[{}]", "not a ShareGPT file"),
        ('[{"conversations": 5}]', "not a ShareGPT file"),
        ('[{"conversations": [1, 2]}]', "not a ShareGPT file"),
        ('[{"conversations": [{}, {}]}]', 'a turn has no "value"'),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=told):
        sharegpt_requests(path, 1, seed=0, encode=words, output_len=None)


def select(**options: Any) -> list[BenchRequest]:
    return select_requests(WorkloadOptions(**options), seed=None, vocab_size=None, encode=None)


@pytest.mark.parametrize("name", sorted(set(GENERATED) - {"baseline"}))
def test_flags_select_every_dataset_that_is_generated(name: str) -> None:
    requests = select(dataset_name=name, num_prompts=12)  # of 10 prefixes, where they repeat
    assert len({tuple(each.prompt) for each in requests}) == 12


def test_flags_select_a_baseline() -> None:
    requests = select(dataset_name="baseline", workload="B4")
    assert digest(requests) == MEASURED["B4"][1]
    with pytest.raises(ConfigError, match="needs --workload"):
        select(dataset_name="baseline")


@pytest.mark.parametrize(
    "flags",
    [
        {"dataset_name": "baseline", "workload": "B1", "input_len": 5},
        {"dataset_name": "lognormal", "output_len": 5},
        {"dataset_name": "prefix_tree", "input_len": 5},
        {"dataset_name": "custom", "dataset_path": "a.jsonl", "input_len": 5},
        {"dataset_name": "log", "dataset_path": "a.jsonl", "output_len": 5},
        {"dataset_path": "a.jsonl"},
        {"workload": "B1"},
    ],
)
def test_a_flag_that_says_nothing_of_the_dataset_is_refused(flags: dict[str, Any]) -> None:
    """It would measure something else than was asked for."""
    with pytest.raises(ConfigError, match=r"^--\S+ says nothing of --dataset-name "):
        select(**flags)


def test_lengths_that_no_machine_holds() -> None:
    with pytest.raises(ConfigError, match="at most 16,777,216 tokens, got 99,999,999,999"):
        select(num_prompts=1, input_len=99_999_999_999)
    for sigma in (math.nan, 1e300):
        with pytest.raises(ConfigError, match="sigma from 0 to 10"):
            select(dataset_name="lognormal", lognormal_sigma=sigma)


def test_short_flags_win_over_those_of_random() -> None:
    [request] = select(num_prompts=1, input_len=7, random_input_len=9, random_output_len=3)
    assert (request.num_input_tokens, request.num_output_tokens) == (7, 3)


def test_a_file_dataset_needs_its_file() -> None:
    with pytest.raises(ConfigError, match="custom needs --dataset-path"):
        select(dataset_name="custom")
    with pytest.raises(ConfigError, match="No such file"):
        select(dataset_name="custom", dataset_path="/nowhere.jsonl")
