"""`AsyncEngine` around the core without a device: streams, and whoever leaves them."""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest

from paged.runtime import async_engine as async_engine_module
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.engine_thread import EngineThread, Stream
from paged.runtime.errors import InvalidRequest
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fakes import EOS, FakeCore, echo
from tests.runtime.fakes import engine as fake_engine
from tests.runtime.remote import comes_to_rest, thread_seconds, wait_until

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
LONG = SamplingParams(max_tokens=150, output_kind=DELTA)
ENDLESS = SamplingParams(max_tokens=10**6, output_kind=DELTA)  # however slow the machine is


@pytest.fixture
def core() -> FakeCore:
    return FakeCore(step_time=0.001)


@pytest.fixture
def engine(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    engine = make(core, monkeypatch)
    yield engine
    engine.shutdown()
    assert core.closed
    assert core.live == {}


@pytest.fixture
def tireless(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    """One for requests that end by other means than their length."""
    engine = make(core, monkeypatch, max_model_len=2 * 10**6)
    yield engine
    engine.shutdown()


def make(core: FakeCore, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> AsyncEngine:
    monkeypatch.setattr(
        async_engine_module, "load_engine", lambda config, **how: fake_engine(core, **changes)
    )
    return AsyncEngine()


async def collect(engine: AsyncEngine, *arguments: Any, **settings: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*arguments, **settings)]


def text(outputs: list[RequestOutput]) -> str:
    """The first sequence's text of a DELTA stream."""
    pieces = [each.text for output in outputs for each in output.outputs if each.index == 0]
    return "".join(pieces)


async def together(core: FakeCore, *requests: Coroutine[Any, Any, Any]) -> list[Any]:
    """What requests come to that are all there before the second step."""
    gate, on_step = threading.Event(), core.on_step

    def held() -> None:
        assert gate.wait(30)
        on_step()

    core.on_step = held
    tasks = [asyncio.ensure_future(request) for request in requests]
    await asyncio.sleep(0)  # each is on its way to the engine now
    gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def nothing_left(engine: AsyncEngine, core: FakeCore) -> bool:
    thread = engine._keeper.thread
    left = core.live or thread._streams or thread._engine.request_ids
    return not left and thread._inbox.empty()


@pytest.mark.parametrize(
    ("kind", "last"), [(CUMULATIVE, "abab"), (FINAL_ONLY, "abab"), (DELTA, None)]
)
def test_a_stream_ends_with_its_request(engine, kind, last):
    params = SamplingParams(max_tokens=4, output_kind=kind)
    outputs = asyncio.run(collect(engine, "ab", params, "r"))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].request_id == "r"
    if last is None:
        assert text(outputs) == "abab"
    else:
        assert outputs[-1].outputs[0].text == last
    assert len(outputs) == 1 or kind is not FINAL_ONLY


def test_defaults(engine):
    outputs = asyncio.run(collect(engine, "ab"))
    assert outputs[-1].outputs[0].text == "ab" * 8
    assert engine.default_sampling_params == SamplingParams(max_tokens=16)
    assert engine.max_model_len == 200
    assert engine.tokenizer is not None
    assert engine.config == EngineConfig()
    assert (engine.is_running, engine.errored, engine.dead_error) == (True, False, None)


def test_from_config(core, monkeypatch):
    make(core, monkeypatch).shutdown()
    config = EngineConfig(model="m", block_size=32)
    engine = AsyncEngine.from_config(config)
    assert engine.config == config
    engine.shutdown()


def test_many_requests_run_together(engine, core):
    async def run() -> list[list[RequestOutput]]:
        params = SamplingParams(max_tokens=20, output_kind=DELTA)
        return await together(core, *(collect(engine, chr(97 + i), params) for i in range(20)))

    results = asyncio.run(run())
    assert [text(outputs) for outputs in results] == [chr(97 + i) * 20 for i in range(20)]
    assert core.num_steps < 60


def test_invalid_requests_fail_before_their_first_output(engine, core):
    for prompt, params in (("", None), ("a", SamplingParams(logprobs=9)), ([10**9], None)):
        with pytest.raises(InvalidRequest):
            asyncio.run(collect(engine, prompt, params))
    assert nothing_left(engine, core)


def test_an_id_in_use_is_refused_and_its_owner_lives_on(tireless, core):
    is_over = threading.Event()
    core.next_token = lambda *place: EOS if is_over.is_set() else echo(*place)

    async def run() -> str:
        first = tireless.generate("ab", ENDLESS, "same")
        outputs = [await anext(first)]
        with pytest.raises(InvalidRequest) as caught:
            await collect(tireless, "cd", LONG, "same")
        assert caught.value.param == "request_id"
        steps = core.num_steps
        await until(lambda: core.num_steps > steps + 9)
        is_over.set()
        outputs += [output async for output in first]
        assert outputs[-1].outputs[0].finish_reason == "stop"
        await collect(tireless, "cd", LONG, "same")
        return text(outputs)

    found = asyncio.run(run())
    assert len(found) > 9
    assert found == ("ab" * len(found))[: len(found)]


async def leave_by_break(engine: AsyncEngine) -> None:
    async for _ in engine.generate("ab", ENDLESS):
        break


async def leave_by_closing(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("ab", ENDLESS)) as stream:
        await anext(stream)


async def leave_by_error(engine: AsyncEngine) -> None:
    async def consume() -> None:
        async for _ in engine.generate("ab", ENDLESS):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await consume()


async def leave_by_cancellation(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, "ab", ENDLESS))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_timeout(engine: AsyncEngine) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await collect(engine, "ab", ENDLESS)


