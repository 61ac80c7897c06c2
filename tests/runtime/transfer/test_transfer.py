"""Prompts that another engine computes: the answer does not depend on it, and nothing is left."""

from __future__ import annotations

import re
import select
import threading
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from paged.models.loading import ModelSource
from paged.runtime import line
from paged.runtime.errors import EngineDead
from paged.runtime.load_costs import FREE
from paged.runtime.runner import StepRunner
from paged.runtime.transfer import asking, door, handshake
from paged.runtime.transfer.handshake import facts_of
from paged.runtime.transfer.landing import SharedWay
from paged.runtime.transfer.messages import Cancel
from paged.runtime.transfer.peer import Handover, Peer
from tests.runtime.remote import wait_until
from tests.runtime.test_core import (
    PAGE_BYTES,
    drain,
    make_core,
    make_request,
    mixed_load,
    prompt_of,
    run,
    source,
    tokens_of,
)
from tests.runtime.test_gate import stopped_clock
from tests.runtime.test_offloading import source_of
from tests.runtime.transfer.engines import LEAST, Pair, opened
from tests.runtime.transfer.test_transfer_landing import mapped

__all__ = ["source"]

pytestmark = pytest.mark.usefixtures("few_programs")

LONG = make_request("long", prompt_of(130, seed=1))  # 16 full pages, in chunks of 48 tokens


@pytest.fixture(scope="module")
def engines(source: ModelSource, compile_cache: str) -> Iterator[Pair]:
    with opened(source, compile_cache) as pair:
        yield pair


@pytest.fixture
def pair(engines: Pair) -> Iterator[Pair]:
    """As new, and left with nothing on the way."""
    engines.await_connection()
    engines.hear_all()
    engines.settle()
    yield engines
    engines.settle()
    wait_until(lambda: mapped() == 0)


def elsewhere(*_: object) -> None:
    """What opening memory of another machine comes to."""
    raise ValueError("the memory is another machine's")


