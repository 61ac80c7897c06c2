"""KV pages in host memory, end to end: the answer never depends on where they were meanwhile."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from paged.models.loading import ModelSource, resolve_model
from paged.prefix import extend_hashes
from paged.runtime import disk_tier
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.disk_pages import DiskPages
from paged.runtime.errors import ConfigError
from paged.runtime.load_costs import FREE, LoadCosts
from paged.runtime.messages import EngineRequest, SequenceOutput
from paged.runtime.runner import StepRunner
from tests.models.harness import load_golden, write_checkpoint
from tests.runtime.clock import Clock
from tests.runtime.remote import wait_until
from tests.runtime.test_core import (
    MODEL,
    PAGE_BYTES,
    VOCAB,
    drain,
    make_core,
    make_request,
    mixed_load,
    prompt_of,
    run,
    source,
    tokens_of,
)
from tests.runtime.test_disk_pages import stick_at_the_third
from tests.runtime.test_scheduler import preempt_all

__all__ = ["source"]

pytestmark = pytest.mark.usefixtures("few_programs")

Tokens = dict[tuple[str, int], list[int]]
"""By request and index."""

FLAGS: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "max_model_len": 96}
HOST = {"kv_offloading_size": 2**-10}  # a MiB
INT8 = MODEL | {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32}
measure_loads = StepRunner.measure_loads


@pytest.fixture(autouse=True)
def loads_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is on the host is loaded."""
    monkeypatch.setattr(StepRunner, "measure_loads", lambda runner: FREE)


def source_of(name: str, folder: Path) -> ModelSource:
    if name == "int8":
        (folder / "config.json").write_text(json.dumps(INT8))
        return resolve_model(folder, load_format="dummy")
    return resolve_model(write_checkpoint(folder, load_golden(name)))


def crowd() -> list[EngineRequest]:
    """Some with a prefix in common."""
    shared = prompt_of(20, seed=1)
    prompts = [prompt_of(30, seed=2), [*shared, 9, 10], [*shared, *prompt_of(20)], prompt_of(41)]
    return [make_request(f"{i}", prompt, max_tokens=40) for i, prompt in enumerate(prompts)]


def swap_everything(core: EngineCore) -> None:
    """Take all pages from running sequences, and all content from the pool."""
    pool = core._pool
    preempt_all(core._scheduler)
    pool.release(pool.allocate(pool.num_available))
    assert pool.num_cached == 0


def run_swapping(core: EngineCore, *requests: EngineRequest) -> dict[tuple[str, int], list[int]]:
    """Run requests, and swap everything time and again."""
    news: list[SequenceOutput] = []
    for request in requests:
        core.add(request)
    for number in count():
        if not core.has_work:
            return tokens_of(news)
        news += core.step()
        if number % 7 == 6:
            swap_everything(core)
    raise AssertionError("unreachable")


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gemma2", {}),
        pytest.param("mistral_window", {"block_size": 16}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {}, marks=pytest.mark.slow),
        ("int8", {"kv_cache_dtype": "int8"}),
    ],
)
def test_a_forced_swap_changes_no_token(
    name: str, flags: dict[str, Any], tmp_path: Path, compile_cache: str
) -> None:
    """Whole pages, windows, latents, and integers with scales."""
    core = make_core(source_of(name, tmp_path), compile_cache, **FLAGS | flags, **HOST)
    unswapped = run(core, *crowd())
    assert (core.stats().num_preemptions, core.stats().host_bytes_saved) == (0, 0)
    num_computed = core.stats().prompt_tokens
    assert core.reset_prefix_cache()
    assert run_swapping(core, *crowd()) == unswapped
    stats = core.stats()
    assert stats.num_preemptions > 10
    assert 0 < stats.host_bytes_saved < stats.host_bytes_loaded, "what is known is not saved again"
    assert stats.prompt_tokens < 3 * num_computed, "prompts came from the host"
    assert stats.compiles_after_warmup == 0
    core.close()


@pytest.fixture(scope="module")
def core(source: ModelSource, compile_cache: str) -> Iterator[EngineCore]:
    """Little more pages than the longest sequence takes."""
    few = {"kv_cache_memory_bytes": 28 * PAGE_BYTES, "max_model_len": 200}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "measure_loads", lambda runner: FREE)
        core = make_core(source, compile_cache, **few, **HOST)
    yield core
    core.close()


