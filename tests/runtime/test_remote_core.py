"""A core in another process must be one like any other, and neither process may outlive the other
by more than a moment.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from paged.errors import ConfigError
from paged.models.loading import CheckpointError
from paged.runtime import async_engine as async_engine_module
from paged.runtime import remote_core as remote_core_module
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.ending import TIME_TO_CLOSE
from paged.runtime.engine_thread import EngineThread
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.messages import EngineRequest, SequenceOutput
from paged.runtime.outputs import RequestOutput
from paged.runtime.remote_core import RemoteCore
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from paged.runtime.wire import Channel
from tests.runtime.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeCore
from tests.runtime.remote import (
    MEMORY,
    comes_to_rest,
    fake_remote,
    is_gone,
    make_request,
    remote_engine,
    spawned,
    thread_seconds,
    wait_until,
)
from tests.runtime.test_async_engine import ENDLESS, collect, fickle, text, until
from tests.runtime.test_async_engine_end import check_dies

ROOT = Path(__file__).parents[2]
HANG = "core.on_step = lambda: time.sleep(60)"


@pytest.fixture(scope="module")
def core() -> Iterator[RemoteCore]:
    """Every test finishes what it starts."""
    core = fake_remote("step_time=0.002")
    yield core
    core.close()
    assert is_gone(core.pid)


def run_to_end(core: RemoteCore | FakeCore, *names: str) -> list[SequenceOutput]:
    """News until each request of these names has one sequence that ended."""
    news: list[SequenceOutput] = []
    while not set(names) <= {item.request_id for item in news if item.finish_reason}:
        news += core.step()
    return news


def test_it_says_what_the_core_says(core: RemoteCore) -> None:
    assert (core.max_model_len, core.vocab_size) == (MAX_MODEL_LEN, VOCAB_SIZE)
    assert core.memory == MEMORY
    before = core.stats().num_steps
    core.add(make_request("a"))
    run_to_end(core, "a")
    assert core.stats().num_steps > before + 12


def test_outputs_are_those_of_a_core_here(core: RemoteCore) -> None:
    requests = [
        make_request("plain"),
        make_request("many", n=3, temperature=0.7),
        make_request("scored", logprobs=3, prompt_logprobs=2),
        make_request("stopped", [5, 6, 7], stop_token_ids=[7], ignore_eos=False),
        make_request("biased", logit_bias={3: 1.5}, seed=2**62, stop=["a", "b"]),
    ]
    answers = []
    for each in (core, FakeCore()):
        for request in requests:
            each.add(request)
        news = run_to_end(each, *(request.request_id for request in requests))
        assert {item.first_scheduled_time is None for item in news} == {False}
        lines: dict[tuple[str, int], list[Any]] = {}
        for item in news:
            rest = (item.token_ids, item.logprobs, item.prompt_logprobs, item.finish_reason)
            lines.setdefault((item.request_id, item.index), []).append(
                (*rest, item.stop_reason, item.num_cached_tokens)
            )
        answers.append(lines)
    assert answers[0] == answers[1]


def test_nothing_comes_of_what_was_aborted(core: RemoteCore) -> None:
    """Not even when its id lives on as another request's."""
    core.add(make_request("r", [9], n=2, max_tokens=10**6))
    run = core.step() + core.step() + core.step()
    assert {tuple(item.token_ids) for item in run} == {(9,)}
    [ending] = core.abort("r", 0)
    assert (ending.request_id, ending.index, ending.finish_reason) == ("r", 0, "abort")
    assert {item.index for _ in range(5) for item in core.step()} == {1}
    time.sleep(0.02)  # news of the old request gathers meanwhile
    assert [item.index for item in core.abort("r")] == [1]
    assert core.abort("r") == core.abort("r", 0) == core.abort("never was") == []
    core.add(make_request("r", [8]))
    news = run_to_end(core, "r")
    assert [item.token_ids for item in news] == [[8]] * 12
    wait_until(lambda: not (core.has_work and core.step()) and core.stats().num_running == 0)


def test_what_cannot_run_is_refused_and_the_core_lives_on(core: RemoteCore) -> None:
    core.add(make_request("twin"))
    with pytest.raises(InvalidRequest, match="'twin' is in use") as caught:
        core.add(make_request("twin"))
    assert caught.value.param == "request_id"
    wrong: list[dict[str, Any]] = [
        {"priority": 1.5},
        {"priority": 10**30},
        {"cache_salt": "\ud800"},
    ]
    for fields in wrong:
        request = EngineRequest("w", [1], SamplingParams(), **fields)
        with pytest.raises(InvalidRequest, match="wrong type or size"):
            core.add(request)
    run_to_end(core, "twin")


