"""The engine core end to end on a tiny random model: the answer never depends on how it is made."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from msgspec.structs import replace

from paged.models.loading import ModelSource, resolve_model
from paged.runtime import backend, setup
from paged.runtime import core as core_module
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.engine_state import EngineState
from paged.runtime.errors import ConfigError, EngineDead, InvalidRequest
from paged.runtime.guides import Compiled, Grammars
from paged.runtime.messages import Candidates, EngineRequest, SequenceOutput
from paged.runtime.runner import InFlight, StepRunner
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.transfer import asking, serving
from tests.runtime.conftest import compile_few

VOCAB = 199
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 7,
    "initializer_range": 0.5,
}
PAGE_BYTES = 2 * 8 * 2 * 2 * 8 * 4  # layers, tokens, keys and values, heads, head size, float32
FLAGS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "kv_cache_memory_bytes": 2**20,
    "block_size": 8,
}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return resolve_model(folder, load_format="dummy")


@pytest.fixture(scope="module")
def core(source: ModelSource, compile_cache: str) -> Iterator[EngineCore]:
    core = make_core(source, compile_cache)
    yield core
    core.close()


def make_core(source: ModelSource, compile_cache: str, **flags: Any) -> EngineCore:
    config = EngineConfig(**{**FLAGS, "compile_cache_dir": compile_cache, **flags})
    return EngineCore(config, source, progress=False)


def make_request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    params = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **params}
    return EngineRequest(name, prompt, SamplingParams(**params), arrival_time=time.time())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(8, VOCAB, length).tolist()


def drain(core: EngineCore) -> list[SequenceOutput]:
    news: list[SequenceOutput] = []
    while core.has_work:
        news += core.step()
    return news


def tokens_of(news: list[SequenceOutput]) -> dict[tuple[str, int], list[int]]:
    tokens: dict[tuple[str, int], list[int]] = {}
    for item in news:
        tokens.setdefault((item.request_id, item.index), []).extend(item.token_ids)
    return tokens


def run(core: EngineCore, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    for request in requests:
        core.add(request)
    tokens = tokens_of(drain(core))
    assert core.stats().kv_cache_usage == 0
    return tokens


def mixed_load() -> list[EngineRequest]:
    """Prompts of all sizes, shared prefixes, greedy and seeded, penalties, n > 1."""
    shared = prompt_of(40, seed=9)
    return [
        make_request("one", prompt_of(1)),
        make_request("page", prompt_of(8)),
        make_request("page+1", prompt_of(9)),
        make_request("long", prompt_of(130), max_tokens=30),
        make_request("shared a", [*shared, 11]),
        make_request("shared b", [*shared, 12], temperature=0.8, seed=5),
        make_request("seeded", prompt_of(20), temperature=1.2, top_k=20, top_p=0.9, seed=3),
        make_request("penalised", prompt_of(30), repetition_penalty=1.3, frequency_penalty=0.5),
        make_request("forked", prompt_of(21), temperature=1.0, seed=1, n=3, max_tokens=20),
        make_request("min_p", prompt_of(17), temperature=1.0, min_p=0.1, seed=8, max_tokens=25),
    ]


@pytest.fixture(scope="module")
def one_by_one(core: EngineCore) -> dict[tuple[str, int], list[int]]:
    """Each request alone in the engine."""
    answers: dict[tuple[str, int], list[int]] = {}
    for request in mixed_load():
        answers |= run(core, request)
    return answers


ENGINES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "large pages": {"block_size": 32},
    "small chunks": {"max_num_batched_tokens": 16},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 256},
    "one at a time": {"max_num_seqs": 1},
    "no prefix cache": {"enable_prefix_caching": False},
    "few pages": {"kv_cache_memory_bytes": 28 * PAGE_BYTES, "max_model_len": 200},
    "kernels": {},
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_answer_does_not_depend_on_the_engine(
    name: str,
    one_by_one: dict[tuple[str, int], list[int]],
    source: ModelSource,
    compile_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if name == "kernels":  # which are interpreted on a CPU, and no flag offers that
        monkeypatch.setattr(backend, "default_backend", lambda device: "triton")
    if name != "as it is":  # which finds the programs of the module's own engine
        compile_few(monkeypatch)
    core = make_core(source, compile_cache, **ENGINES[name])
    assert run(core, *mixed_load()) == one_by_one
    again = run(core, *mixed_load())
    assert again == one_by_one, "a warm prefix cache changed an answer"
    stats = core.stats()
    assert stats.compiles_after_warmup == 0
    if name == "few pages":
        assert stats.num_preemptions > 0, "this engine should have run out of pages"
    core.close()


def test_the_scheduler_knows_the_shapes_of_steps(core: EngineCore) -> None:
    assert core._scheduler.config.step_sizes == core._runner.shapes.buckets.mixed


def test_a_second_run_hits_the_prefix_cache_exactly(core: EngineCore) -> None:
    core.reset_prefix_cache()
    before = core.stats().prefix_cache_hits
    run(core, make_request("a", prompt_of(50, seed=3)))
    run(core, make_request("b", prompt_of(50, seed=3)))
    assert core.stats().prefix_cache_hits - before == 48  # six full pages of eight


def test_forks_share_the_prompts_pages(core: EngineCore) -> None:
    core.reset_prefix_cache()
    core.add(make_request("n", prompt_of(44), n=4, temperature=1.0, seed=0, max_tokens=4))
    used = 0
    while core.has_work:
        core.step()
        stats = core.stats()
        used = max(used, stats.num_pages - stats.num_free_pages - stats.num_cached_pages)
    assert used == 5 + 4 * 1  # five full pages shared, one of their own for each


def test_a_close_look(core: EngineCore) -> None:
    core.reset_prefix_cache()
    seen: list[EngineState] = []
    core.add(make_request("first", prompt_of(44), n=2, temperature=1.0, seed=0, max_tokens=4))
    core.add(make_request("second", prompt_of(9), max_tokens=5))
    core.look(seen.append)
    core.step()
    core.step()
    core.look(seen.append)
    drain(core)
    core.look(seen.append)
    before, during, after = seen
    assert [each.status for each in before.sequences] == ["waiting"] * 3
    assert {*before.pages} == {0}
    assert (during.sequences[0].request_id, during.sequences[0].index) == ("first", 0)
    assert {each.status for each in during.sequences} == {"running"}
    first = during.sequences[0]
    assert (first.prompt_tokens, first.max_tokens, first.num_preemptions) == (44, 4, 0)
    assert first.num_pages == 6
    first_table, twin_table = (each.page_tables[0] for each in during.sequences[:2])
    assert first_table[:5] == twin_table[:5], "the prompt's pages, all full, are shared"
    assert first_table[5] != twin_table[5]
    assert {during.pages[page - 1] for page in first_table} == {2, 3}
    assert {*during.pages} >= {0, 2, 3}, "free, used and shared by the two of the first"
    assert len(during.in_flight) == 1
    stacks = [call for thread in during.process.threads for call in thread.stack]
    assert any(call.endswith(" test_a_close_look") for call in stacks)
    assert after.sequences == []
    assert after.in_flight == []
    assert {*after.pages} == {0, 1}


def test_what_steps_say_of_themselves(core: EngineCore) -> None:
    core.reset_prefix_cache()
    before = core.stats()
    run(core, make_request("a", prompt_of(50, seed=5), max_tokens=4))
    run(core, make_request("b", prompt_of(50, seed=5), max_tokens=4))
    after = core.stats()
    assert after.prompt_tokens_admitted - before.prompt_tokens_admitted == 100
    assert after.prompt_tokens_cached - before.prompt_tokens_cached == 48
    assert after.prompt_tokens - before.prompt_tokens == 52
    num_steps = after.num_steps - before.num_steps
    counts = [sum(sum(each.counts) for each in s.steps.seconds.values()) for s in (before, after)]
    assert counts[1] - counts[0] == num_steps
    tokens = after.steps.num_tokens.total - before.steps.num_tokens.total
    assert tokens == 52 + 2 * 3
    assert after.steps.num_places - before.steps.num_places >= tokens
    assert set(core.startup) == {"device", "memory", "weights", "compile"}


def test_stop_tokens_and_min_tokens(core: EngineCore) -> None:
    prompt = prompt_of(25)
    greedy = run(core, make_request("free", prompt, max_tokens=10))["free", 0]
    stop = greedy[3]
    first = greedy.index(stop)
    core.add(make_request("stop", prompt, max_tokens=10, stop_token_ids=[stop]))
    news = drain(core)
    assert tokens_of(news)["stop", 0] == greedy[: first + 1]
    assert (news[-1].finish_reason, news[-1].stop_reason) == ("stop", stop)
    kept = {"max_tokens": 10, "stop_token_ids": [stop], "min_tokens": 7}
    later = run(core, make_request("later", prompt, **kept))["later", 0]
    assert stop not in later[:7]
    assert later[:first] == greedy[:first]


EXTREMES: list[dict[str, Any]] = [
    {"top_k": 2**31},
    {"top_k": 10**30},
    {"top_p": 1e-320},
    {"min_p": 1.0},
    {"temperature": 1e-5},
    {"temperature": 1e300, "min_tokens": 12, "ignore_eos": False},
    {"repetition_penalty": 1e-6, "min_tokens": 12, "ignore_eos": False},
    {"repetition_penalty": 1e6},
    {"seed": -(2**63)},
    {"seed": 2**63 - 1, "n": 3},
    {"frequency_penalty": -2.0, "presence_penalty": -2.0},
    {"logit_bias": dict.fromkeys(range(VOCAB), -100.0)},
    {"stop_token_ids": list(range(VOCAB)), "min_tokens": 12},
    {"allowed_token_ids": [3], "logit_bias": {3: -100.0}},
    {"banned_token_ids": list(range(1, VOCAB))},
]


@pytest.mark.parametrize("params", EXTREMES, ids=str)
def test_no_value_that_is_allowed_breaks_a_step(core: EngineCore, params: dict[str, Any]) -> None:
    prompt = [7, *prompt_of(9)]
    tokens = run(core, make_request("extreme", prompt, **{"temperature": 1.0, **params}))
    assert [len(each) for each in tokens.values()] == [12] * params.get("n", 1)
    if not params.get("ignore_eos", True):
        assert 7 not in tokens["extreme", 0][:11], "the end of the sequence was masked"


def test_allowed_and_banned_tokens(core: EngineCore) -> None:
    allowed = [20, 30, 40, 50]
    ways: list[dict[str, Any]] = [{}, {"temperature": 1.0, "n": 2, "max_tokens": 40}]
    for way in ways:
        tokens = run(core, make_request("a", prompt_of(9), allowed_token_ids=allowed, **way))
        assert {each for row in tokens.values() for each in row} <= {*allowed}
    free = run(core, make_request("free", prompt_of(9)))["free", 0]
    kept = run(core, make_request("kept", prompt_of(9), banned_token_ids=free))["kept", 0]
    assert not {*free} & {*kept}


def test_the_models_end_of_sequence_has_no_stop_reason(core: EngineCore) -> None:
    bias = {7: 100.0}
    core.add(make_request("eos", prompt_of(5), logit_bias=bias, ignore_eos=False))
    (last,) = drain(core)
    assert (last.token_ids, last.finish_reason, last.stop_reason) == ([7], "stop", None)
    ignored = run(core, make_request("on", prompt_of(5), logit_bias=bias))["on", 0]
    assert ignored == [7] * 12


def test_rules_do_not_outlive_their_sequence(core: EngineCore) -> None:
    """A slot's next sequence must not inherit its bias, also beside one that uses rules."""
    free = run(core, make_request("free", prompt_of(5)))["free", 0]
    for name in ("b1", "b2", "b3", "b4"):
        core.add(make_request(name, prompt_of(5), logit_bias={9: 100.0}))
    drain(core)
    core.add(make_request("ruled", prompt_of(6), logit_bias={9: 100.0}))
    core.add(make_request("free", prompt_of(5)))
    tokens = tokens_of(drain(core))
    assert tokens["ruled", 0] == [9] * 12
    assert tokens["free", 0] == free