@pytest.fixture
def fresh(core: EngineCore) -> EngineCore:
    assert core.reset_prefix_cache()
    return core


def test_a_crowd_in_few_pages_answers_as_one_by_one(fresh: EngineCore) -> None:
    alone: dict[tuple[str, int], list[int]] = {}
    for request in mixed_load():
        alone |= run(fresh, request)
        assert fresh.reset_prefix_cache()
    for _ in range(3):
        before = fresh.stats()
        assert run(fresh, *mixed_load()) == alone
        after = fresh.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.host_bytes_loaded > before.host_bytes_loaded
    assert after.compiles_after_warmup == 0


def random_prompt(random: Random) -> list[int]:
    """One of three beginnings, cut near the ends of pages, and something of its own."""
    shared = prompt_of(70, seed=random.randrange(3))[: random.choice((0, 7, 8, 9, 32, 33, 63, 70))]
    return shared + random.choices(range(8, VOCAB), k=random.choice((1, 2, 7, 8, 20)))


def random_params(random: Random) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": random.randint(1, 40)}
    if random.random() < 0.6:
        params |= {"temperature": 1.0, "seed": random.randrange(99), "n": random.choice((1, 2, 3))}
        params |= {"top_p": random.choice((1.0, 0.9)), "top_k": random.choice((0, 5))}
    if random.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.5}
    if random.random() < 0.3:
        params |= {"stop_token_ids": random.sample(range(8, VOCAB), 20), "min_tokens": 1}
    if random.random() < 0.2:
        params |= {"banned_token_ids": random.sample(range(8, VOCAB), 50)}
    if random.random() < 0.2:
        params |= {"prompt_logprobs": 0}
    return params


def disturbed(
    core: EngineCore, requests: list[EngineRequest], random: Random
) -> tuple[Tokens, set[str]]:
    """The tokens of requests that come, leave and lose their pages at random, and who left."""
    coming, left, news = list(requests), set[str](), list[SequenceOutput]()
    scheduler = core._scheduler
    while coming or core.has_work:
        while coming and random.random() < 0.3:
            core.add(coming.pop(0))
        if core._requests and random.random() < 0.03:
            left.add(name := random.choice(list(core._requests)))
            news += core.abort(name, random.choice((None, 0)))
        if scheduler.num_running and random.random() < 0.05:
            scheduler._preempt(random.choice(list(scheduler._running)))
        news += core.step() if core.has_work else []
        core._pool.check()
    return tokens_of(news), left


def test_random_traffic_is_answered_one_by_one(fresh: EngineCore) -> None:
    """With a sampler and its state, what `test_scheduler_simulation` does without a device."""
    before = fresh.stats()
    for seed in range(2):
        random = Random(seed)
        requests = [
            make_request(f"{number}", random_prompt(random), **random_params(random))
            for number in range(8)
        ]
        together, left = disturbed(fresh, requests, random)
        for request in requests:
            assert fresh.reset_prefix_cache(), "nobody holds pages any more"
            for key, tokens in run(fresh, request).items():
                found = together[key]
                length = len(found if request.request_id in left else tokens)
                assert found == tokens[:length], f"{key} of seed {seed}"
    after = fresh.stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.compiles_after_warmup == 0


def test_prompts_are_found_in_both_tiers(fresh: EngineCore) -> None:
    prompt = prompt_of(100, seed=4)
    run(fresh, make_request("first", prompt, max_tokens=1))
    swap_everything(fresh)
    before = fresh.stats()
    fresh.add(make_request("again", prompt, max_tokens=1))
    [news] = drain(fresh)
    after = fresh.stats()
    assert news.num_cached_tokens == 96
    assert after.prompt_tokens - before.prompt_tokens == 4
    assert after.prefix_cache_hits == before.prefix_cache_hits
    assert after.host_hits - before.host_hits == 96
    assert after.host_queries - before.host_queries == 100
    assert after.host_bytes_loaded - before.host_bytes_loaded == 12 * PAGE_BYTES
    assert after.num_used_host_pages == 12