def test_resetting_waits_for_its_answer_and_loses_no_news(core: RemoteCore) -> None:
    assert core.reset_prefix_cache() is True
    prompt = list(range(100_000))
    core.add(make_request("a", prompt, max_tokens=10**6))
    tokens: list[int] = []
    for _ in range(4):
        wait_until(lambda: core.has_work)
        assert core.reset_prefix_cache() is False
        assert core.has_work
        tokens += [token for item in core.step() for token in item.token_ids]
    assert tokens == prompt[: len(tokens)]
    core.abort("a")
    assert core.reset_prefix_cache() is True


def test_messages_larger_than_the_socket_holds(core: RemoteCore) -> None:
    core.add(make_request("runs", max_tokens=10**6))
    long, scored = list(range(150_000)), list(range(20_000))
    core.add(make_request("long", long))
    core.add(make_request("scored", scored, prompt_logprobs=5))
    news = run_to_end(core, "long", "scored")
    tokens = [token for item in news if item.request_id == "long" for token in item.token_ids]
    assert tokens == long[:12]
    [scores] = [item.prompt_logprobs for item in news if item.prompt_logprobs]
    assert [score.token for score in scores] == scored[1:]
    core.abort("runs")


def test_the_process_does_not_wait_for_us_to_read(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    count = f"__import__('pathlib').Path({str(file)!r}).write_text(str(core.num_steps))"
    core = fake_remote(statement=f"core.on_step = lambda: {count}")
    core.add(make_request("wide", n=64, temperature=1.0, logprobs=5, max_tokens=300))
    # Some 2 MB of news by then.
    wait_until(lambda: file.exists() and int(file.read_text() or 0) > 300)
    news = run_to_end(core, "wide")
    assert sum(len(item.token_ids) for item in news) == 64 * 300
    core.close()


def test_no_news_no_work_no_cpu(core: RemoteCore) -> None:
    core.add(make_request("a"))
    run_to_end(core, "a")
    process = psutil.Process(core.pid)
    comes_to_rest(lambda: sum(process.cpu_times()[:2]))
    while core.has_work:  # the last news came behind the end
        core.step()
    comes_to_rest(lambda: sum(process.cpu_times()[:2]))
    assert not core.has_work


def test_a_failing_step_is_told_as_it_is() -> None:
    core = fake_remote("dies_at=4")
    core.add(make_request("a", n=2))
    core.add(make_request("b"))
    ends = [item for item in run_to_end(core, "a", "b") if item.finish_reason]
    assert sorted((item.request_id, item.index) for item in ends) == [("a", 0), ("a", 1), ("b", 0)]
    assert {(item.finish_reason, item.error) for item in ends} == {("error", "the device fell off")}
    check_is_dead(core, "the device fell off")


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("core.on_step = lambda: os._exit(3)", "the engine process ended with exit status 3"),
        ("core.on_step = lambda: 1 / 0", "the engine stopped: ZeroDivisionError: division by zero"),
        ("core.on_step = lambda: os.kill(os.getpid(), 9)", r"ended by signal 9 \(Killed\)"),
    ],
)
def test_a_crash_ends_every_request(statement: str, reason: str) -> None:
    core = fake_remote(statement=statement)
    core.add(make_request("a", n=2))
    news = run_to_end(core, "a")
    assert [(item.index, item.finish_reason) for item in news] == [(0, "error"), (1, "error")]
    check_is_dead(core, reason)


def test_death_shows_without_requests() -> None:
    core = fake_remote()
    assert not core.has_work
    os.kill(core.pid, signal.SIGKILL)
    wait_until(lambda: core.has_work)
    check_is_dead(core, "signal 9")


def check_is_dead(core: RemoteCore, reason: str) -> None:
    calls = (core.step, core.reset_prefix_cache, lambda: core.add(make_request("late")))
    for call in calls:
        with pytest.raises(EngineDead, match=reason):
            call()
    assert core.has_work, "so that someone asks, and hears it"
    assert core.abort("a") == []
    core.close()
    core.close()
    assert is_gone(core.pid)


errors = "import paged.errors; raise paged.errors."
loading = "import paged.models.loading; raise paged.models.loading."