def test_logprobs_agree_between_decoding_and_scoring(core: EngineCore) -> None:
    """The log-probabilities a sequence was sampled with are those its text is scored with."""
    prompt = prompt_of(60)
    core.add(make_request("sampled", prompt, logprobs=3))
    sampled = drain(core)
    tokens = tokens_of(sampled)["sampled", 0]
    core.add(make_request("scored", prompt + tokens, max_tokens=1, prompt_logprobs=3))
    scores = next(item.prompt_logprobs for item in drain(core) if item.prompt_logprobs)
    assert [score.token for score in scores] == [*prompt, *tokens][1:]
    for item, score in zip(sampled, scores[len(prompt) - 1 :], strict=True):
        assert item.logprobs is not None
        assert_same(item.logprobs[0], score)
    assert all(score.logprob <= score.top_logprobs[0] + 1e-5 for score in scores)


def assert_same(one: Candidates, other: Candidates) -> None:
    assert (one.token, one.rank, one.top_tokens) == (other.token, other.rank, other.top_tokens)
    assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert one.top_logprobs == pytest.approx(other.top_logprobs, abs=1e-4)


def test_abort_frees_the_pages_at_once(core: EngineCore) -> None:
    core.add(make_request("gone", prompt_of(100), max_tokens=100))
    core.add(make_request("stays", prompt_of(10)))
    for _ in range(6):
        core.step()
    (ending,) = core.abort("gone")
    assert ending.finish_reason == "abort"
    assert core.abort("gone") == []
    rest = drain(core)
    assert {item.request_id for item in rest} == {"stays"}
    assert core.stats().kv_cache_usage == 0