def test_salts_are_kept_apart_and_reset_forgets(fresh: EngineCore) -> None:
    request = make_request("salted", prompt_of(50), max_tokens=1)
    run(fresh, replace(request, cache_salt="a"))
    for salt, num_hits in (("b", 0), ("", 0), ("a", 48)):
        swap_everything(fresh)
        before = fresh.stats().host_hits
        run(fresh, replace(request, cache_salt=salt))
        assert fresh.stats().host_hits - before == num_hits
    swap_everything(fresh)
    assert fresh.reset_prefix_cache()
    assert fresh.stats().num_used_host_pages == 0
    before = fresh.stats().host_hits
    run(fresh, replace(request, cache_salt="a"))
    assert fresh.stats().host_hits == before


def test_an_abort_while_pages_are_on_their_way(fresh: EngineCore) -> None:
    """Whoever comes next finds what was saved, and nothing of it is half written."""
    prompt = prompt_of(90, seed=6)
    request = make_request("a", prompt, max_tokens=30)
    expected = run(fresh, request)[("a", 0)]
    for num_steps in range(1, 6):
        swap_everything(fresh)
        fresh.add(request)
        fresh.add(make_request("other", prompt_of(100, seed=num_steps)))
        for _ in range(num_steps):
            fresh.step()
        fresh.abort("a")
        swap_everything(fresh)
        fresh.abort("other")
        assert run(fresh, request) == {("a", 0): expected}
    fresh._pool.check()


def test_what_takes_longer_than_computing_is_not_loaded(fresh: EngineCore) -> None:
    tables, prompt = fresh._scheduler._tables, prompt_of(60, seed=7)
    run(fresh, make_request("first", prompt, max_tokens=1))
    tables._load_costs = LoadCosts(latency=57.0, per_token=1.0)
    try:
        swap_everything(fresh)
        before = fresh.stats()
        run(fresh, make_request("again", prompt, max_tokens=1))
        after = fresh.stats()
        assert after.host_hits == before.host_hits
        assert after.prompt_tokens - before.prompt_tokens == 60
    finally:
        tables._load_costs = FREE


def test_loads_are_measured_at_the_start(core: EngineCore) -> None:
    costs = measure_loads(core._runner)
    assert 0 < costs.per_token < 1
    assert 0 <= costs.per_page < 1
    assert 0 < costs.latency + costs.per_page < 1
    assert costs.report(2**20).startswith("Pages in host memory load at ")