@pytest.mark.parametrize(
    ("statement", "kind", "message"),
    [
        (errors + "ConfigError('too small: 3')", ConfigError, "too small: 3"),
        (loading + "CheckpointError('a hole')", CheckpointError, "a hole"),
        ("raise KeyError('a bug')", EngineDead, "the engine stopped: KeyError: 'a bug'"),
        ("os._exit(7)", EngineDead, "the engine process ended with exit status 7"),
    ],
)
def test_errors_at_the_start_come_over(
    statement: str, kind: type[Exception], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kind) as caught:
        fake_remote(statement=statement)
    assert (type(caught.value), str(caught.value)) == (kind, message)
    shown = capfd.readouterr().err
    assert ("Traceback" in shown) == ("bug" in statement), (
        "a bug shows where it is, a mistake does not"
    )


def test_closing_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_core_module, "TIME_TO_CLOSE", 0.3)
    core = fake_remote(statement=HANG)
    core.add(make_request("a"))
    core.close()
    assert is_gone(core.pid)
    with pytest.raises(EngineDead, match="the engine was closed"):
        core.add(make_request("b"))


CLOSING = (
    "import time; from paged.runtime.messages import Saving; core.closing = lambda: ("
    "(time.sleep(0.1), Saving(0, 9, {left}))[1] for _ in range({count}))"
)


def test_closing_waits_as_long_as_the_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it says at first: that for pages, and the time that it has in any case."""
    limits: list[float] = []
    wait = Channel.wait

    def patient(channel: Channel, seconds: float) -> bool:
        limits.append(seconds)
        return wait(channel, 30)

    monkeypatch.setattr(Channel, "wait", patient)
    remote = fake_remote(statement=CLOSING.format(left=40.0, count=6))
    remote.close()
    assert is_gone(remote.pid)
    first, *others = limits
    assert first <= TIME_TO_CLOSE < max(others) <= 40 + TIME_TO_CLOSE
    assert others[-1] < max(others), "later ones take nothing back"


def test_closing_waits_no_longer_than_the_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_core_module, "TIME_TO_CLOSE", 0.5)
    remote = fake_remote(statement=CLOSING.format(left=0.0, count=10**6))
    started = time.monotonic()
    remote.close()
    assert time.monotonic() - started < 60  # it would go on for a day
    assert is_gone(remote.pid)


def test_signals_to_the_whole_group_leave_it_alone(core: RemoteCore) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(core.pid, number)
    core.add(make_request("a"))
    run_to_end(core, "a")


def test_this_process_hears_signals_as_before(core: RemoteCore) -> None:
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT, signal.SIGTERM}


@pytest.mark.parametrize(
    ("statement", "call", "prints"),
    [
        ("", "pass", "ready"),
        (HANG, "core.add(make_request('a'))", "ready"),
        ("print('loading', flush=True); time.sleep(60)", "pass", "loading"),
    ],
    ids=["idle", "in a step", "loading"],
)
def test_it_leaves_with_its_parent(statement: str, call: str, prints: str) -> None:
    script = f"""
import os, time
from paged.runtime import child_process
from tests.runtime.remote import fake_remote, make_request
spawn = child_process._spawn
def spy(*arguments):
    process = spawn(*arguments)
    print(process.pid, flush=True)
    return process