@pytest.mark.parametrize(
    "leave",
    [leave_by_break, leave_by_closing, leave_by_error, leave_by_cancellation, leave_by_timeout],
)
def test_leaving_aborts_within_a_step(tireless, core, leave, monkeypatch):
    core.step_time = 0.005
    steps: list[int] = []
    leave_stream = EngineThread.leave

    def left(thread: EngineThread, stream: Stream) -> None:
        leave_stream(thread, stream)
        steps.append(core.num_steps)

    monkeypatch.setattr(EngineThread, "leave", left)

    async def run() -> None:
        await leave(tireless)
        await until(lambda: steps and nothing_left(tireless, core) and not core.has_work)
        assert core.aborted
        assert core.num_steps <= steps[0] + 2

    asyncio.run(run())


def test_abort_ends_the_stream(tireless, core):
    async def run() -> list[RequestOutput]:
        task = asyncio.create_task(collect(tireless, "ab", ENDLESS, "r"))
        await until(lambda: core.live)
        await tireless.abort("r")
        assert core.live == {}
        await tireless.abort("r")
        await tireless.abort("never was")
        return await task

    outputs = asyncio.run(run())
    assert outputs[-1].finished
    assert outputs[-1].outputs[0].finish_reason == "abort"


def test_a_stop_string_aborts_its_sequence(engine, core):
    params = SamplingParams(max_tokens=9, stop="cab", n=2)
    outputs = asyncio.run(collect(engine, "abc", params, "r"))
    assert [each.text for each in outputs[-1].outputs] == ["ab", "b"]
    assert {each.stop_reason for each in outputs[-1].outputs} == {"cab"}
    assert sorted(core.aborted) == [("r", 0), ("r", 1)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_slow_consumer_delays_nobody_and_loses_nothing(engine, core, kind):
    params = SamplingParams(max_tokens=150, output_kind=kind, n=2, logprobs=1)

    async def run() -> list[RequestOutput]:
        outputs = []
        async for output in engine.generate("abc", params):
            outputs.append(output)
            quick = await collect(engine, "x" * 10, SamplingParams(max_tokens=10))
            assert quick[-1].outputs[0].text == "x" * 10
            await until(lambda: not core.live)
            await engine.reset_prefix_cache()  # between two steps: all news are delivered
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) <= 2
    for index, expected in enumerate(["abc" * 50, "bca" * 50]):
        mine = [each for output in outputs for each in output.outputs if each.index == index]
        mine = mine if kind is DELTA else mine[-1:]
        assert "".join(each.text for each in mine) == expected
        assert sum(len(each.token_ids) for each in mine) == 150
        assert sum(len(each.logprobs or ()) for each in mine) == 150
        assert mine[-1].cumulative_logprob == -300.0


def test_an_idle_engine_sleeps(engine, core):
    asyncio.run(collect(engine, "ab", LONG))
    while core.has_work:  # the answer is out before the step ahead of it is
        time.sleep(0.01)
    steps = core.num_steps
    comes_to_rest(lambda: thread_seconds(engine._keeper.thread._thread))
    assert core.num_steps == steps


def test_several_event_loops(engine):
    results: dict[int, str] = {}

    def work(number: int) -> None:
        outputs = asyncio.run(collect(engine, chr(97 + number), LONG))
        results[number] = text(outputs)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: chr(97 + number) * 150 for number in range(4)}