@pytest.fixture(autouse=True)
def stops_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine leaves out nothing that is to be written."""
    monkeypatch.setattr(disk_tier, "_SHORTEST_STOP", 60.0)


def open_with_disk(source: ModelSource, compile_cache: str, folder: Path) -> EngineCore:
    few = {"kv_cache_memory_bytes": 28 * PAGE_BYTES, "max_model_len": 200}
    return make_core(source, compile_cache, **few, **HOST, kv_offloading_dir=str(folder))


def test_a_restart_finds_pages_on_disk(
    source: ModelSource, compile_cache: str, tmp_path: Path
) -> None:
    prompt = prompt_of(100, seed=8)
    request = make_request("a", prompt, max_tokens=20)
    core = open_with_disk(source, compile_cache, tmp_path)
    expected = run(core, request)
    core.close()

    core = open_with_disk(source, compile_cache, tmp_path)
    assert core.stats().num_disk_pages == 14, "of 119 tokens"
    assert core._disk is not None
    core._disk.files.seconds_per_page = 0.0
    core.add(replace(request, cache_salt="other"))
    assert not core._preparing
    core.abort("a")
    core.add(request)
    assert core.stats().num_waiting == 1
    assert tokens_of(drain(core)) == expected
    stats = core.stats()
    assert (stats.disk_pages_read, stats.host_hits) == (12, 96)
    assert stats.compiles_after_warmup == 0
    core.add(request)
    assert not core._preparing, "it is on the device"
    core.close()
    core.close()

    core = open_with_disk(source, compile_cache, tmp_path)
    assert core._disk is not None
    core._disk.files.seconds_per_page = 60.0
    core.add(request)
    assert not core._preparing, "computing is faster"
    core.abort("a")
    hashes: list[bytes] = []
    extend_hashes(hashes, request.prompt_token_ids, core.memory.page_size)
    num_pages = core.stats().num_disk_pages
    core._pool.forget(hashes[:2])
    assert core.stats().num_disk_pages == num_pages - 2
    assert core.reset_prefix_cache()
    assert core.stats().num_disk_pages == 0
    core.close()
    assert list(tmp_path.glob("*/*")) == []


def test_a_stop_ends_in_time_and_says_what_it_leaves_out(
    source: ModelSource,
    compile_cache: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = make_request("a", prompt_of(100, seed=8), max_tokens=20)
    core = open_with_disk(source, compile_cache, tmp_path)
    expected = run(core, request)
    disk = core._disk
    assert disk is not None

    class Held(Clock):
        """It goes on when the third write has begun."""

        def sleep(self, seconds: float) -> None:
            wait_until(lambda: len(begun) == 3)
            super().sleep(seconds)

    with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "paged"):
        begun = stick_at_the_third(patch, lambda: disk.files)
        patch.setattr(disk_tier, "time", Held())
        patch.setattr(disk_tier, "_SHORTEST_STOP", 0.7)
        patch.setattr(disk_tier, "_BETWEEN_LINES", 0.1)
        told = list(core.closing())
    assert [each.num_pages for each in told] == [14] * len(told)
    assert all(each.seconds_left <= 0.7 for each in told)
    lines = "\n".join(record.getMessage() for record in caplog.records)
    assert "Writing 14 KV pages to disk, for 1 s at most" in lines
    assert re.search(r"\d+ KV pages are left to be written to disk", lines)
    assert "The stop left out 11 of them: no time was left" in lines

    core = open_with_disk(source, compile_cache, tmp_path)
    assert core.stats().num_disk_pages == 3
    assert run(core, request) == expected
    core.close()


def test_an_abort_while_pages_are_read(
    source: ModelSource, compile_cache: str, tmp_path: Path
) -> None:
    request = make_request("a", prompt_of(100, seed=8), max_tokens=20)
    core = open_with_disk(source, compile_cache, tmp_path)
    expected = run(core, request)
    core.close()
    core = open_with_disk(source, compile_cache, tmp_path)
    assert core._disk is not None
    core._disk.files.seconds_per_page = 0.0
    core.add(request)
    assert core._preparing
    assert not core.reset_prefix_cache()
    [news] = core.abort("a")
    assert news.finish_reason == "abort"
    assert drain(core) == []
    assert run(core, request) == expected
    core.close()


def test_more_than_the_machine_has_is_refused(source: ModelSource) -> None:
    with pytest.raises(
        ConfigError, match=r"is 1048576\.00 GiB, and this machine has .* Use at most"
    ):
        make_core(source, "", kv_offloading_size=2**20)
    with pytest.raises(ConfigError, match=r"is 0\.0 MiB, and one KV page takes 0\.0 MiB"):
        make_core(source, "", kv_offloading_size=1e-8)


def test_a_folder_that_cannot_be_used_is_refused(
    source: ModelSource, compile_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(pages: DiskPages) -> float:
        raise OSError(28, "No space left on device")

    (tmp_path / "file").touch()
    refused = pytest.raises(ConfigError, match="--kv-offloading-dir cannot be used: ")
    with monkeypatch.context() as patch:
        patch.delattr(ModelSource, "load")  # it is not come to
        for folder in (tmp_path / "file", tmp_path / "file" / "inside", Path("~no such user/a")):
            with refused:
                open_with_disk(source, compile_cache, folder)
    monkeypatch.setattr(DiskPages, "_measure", full)
    with refused:
        open_with_disk(source, compile_cache, tmp_path / "folder")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_offloading_size": -1.0}, "at least 0 and finite, in GiB, got -1.0"),
        ({"kv_offloading_size": float("inf")}, "at least 0 and finite, in GiB, got inf"),
        ({"kv_offloading_dir": "/tmp"}, "give --kv-offloading-size"),
        ({"kv_offloading_dir_size": 0.0}, "above 0 and finite, in GiB, got 0.0"),
        ({"kv_offloading_size": 1.0, "enable_prefix_caching": False}, "needs the prefix cache"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)