def test_abort_of_one_sequence_leaves_its_siblings(core: EngineCore) -> None:
    core.add(make_request("n", prompt_of(10), n=3, temperature=1.0, seed=2, max_tokens=30))
    for _ in range(5):
        core.step()
    core.abort("n", index=0)
    ends = [item for item in drain(core) if item.finish_reason]
    assert sorted((item.index, item.finish_reason) for item in ends) == [
        (1, "length"),
        (2, "length"),
    ]


def test_whoever_leaves_while_its_grammar_is_compiled_leaves_nothing(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling: Compiled = Future()
    monkeypatch.setattr(Grammars, "compile", lambda grammars, grammar: compiling)
    core.add(replace(make_request("a", prompt_of(5), n=2, temperature=1.0), grammar="x"))
    core.abort("a", 0)
    assert core.stats().num_waiting == 1
    core.abort("a", 1)
    assert not core.has_work
    assert core._queue().num_waiting == 0


def test_a_request_id_in_use_is_refused(core: EngineCore) -> None:
    core.add(make_request("twin", prompt_of(5)))
    with pytest.raises(InvalidRequest, match="twin"):
        core.add(make_request("twin", prompt_of(6)))
    assert len(tokens_of(drain(core))) == 1


def test_a_request_that_the_scheduler_refuses_leaves_nothing(core: EngineCore) -> None:
    too_long = make_request("long", prompt_of(200), max_tokens=100, n=2, temperature=1.0)
    with pytest.raises(ValueError, match="max_model_len"):
        core.add(too_long)
    assert not core.has_work
    assert len(run(core, make_request("long", prompt_of(5)))["long", 0]) == 12


def test_a_failing_step_ends_every_request_and_the_engine(
    source: ModelSource, compile_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(source, compile_cache)
    core.add(make_request("a", prompt_of(5)))
    core.add(make_request("b", prompt_of(6), n=2, temperature=1.0))
    core.step()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory on the device")

    monkeypatch.setattr(StepRunner, "launch", fail)
    ends = core.step()
    assert {(item.request_id, item.index, item.finish_reason) for item in ends} == {
        ("a", 0, "error"),
        ("b", 0, "error"),
        ("b", 1, "error"),
    }
    assert all("out of memory on the device" in (item.error or "") for item in ends)
    assert core.has_work, "so that someone asks, and hears it"
    with pytest.raises(EngineDead, match="out of memory on the device"):
        core.add(make_request("c", prompt_of(5)))
    with pytest.raises(EngineDead):
        core.step()
    core.close()


def test_a_step_that_fails_when_nobody_waits_for_it_is_told_too(
    source: ModelSource, compile_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(source, compile_cache)
    core.add(make_request("a", prompt_of(5)))
    core.step()
    core.abort("a")

    def fail(*_: object) -> None:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(InFlight, "read", fail)
    assert core.step() == []
    assert core.has_work, "so that someone asks, and hears it"
    with pytest.raises(EngineDead, match="an illegal address"):
        core.step()
    core.close()


def test_closing_gives_the_memory_back(source: ModelSource, compile_cache: str) -> None:
    before = {id(array) for array in jax.live_arrays()}
    core = make_core(source, compile_cache)
    run(core, make_request("a", prompt_of(5)))
    core.close()
    core.close()
    left = [array for array in jax.live_arrays() if id(array) not in before]
    assert sum(array.nbytes for array in left) < 2**16


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"kv_cache_memory_bytes": 10 * PAGE_BYTES},
            r"max seq len \(256\).*\(72\).*--max-model-len 72",
        ),
        ({"max_model_len": 300}, r"300 is greater than the model's own length of 256"),
        ({"max_num_seqs": 64}, r"--max-num-batched-tokens \(48\).*--max-num-seqs \(64\)"),
        ({"enable_chunked_prefill": False}, r"\(48\) is smaller than --max-model-len \(256\)"),
    ],
)
def test_flags_that_do_not_fit_say_what_would(
    source: ModelSource, compile_cache: str, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_core(source, compile_cache, **flags)


def test_a_folder_that_cannot_be_made_is_named(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--compile-cache-dir .*file/jit"):
        make_core(source, str(tmp_path / "file" / "jit"))


def test_the_longest_length_that_fits(source: ModelSource, compile_cache: str) -> None:
    flags = {"max_num_seqs": 1, "max_num_batched_tokens": 16}
    room = 10 * PAGE_BYTES
    core = make_core(source, compile_cache, max_model_len=-1, kv_cache_memory_bytes=room, **flags)
    assert core.max_model_len == 72
    assert len(run(core, make_request("full", prompt_of(60)))["full", 0]) == 12
    core.close()


@pytest.mark.parametrize(
    ("module", "name"),
    [(setup, "StepDevice"), (setup, "StepRunner"), (core_module, "open_disk_tier")],
    ids=["loading", "first-steps", "fingerprint"],
)
def test_a_start_that_runs_out_of_memory_says_what_to_do(
    module: Any,
    name: str,
    source: ModelSource,
    compile_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever needs it; another failure of the device is left as it is."""
    failure = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3.71GiB."

    def fail(*args: Any, **kwargs: Any) -> None:
        raise jax.errors.JaxRuntimeError(failure)

    monkeypatch.setattr(module, name, fail)
    with pytest.raises(
        ConfigError, match=r"while the engine was started.* \(it is 0\.9\), .*--max-num-seqs"
    ):
        make_core(source, compile_cache)
    failure = "INTERNAL: an illegal instruction"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        make_core(source, compile_cache)


@pytest.mark.parametrize("module", [serving, asking], ids=["before", "after"])
def test_a_start_that_runs_out_of_memory_leaves_no_port_open(
    module: Any, source: ModelSource, compile_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the prefill engine that it is to be listens already or not."""

    def fail(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(module, "facts_of", fail)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = {"prefill_servers": ("127.0.0.1:1",), "kv_offloading_size": 0.01}
    with pytest.raises(ConfigError, match="out of memory") as caught:
        make_core(source, compile_cache, kv_transfer_port=port, **flags)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert caught.value.__cause__ is not None, "what it holds is not collected before"