def test_a_closed_event_loop_takes_its_requests_along(tireless, core):
    loop = asyncio.new_event_loop()
    stream = tireless.generate("ab", ENDLESS)
    loop.run_until_complete(anext(stream))
    loop.close()
    asyncio.run(until(lambda: nothing_left(tireless, core)))
    assert core.aborted
    assert asyncio.run(collect(tireless, "ab"))[-1].finished


def test_calls_between_steps(tireless):
    assert asyncio.run(tireless.reset_prefix_cache()) is True

    async def run() -> bool:
        async with aclosing(tireless.generate("ab", ENDLESS)) as stream:
            await anext(stream)
            assert tireless.stats().num_running == 1
            return await tireless.reset_prefix_cache()

    assert asyncio.run(run()) is False


def test_a_call_cancelled_in_the_inbox_harms_nobody(engine, core):
    core.step_time = 0.05

    async def run() -> None:
        task = asyncio.create_task(collect(engine, "ab", SamplingParams(max_tokens=4)))
        await until(lambda: core.num_steps)
        for call in (engine.reset_prefix_cache(), engine.abort("other")):
            waiter = asyncio.ensure_future(call)
            await asyncio.sleep(0)
            waiter.cancel()
        assert (await task)[-1].finished

    asyncio.run(run())
    assert engine.is_running


def test_long_prompts_leave_the_event_loop_free(core, monkeypatch):
    engine = make(core, monkeypatch, max_model_len=10**6)
    threads = set()
    prepare = type(engine._front).prepare

    def spy(self: Any, *arguments: Any, **settings: Any) -> Any:
        threads.add(threading.current_thread())
        return prepare(self, *arguments, **settings)

    monkeypatch.setattr(type(engine._front), "prepare", spy)
    for prompt in ("x" * 20_000, {"prompt": "x" * 20_000}):
        outputs = asyncio.run(collect(engine, prompt, SamplingParams(max_tokens=1)))
        assert len(outputs[-1].prompt_token_ids) == 20_000
    assert threading.main_thread() not in threads
    engine.shutdown()


async def fickle(engine: AsyncEngine, number: int, chance: random.Random) -> str:
    """Run one request to one of the ends that requests come to."""
    kind = chance.choice(list(RequestOutputKind))
    n = chance.choice([1, 1, 3])
    params = SamplingParams(
        max_tokens=chance.randint(1, 60), output_kind=kind, n=n, stop=chance.choice([None, "ccc"])
    )
    prompt, fate = (
        chance.choice(["ab", "abccc"]),
        chance.choice(["end", "break", "abort", "cancel"]),
    )
    request_id = str(number)
    if fate == "break":
        async with aclosing(engine.generate(prompt, params, request_id)) as stream:
            async for _ in stream:
                if chance.random() < 0.3:
                    break
        return fate
    task = asyncio.create_task(collect(engine, prompt, params, request_id))
    if fate != "end":
        await asyncio.sleep(chance.random() * 0.05)
    if fate == "abort":
        await engine.abort(request_id)
    if fate == "cancel":
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return fate
    outputs = await task
    assert outputs[-1].finished or fate == "abort"
    return fate


def test_two_hundred_fickle_requests_leave_nothing_behind(core, monkeypatch):
    core.step_time = 0.0005
    engine = make(core, monkeypatch)

    async def run() -> list[str]:
        chances = [random.Random(number) for number in range(200)]
        requests = [fickle(engine, number, chance) for number, chance in enumerate(chances)]
        fates = await asyncio.gather(*requests)
        await until(lambda: nothing_left(engine, core))
        return fates

    fates = asyncio.run(run())
    assert set(fates) == {"end", "break", "abort", "cancel"}
    assert engine.is_running
    engine.shutdown()


def test_whatever_is_wrong_with_a_request_ends_that_one_alone(
    engine: AsyncEngine, core: FakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = engine._keeper.thread._engine._processor
    add = processor.add

    def add_unless_bad(request: Any, prompt: str | None) -> None:
        if request.request_id == "bad":
            raise RuntimeError("nobody thought of this")
        add(request, prompt)

    monkeypatch.setattr(processor, "add", add_unless_bad)

    async def run() -> list[RequestOutput]:
        good = asyncio.create_task(collect(engine, "good", LONG, "good"))
        with pytest.raises(RuntimeError, match="nobody thought of this"):
            await collect(engine, "bad", LONG, "bad")
        return await good

    assert asyncio.run(run())[-1].finished
    assert engine.is_running
    wait_until(lambda: nothing_left(engine, core))