@pytest.fixture(params=["memory", "line"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "line":
        monkeypatch.setattr(door, "SharedWay", elsewhere)
    return str(request.param)


def outcomes(pair: Pair, before: dict[str, int]) -> dict[str, int]:
    """How many prompts have ended in which way since."""
    now = pair.stats.outcomes
    return {name: now[name] - before[name] for name in now if now[name] != before[name]}


@pytest.mark.parametrize("length", [5, 16, 17, 23, 24, 25, 64, 130, 200])
def test_prompts_of_every_length(pair: Pair, way: str, length: int) -> None:
    """Shorter than a page, a multiple of pages, one more; many chunks."""
    request = make_request("a", prompt_of(length, seed=3))
    expected, before = pair.alone(request), pair.decode.stats()
    with pair.working():
        assert run(pair.decode, request) == expected
    after = pair.decode.stats()
    num_pages = (length - 1) // 8 if length > LEAST else 0
    assert outcomes(pair, before.transfer.outcomes) == ({"done": 1} if num_pages else {})
    bytes_received = after.transfer.bytes_received - before.transfer.bytes_received
    assert bytes_received == num_pages * PAGE_BYTES
    assert after.host_hits - before.host_hits == 8 * num_pages
    assert after.prompt_tokens - before.prompt_tokens == length - 8 * num_pages
    assert after.compiles_after_warmup == before.compiles_after_warmup


def test_a_crowd(pair: Pair, way: str) -> None:
    """Prefixes in common, forks, penalties, all at the same time."""
    expected, before = pair.alone(*mixed_load()), pair.stats.outcomes
    with pair.working():
        assert run(pair.decode, *mixed_load()) == expected
    assert outcomes(pair, before)["done"] > 3


def test_pages_come_chunk_by_chunk_while_others_decode(pair: Pair) -> None:
    expected = pair.alone(LONG)
    pair.decode.add(LONG)
    [preparing] = pair.decode._preparing
    handover = preparing.handover
    assert handover is not None
    wait_until(lambda: pair.prefill.served.has_news)
    for num_pages in (6, 12):
        pair.prefill.step()
        wait_until(lambda count=num_pages: _num_landed(handover) == count)  # type: ignore[misc]
        assert not handover.outcome.done()
    other = make_request("other", prompt_of(10))
    assert tokens_of(_until_done(pair, other.request_id, other))[("other", 0)]
    assert pair.decode.stats().num_deferred == 1, "the long one waits, and nobody waits for it"
    with pair.working():
        assert tokens_of(drain(pair.decode)) == expected


def _num_landed(handover: Handover) -> int:
    return sum(len(stack[0]) for _, stack in handover.landed)


def _until_done(pair: Pair, name: str, request: Any) -> list[Any]:
    pair.decode.add(request)
    news = list[Any]()
    while not any(item.request_id == name and item.finish_reason for item in news):
        news += pair.decode.step()
    return news


def test_what_is_cached_is_neither_asked_for_nor_computed_again(pair: Pair) -> None:
    with pair.working():
        run(pair.decode, LONG)
    longer = replace(LONG, prompt_token_ids=[*LONG.prompt_token_ids, *prompt_of(40)])
    before, received = pair.num_computed(), pair.stats.bytes_received
    with pair.working():
        run(pair.decode, longer)
        assert pair.stats.bytes_received - received == 5 * PAGE_BYTES, "pages 16 to 20, of 170"
        pair.decode.reset_prefix_cache()
        run(pair.decode, LONG)
    assert pair.num_computed() - before <= 41 + 1, "the prefill engine has a cache, too"


def test_salts_are_kept_apart(pair: Pair) -> None:
    salted = replace(LONG, cache_salt="a")
    with pair.working():
        run(pair.decode, salted)
    before = pair.num_computed()
    pair.decode.reset_prefix_cache()
    with pair.working():
        run(pair.decode, LONG)
    assert pair.num_computed() - before == 129


def test_a_prompt_to_be_scored_is_computed_here(pair: Pair) -> None:
    before = pair.stats.outcomes
    run(pair.decode, make_request("a", prompt_of(60), prompt_logprobs=0))
    assert outcomes(pair, before) == {}


def test_the_prefill_engine_may_preempt(pair: Pair) -> None:
    expected = pair.alone(LONG)
    pair.decode.add(LONG)
    wait_until(lambda: pair.prefill.served.has_news)
    for _ in range(2):
        pair.prefill.step()
        scheduler = pair.prefill._scheduler
        [running] = scheduler._running
        scheduler._preempt(running)
        assert pair.prefill._pool.reset_prefix_cache()
    with pair.working():
        assert tokens_of(drain(pair.decode)) == expected


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_an_abort_is_heard_by_the_prefill_engine(pair: Pair, way: str, num_steps: int) -> None:
    expected, before = pair.alone(LONG), pair.stats.outcomes
    served = pair.prefill.stats().transfer.served["aborted"]
    pair.decode.add(LONG)
    wait_until(lambda: pair.prefill.served.has_news)
    for _ in range(num_steps):
        pair.prefill.step()
    assert not pair.decode.reset_prefix_cache()
    [news] = pair.decode.abort("long")
    assert news.finish_reason == "abort"
    assert drain(pair.decode) == []
    assert outcomes(pair, before) == {"aborted": 1}
    wait_until(lambda: pair.prefill.served.has_news)

    def is_aborted() -> bool:
        if pair.prefill.served.has_news:
            pair.prefill.step()
        return pair.prefill.stats().transfer.served["aborted"] == served + 1

    wait_until(is_aborted)
    assert pair.prefill.stats().num_running == 0
    with pair.working():
        assert run(pair.decode, LONG) == expected


def test_an_idle_prefill_engine_is_woken(pair: Pair) -> None:
    descriptor = pair.prefill.fileno()
    assert descriptor is not None
    assert not select.select([descriptor], [], [], 0)[0]
    pair.decode.add(LONG)
    assert select.select([descriptor], [], [], 30)[0]
    assert pair.prefill.has_work
    pair.decode.abort("long")
    drain(pair.decode)


def test_a_deadline_ends_the_wait(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pair.stats.outcomes
    clock = stopped_clock(monkeypatch)
    terms = replace(LONG.terms, deadline=clock.now + 0.1)
    pair.decode.add(replace(LONG, terms=terms))
    assert pair.decode.step() == []
    clock.now += 0.2
    [news] = drain(pair.decode)
    assert news.finish_reason == "timeout"
    assert outcomes(pair, before) == {"aborted": 1}


def test_a_prefill_engine_that_is_silent_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, before = pair.alone(LONG), pair.stats.outcomes
    monkeypatch.setattr(pair.decode.remote, "_timeout", 0.1)
    pair.decode.add(LONG)
    wait_until(lambda: pair.prefill.served.has_news)
    pair.prefill.step()  # a chunk comes, and no more
    assert tokens_of(drain(pair.decode)) == expected
    assert outcomes(pair, before) == {"timeout": 1}
    said = r"nothing was heard for \d+\.\d s \(timeout\): the rest of a prompt is comp"
    assert re.search(said, caplog.text)


def test_a_prefill_engine_that_is_silent_is_asked_again_when_it_is_heard(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each long prompt would wait as long as the first one."""
    expected, before = pair.alone(LONG), pair.stats.outcomes
    with monkeypatch.context() as patch:
        patch.setattr(pair.decode.remote, "_timeout", 0.1)
        pair.decode.add(LONG)
        drain(pair.decode)
    pair.decode.reset_prefix_cache()
    assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"timeout": 1, "unreachable": 1}
    pair.decode.reset_prefix_cache()
    with pair.working():
        pair.await_connection()
        assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"timeout": 1, "unreachable": 1, "done": 1}


def test_a_prompt_that_is_refused_while_its_asker_leaves_is_counted_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = pair.prefill.served
    before = dict(served.outcomes)
    with monkeypatch.context() as patch:
        patch.setattr(pair.prefill._gate, "max_sequences", 0)
        patch.setattr(pair.prefill._scheduler, "_free_slots", [])
        pair.decode.add(LONG)
        pair.decode.abort("long")
        drain(pair.decode)
        assert served._door is not None
        wait_until(lambda: len(served._door._news) == 2)  # type: ignore[union-attr]
        [line] = served._door._lines
        line.close()
        wait_until(lambda: len(served._door._news) == 3)  # type: ignore[union-attr]
        pair.prefill.step()
    assert served.outcomes == before | {"aborted": before["aborted"] + 1}


def test_a_connection_that_is_lost_in_the_middle(
    pair: Pair, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, before = pair.alone(LONG), pair.stats.outcomes
    pair.decode.add(LONG)
    wait_until(lambda: pair.prefill.served.has_news)
    pair.prefill.step()
    assert pair.prefill.served._door is not None
    for connected in list(pair.prefill.served._door._lines):
        connected.close()
    computed = pair.decode.stats().prompt_tokens
    assert tokens_of(drain(pair.decode)) == expected
    assert outcomes(pair, before) == {"lost": 1}
    assert pair.decode.stats().prompt_tokens - computed <= 130
    wait_until(lambda: " is lost: " in caplog.text)
    pair.await_connection()
    with pair.working():
        pair.decode.reset_prefix_cache()
        assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"lost": 1, "done": 1}


def test_refusals(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is too long there, and a queue that is full."""
    expected, before = pair.alone(LONG), pair.stats.outcomes
    with pair.working(), monkeypatch.context() as patch:
        patch.setattr(pair.prefill.served, "_max_model_len", 100)
        assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"refused": 1}
    pair.decode.reset_prefix_cache()
    with pair.working(), monkeypatch.context() as patch:
        patch.setattr(pair.prefill._gate, "max_sequences", 0)
        patch.setattr(pair.prefill._scheduler, "_free_slots", [])
        assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"refused": 2}


def test_no_more_is_asked_for_than_there_is_room(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, before = pair.alone(LONG), pair.stats.outcomes
    monkeypatch.setattr(asking, "_MOST_COMING", 15 / pair.decode._pool.host.num_pages)
    assert run(pair.decode, LONG) == expected
    assert outcomes(pair, before) == {"no_room": 1}


def test_what_comes_out_of_turn_ends_the_connection(pair: Pair) -> None:
    before = pair.stats.outcomes
    pair.decode.add(LONG)
    wait_until(lambda: pair.prefill.served.has_news)
    assert pair.prefill.served._door is not None
    [connection] = pair.prefill.served._door._connections
    connection.tell(Cancel(0))  # type: ignore[arg-type]
    assert drain(pair.decode)
    assert outcomes(pair, before) == {"lost": 1}


@pytest.mark.slow
def test_a_prefill_engine_that_dies_and_a_decode_engine_that_is_closed(
    source: ModelSource, compile_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what it died of to whoever steps it, and the decode engine does the rest."""
    with opened(source, compile_cache) as pair:
        expected = pair.alone(LONG)
        pair.decode.add(LONG)
        wait_until(lambda: pair.prefill.served.has_news)

        def fail(*_: object) -> None:
            raise RuntimeError("the device is gone")

        with monkeypatch.context() as patch:
            patch.setattr(StepRunner, "launch", fail)
            assert pair.prefill.step() == [], "what ends is the decode engine's"
            with pytest.raises(EngineDead, match="the device is gone"):
                pair.prefill.step()
        assert tokens_of(drain(pair.decode)) == expected
        assert pair.stats.outcomes["refused"] == 1
        pair.prefill.close()
        pair.decode.reset_prefix_cache()
        wait_until(lambda: pair.decode.remote.num_connected == 0)
        assert run(pair.decode, LONG) == expected
        assert pair.stats.outcomes["unreachable"] == 1
    wait_until(lambda: not [each for each in threading.enumerate() if "paged-" in each.name])
    held = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.exists()]
    assert not [each for each in held if "paged-pages" in each]


@pytest.mark.parametrize(
    ("name", "value"), [("--block-size", "16"), ("the fingerprint of the weights", "abc")]
)
def test_another_model_is_refused_with_both_values(
    pair: Pair, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    runner = pair.decode._runner
    facts = facts_of(runner)
    server = f"127.0.0.1:{pair.prefill.served.port}"
    peer = Peer(server, facts | {name: value}, runner.page_parts, runner.host.stack)
    said = f"{name} is {value} on the decode engine and {facts[name]} on the prefill engine"
    wait_until(lambda: f"{server} refuses this engine: {said}" in caplog.text)
    wait_until(lambda: f"is not admitted: {said}" in caplog.text)
    assert not peer.can_be_asked
    peer.close()


def test_another_key_is_refused(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each side reads its own in the same place: a decode engine of another key is made here."""
    runner = pair.decode._runner
    server = f"127.0.0.1:{pair.prefill.served.port}"
    proof = line.proof

    def with_another_key(variable: str, side: bytes, *said: bytes) -> bytes:
        is_decode = threading.current_thread().name.startswith("paged-prefill-")
        return proof(variable, side, *said, *([b"another key"] if is_decode else []))

    monkeypatch.setattr(handshake, "proof", with_another_key)
    peer = Peer(server, facts_of(runner), runner.page_parts, runner.host.stack)
    wait_until(lambda: "refuses this engine: PAGED_TRANSFER_KEY differs" in caplog.text)
    peer.close()


@pytest.mark.slow
def test_the_same_shapes_with_other_weights_are_another_model(
    source: ModelSource, compile_cache: str, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(source, compile_cache) as pair:
        flags: dict[str, Any] = {
            "kv_offloading_size": 2**-8,
            "prefill_servers": (f"127.0.0.1:{pair.prefill.served.port}",),
        }
        other = make_core(source, compile_cache, seed=1, **flags)
        wait_until(lambda: "the fingerprint of the weights is " in caplog.text)
        assert other.remote.num_connected == 0
        other.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("gemma2", {}),
        ("mistral_window", {"block_size": 16}),
        ("deepseek_v3", {}),
        ("int8", {"kv_cache_dtype": "int8"}),
    ],
)
def test_every_kind_of_page(
    name: str,
    flags: dict[str, Any],
    tmp_path: Path,
    compile_cache: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows, latents, and integers with scales; by memory, and by the connection."""
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 96}
    with opened(source_of(name, tmp_path), compile_cache, **sizes | flags) as pair:
        vocabulary = pair.decode.vocab_size
        for way, length in product((SharedWay, elsewhere), (33, 48, 49, 80)):
            monkeypatch.setattr(door, "SharedWay", way)
            prompt = [token % vocabulary for token in prompt_of(length, seed=length)]
            request = make_request("a", prompt, max_tokens=10)
            expected, before = pair.alone(request), pair.stats.outcomes
            with pair.working():
                assert run(pair.decode, request) == expected
            assert outcomes(pair, before) == {"done": 1}
            pair.settle()


@pytest.mark.slow
def test_what_is_on_disk_is_read_and_the_rest_is_asked_for(
    source: ModelSource, compile_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepRunner, "measure_loads", lambda runner: FREE)
    prefill = make_core(source, compile_cache, kv_transfer_port=0)
    flags: dict[str, Any] = {
        "kv_offloading_size": 2**-8,
        "kv_offloading_dir": str(tmp_path),
        "prefill_servers": (f"127.0.0.1:{prefill.served.port}",),
        "min_remote_prefill_tokens": LEAST,
    }
    first = make_core(source, compile_cache, **flags)
    pair = Pair(prefill, first)
    pair.await_connection()
    with pair.working():
        run(first, replace(LONG, prompt_token_ids=LONG.prompt_token_ids[:60]))
    first.close()
    again = make_core(source, compile_cache, **flags)
    pair = Pair(prefill, again)
    pair.await_connection()
    assert again._disk is not None
    again._disk.files.seconds_per_page = 0.0
    with pair.working():
        tokens = run(again, LONG)
    stats = again.stats()
    assert stats.disk_pages_read >= 7
    assert stats.transfer.bytes_received == (16 - stats.disk_pages_read) * PAGE_BYTES
    again._disk.files.clear()
    assert pair.alone(LONG) == tokens
    again.close()
    prefill.close()