child_process._spawn = spy
core = fake_remote(statement={statement!r})
{call}
print("ready", flush=True)
time.sleep(60)
"""
    argv = [sys.executable, "-c", script]
    with spawned(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline().strip() == prints
        assert not is_gone(pid)
        parent.kill()
        parent.wait()
        wait_until(lambda: is_gone(pid))


# From here on, through the whole engine.


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    engine = make_engine(monkeypatch, "step_time=0.002")
    yield engine
    engine.shutdown()
    assert is_gone(pid_of(engine))


def make_engine(monkeypatch: pytest.MonkeyPatch, settings: str) -> AsyncEngine:
    monkeypatch.setattr(
        async_engine_module,
        "load_engine",
        lambda _, **how: remote_engine(settings, max_model_len=2 * 10**6),
    )
    return AsyncEngine(separate_process=True)


def remote_of(engine: AsyncEngine) -> Any:
    return engine._keeper.thread._engine._core


def pid_of(engine: AsyncEngine) -> int:
    pid: int = remote_of(engine).pid
    return pid


def test_text_streams(engine: AsyncEngine) -> None:
    async def begin() -> list[RequestOutput]:
        outputs = list[RequestOutput]()
        async with aclosing(engine.generate("abc", ENDLESS)) as stream:
            while len(outputs) < 6:
                outputs.append(await anext(stream))
        return outputs

    found = text(asyncio.run(begin()))
    assert found == ("abc" * len(found))[: len(found)]
    params = SamplingParams(max_tokens=40, output_kind=RequestOutputKind.DELTA)
    assert text(asyncio.run(collect(engine, "abc", params))) == ("abc" * 14)[:40]
    stopped = asyncio.run(collect(engine, "abc", SamplingParams(max_tokens=10**2, stop="ca")))
    assert stopped[-1].outputs[0].text == "ab"


def test_a_close_look(engine: AsyncEngine) -> None:
    assert engine.about is None or engine.about.memory == MEMORY

    async def run() -> None:
        request = asyncio.create_task(collect(engine, "ab", ENDLESS, "r"))
        await until(lambda: engine.stats().num_running)
        looks = await asyncio.gather(*(engine.look() for _ in range(5)))
        assert {look.process.pid for look in looks} == {remote_of(engine).pid}
        lengths = [len(look.pages) for look in looks]  # of the fake, a page for each step
        assert lengths == sorted(lengths)
        leaving = asyncio.create_task(engine.look())
        await asyncio.sleep(0)
        leaving.cancel()
        await engine.abort("r")
        await request
        assert (await engine.look()).sequences == []

    asyncio.run(run())


@pytest.mark.parametrize("ends", ["dies", "is shut down", "is gone"])
def test_a_look_that_never_comes(ends: str) -> None:
    """Whoever waits for it is told so."""
    does = "os._exit(3)" if ends == "dies" else "None"
    thread = EngineThread(remote_engine(statement=f"core.look = lambda deliver: {does}"))
    if ends == "is gone":
        os.kill(thread._engine._core.pid, signal.SIGKILL)  # type: ignore[attr-defined]

    def look() -> None:
        found = thread.look()  # raises, if it is known to be gone
        if ends == "is shut down":
            thread.shutdown()
        found.result(30)

    with pytest.raises(EngineDead):
        look()
    thread.shutdown()


def test_stats_follow_aborts(engine: AsyncEngine) -> None:
    async def run() -> None:
        request = asyncio.create_task(collect(engine, "ab", ENDLESS, "r"))
        await until(lambda: engine.stats().num_running)
        await engine.abort("r")
        assert (await request)[-1].outputs[0].finish_reason == "abort"
        await until(lambda: engine.stats().num_running == 0)

    asyncio.run(run())
    assert asyncio.run(engine.reset_prefix_cache()) is True


def test_two_hundred_fickle_requests_leave_nothing_behind(engine: AsyncEngine) -> None:
    async def run() -> list[str]:
        chances = [random.Random(number) for number in range(200)]
        requests = [fickle(engine, number, chance) for number, chance in enumerate(chances)]
        fates = await asyncio.gather(*requests)
        thread, core = engine._keeper.thread, remote_of(engine)
        await until(lambda: engine.stats().num_running == 0)
        await until(lambda: not (core._live or thread._streams or thread._engine.request_ids))
        return fates

    assert set(asyncio.run(run())) == {"end", "break", "abort", "cancel"}
    assert engine.is_running


def test_a_killed_process_reaches_everyone(engine: AsyncEngine) -> None:
    async def run() -> list[Any]:
        params = SamplingParams(max_tokens=10**6, n=2, temperature=1.0)
        requests = [asyncio.create_task(collect(engine, "ab", params)) for _ in range(5)]
        await until(lambda: engine.stats().num_running == 10)
        os.kill(pid_of(engine), signal.SIGKILL)
        return await asyncio.gather(*requests)

    for outputs in asyncio.run(run()):
        assert [each.finish_reason for each in outputs[-1].outputs] == ["error", "error"]
        assert "signal 9" in (outputs[-1].outputs[0].error or "")
    check_dies(engine, "signal 9")


def test_an_idle_engine_notices_the_death(engine: AsyncEngine) -> None:
    os.kill(pid_of(engine), signal.SIGKILL)
    check_dies(engine, "signal 9")


def test_both_processes_sleep_when_idle(engine: AsyncEngine) -> None:
    asyncio.run(collect(engine, "ab"))
    process = psutil.Process(pid_of(engine))
    comes_to_rest(lambda: thread_seconds(engine._keeper.thread._thread))
    comes_to_rest(lambda: sum(process.cpu_times()[:2]))
