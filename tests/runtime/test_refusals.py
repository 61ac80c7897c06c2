"""What callers hear when the core does not take a request, or it runs out of time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from paged.runtime.async_engine import AsyncEngine
from paged.runtime.beam_search import BeamSearchParams
from paged.runtime.errors import DeadlineExceeded, InvalidRequest, Overloaded
from paged.runtime.live_requests import refused
from paged.runtime.messages import EngineRequest, Refusal, SequenceOutput, Terms
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import FakeCore
from tests.runtime.test_async_engine import collect, make, nothing_left

FULL = Refusal("queue", "full", 3.5)
CAUSES = [
    (FULL, Overloaded),
    (Refusal("deadline", "too late", 2.0), Overloaded),
    (Refusal("deadline", "over", 0.0), DeadlineExceeded),
    (Refusal("size", "too many", 0.0), InvalidRequest),
]


@dataclass(eq=False)
class RefusingCore(FakeCore):
    """Takes what has no terms, and `num_taken` requests more."""

    refusal: Refusal = FULL
    num_taken: int = 0
    terms: list[Terms] = field(default_factory=list)
    news: list[SequenceOutput] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return super().has_work or bool(self.news)

    def add(self, request: EngineRequest) -> None:
        self.terms.append(request.terms)
        self.num_taken -= 1
        if self.num_taken < 0 and request.terms != Terms():
            self.news += refused(request, self.refusal)
        else:
            super().add(request)

    def step(self) -> list[SequenceOutput]:
        news, self.news = self.news, []
        return news + super().step()


@pytest.fixture
def core() -> RefusingCore:
    return RefusingCore()


@pytest.fixture
def engine(core: RefusingCore, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncEngine]:
    engine = make(core, monkeypatch, max_logprobs=20)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize(("refusal", "expected"), CAUSES)
@pytest.mark.parametrize("n", [1, 3])
def test_a_refusal_is_raised_once_before_any_output(
    engine: AsyncEngine, core: RefusingCore, refusal: Refusal, expected: type[Exception], n: int
) -> None:
    core.refusal = refusal
    with pytest.raises(expected, match=refusal.message) as error:
        asyncio.run(collect(engine, "ab", SamplingParams(n=n)))
    if isinstance(error.value, Overloaded):
        assert error.value.retry_after == refusal.retry_after
        assert error.value.cause == refusal.cause
    assert core.terms == [Terms(0.0, n, 2)]
    assert nothing_left(engine, core)
    assert core.aborted == [], "there was nothing to end"


def test_others_go_on(engine: AsyncEngine, core: RefusingCore) -> None:
    core.num_taken = 1

    async def both() -> tuple[object, object]:
        params = SamplingParams(max_tokens=40)
        running = asyncio.create_task(collect(engine, "ab", params))
        while not core.terms:  # until it was taken, however soon it ends
            await asyncio.sleep(0.001)
        refused = await asyncio.gather(collect(engine, "cd", params), return_exceptions=True)
        return refused[0], (await running)[-1].outputs[0].text

    error, text = asyncio.run(both())
    assert isinstance(error, Overloaded)
    assert text == "ab" * 20


def test_a_search_asks_once_for_all_its_beams(engine: AsyncEngine, core: RefusingCore) -> None:
    core.num_taken = 10**6
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    asyncio.run(engine.beam_search("ab", params, terms=Terms(1e9, 2, 2)))
    assert core.terms[0] == Terms(1e9, 2, 2)
    assert set(core.terms[1:]) == {Terms(1e9)}


def test_a_search_may_run_out_of_time(engine: AsyncEngine, core: RefusingCore) -> None:
    core.num_taken, core.refusal = 1, Refusal("deadline", "too late", 2.0)
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    with pytest.raises(DeadlineExceeded, match="too late"):
        asyncio.run(engine.beam_search("ab", params, terms=Terms(1e9, 2, 2)))
    core.num_taken = 0
    with pytest.raises(Overloaded):
        asyncio.run(engine.beam_search("ab", params))
