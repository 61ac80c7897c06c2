"""Requests of many threads and loops, computed together, and how each may end."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest

from paged.runtime.errors import EngineDead, InvalidRequest, Unsupported
from paged.runtime.pooling.comparison import pair_up
from tests.runtime.pooling.pooling_fakes import LETTERS, FakeRunner, pooling_engine
from tests.runtime.remote import wait_until

SECONDS = 20


@pytest.fixture
def runner():
    return FakeRunner()


@pytest.fixture
def engine(runner):
    engine = pooling_engine(runner)
    yield engine
    engine.shutdown()


def held(engine, runner, text="a"):
    """A request whose launch waits for the gate."""
    runner.gate.clear()
    future = engine.embed(engine.reader.texts([text]))
    assert runner.entered.wait(SECONDS)
    return future


def test_outputs_come_in_the_order_of_the_texts(engine):
    texts = engine.reader.texts(["a" * size for size in (20, 1, 9, 3, 15, 2, 4)])
    outputs = engine.embed(texts).result(SECONDS)
    assert [output.prompt_token_ids for output in outputs] == [text.token_ids for text in texts]
    assert [int(output.outputs.embedding[1]) for output in outputs] == [22, 3, 11, 5, 17, 4, 6]


def test_requests_share_batches(engine, runner):
    first = held(engine, runner)
    others = [engine.embed(engine.reader.texts([letter])) for letter in "bcd"]
    assert engine.stats().num_waiting == 3
    runner.gate.set()
    assert [future.result(SECONDS)[0].outputs.embedding[0] for future in [first, *others]] == [
        *(3, 4, 5, 6)
    ]
    assert [len(batch.texts) for batch in runner.batches] == [1, 3]
    stats = engine.stats()
    assert (stats.num_steps, stats.prompt_tokens) == (2, 12)
    assert (stats.num_running, stats.num_waiting) == (0, 0)


def test_a_cancelled_request_is_not_computed(engine, runner):
    first = held(engine, runner)
    future = engine.embed(engine.reader.texts(["b", "c"]))
    assert future.cancel()
    runner.gate.set()
    first.result(SECONDS)
    last = engine.embed(engine.reader.texts(["d"])).result(SECONDS)
    assert last[0].outputs.embedding[0] == 6
    with pytest.raises(CancelledError):
        future.result(SECONDS)
    assert sum(len(batch.texts) for batch in runner.batches) == 2


def test_a_request_cancelled_on_its_way_harms_nobody(engine, runner):
    future = held(engine, runner)
    assert future.cancel()
    runner.gate.set()
    assert len(engine.embed(engine.reader.texts(["b"])).result(SECONDS)) == 1
    assert not engine.errored


def test_progress_is_told(engine):
    told: list[int] = []
    engine.embed(engine.reader.texts(["a", "b" * 20]), advance=told.append).result(SECONDS)
    assert sum(told) == 2


def test_progress_that_fails_ends_its_request_alone(engine, runner):
    """As it does when standard error is closed."""

    def broken(number: int) -> None:
        raise BrokenPipeError("nobody reads this")

    first = held(engine, runner)
    second = engine.embed(engine.reader.texts(["b", "c", "d", "e" * 20]), advance=broken)
    runner.gate.set()
    with pytest.raises(BrokenPipeError):
        second.result(SECONDS)
    assert len(first.result(SECONDS)) == 1
    assert len(engine.embed(engine.reader.texts(["b"])).result(SECONDS)) == 1
    assert not engine.errored


@pytest.mark.parametrize(
    ("queries", "documents"),
    [("a", 5), (None, "a"), ("a", [None]), (["a"], [["b"]]), ([1], ["a"]), ("a", b"b"), (2, 3)],
)
def test_only_texts_are_scored(queries, documents):
    with pytest.raises(InvalidRequest, match="a text, or a list of texts"):
        pair_up(queries, documents)


def test_no_cosine_is_above_1():
    engine = pooling_engine()
    pairs = [(text, text) for text in LETTERS]
    outputs = engine.score(engine.compare(pairs)).result(SECONDS)
    assert max(output.outputs.score for output in outputs) <= 1
    engine.shutdown()


@pytest.mark.parametrize("failure", [{"fails_at": 1}, {"refuses_at": 1}])
def test_a_failed_step_ends_every_request(failure):
    runner = FakeRunner(**failure)
    engine = pooling_engine(runner)
    first = held(engine, runner)
    others = [engine.embed(engine.reader.texts(["b" * size])) for size in (1, 20)]
    runner.gate.set()
    for future in others:
        with pytest.raises(EngineDead, match="RuntimeError: "):
            future.result(SECONDS)
    assert first.exception(SECONDS) is None or failure == {"refuses_at": 1}
    engine.shutdown()
    assert engine.errored
    assert runner.closed
    with pytest.raises(EngineDead, match="RuntimeError: "):
        engine.embed(engine.reader.texts(["a"]))


def test_an_answer_that_cannot_be_made_ends_its_request_alone(engine):
    texts = engine.reader.texts(["a"])
    future = engine._keeper.thread.submit(texts, lambda vectors: vectors[5])
    with pytest.raises(IndexError):
        future.result(SECONDS)
    assert len(engine.embed(texts).result(SECONDS)) == 1


def test_shutdown_ends_what_runs_and_what_waits(engine, runner):
    running = held(engine, runner)
    waiting = engine.embed(engine.reader.texts(["b" * 20]))
    stopper = threading.Thread(target=engine.shutdown)
    stopper.start()
    wait_until(lambda: engine._keeper.thread._closed)
    runner.gate.set()
    stopper.join(SECONDS)
    for future in (running, waiting):
        with pytest.raises(EngineDead, match="shut down"):
            future.result(SECONDS)
    assert runner.closed
    assert not engine.errored
    assert engine.stats().num_waiting == 0
    engine.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        engine.embed(engine.reader.texts(["a"]))


def test_an_engine_that_nobody_holds_ends(runner):
    engine = pooling_engine(runner)
    gone = weakref.ref(engine)
    engine.embed(engine.reader.texts(["a"])).result(SECONDS)
    del engine
    gc.collect()
    assert gone() is None
    assert runner.closed


def test_leaving_a_loop_cancels(engine, runner):
    async def leave():
        runner.gate.clear()
        future = engine.embed(engine.reader.texts(["b"]))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(future), 0.05)
        return future

    future = asyncio.run(leave())
    runner.gate.set()
    assert future.cancelled()


def test_many_threads_at_once(engine):
    failures = []

    def work(number):
        texts = ["abcdefgh"[: 1 + (number + index) % 8] for index in range(20)]
        outputs = engine.embed(engine.reader.texts(texts)).result(SECONDS)
        lengths = [int(output.outputs.embedding[1]) - 2 for output in outputs]
        if lengths != [len(text) for text in texts]:
            failures.append(lengths)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not failures


def test_vectors_are_cut_where_the_model_allows_it():
    engine = pooling_engine(dimensions=(2, 3))
    texts = engine.reader.texts(["a"])
    [output] = engine.embed(texts, 2).result(SECONDS)
    np.testing.assert_allclose(output.outputs.embedding, np.array([3, 3]) / np.sqrt(18), rtol=1e-6)
    [output] = engine.embed(texts, 4).result(SECONDS)
    assert len(output.outputs.embedding) == 4
    with pytest.raises(InvalidRequest, match=r"one of \(2, 3\), got 1"):
        engine.embed(texts, 1)
    engine.shutdown()


@pytest.mark.parametrize(
    ("dimensions", "asked", "words"),
    [
        ((), 2, "may not be cut"),
        (None, 0, "1 to 4, got 0"),
        (None, 5, "1 to 4, got 5"),
        (None, True, "a whole number, got True"),
        (None, 4.0, r"a whole number, got 4\.0"),
        (None, "4", "a whole number, got '4'"),
        (None, float("nan"), "a whole number, got nan"),
    ],
)
def test_other_dimensions_are_refused(dimensions, asked, words):
    engine = pooling_engine(dimensions=dimensions)
    with pytest.raises(InvalidRequest, match=words):
        engine.embed(engine.reader.texts(["a"]), asked)
    engine.shutdown()


def test_scores_of_vectors_are_cosines(engine, runner):
    pairs = [("a", "b"), ("a", "a"), ("a", "c")]
    outputs = engine.score(engine.compare(pairs)).result(SECONDS)
    a, b = np.array([3, 3, 0, 1]), np.array([4, 3, 0, 1])
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert outputs[0].outputs.score == pytest.approx(cosine, abs=1e-6)
    assert outputs[1].outputs.score == pytest.approx(1, abs=1e-6)
    assert len(outputs[0].prompt_token_ids) == 6
    assert sum(len(batch.texts) for batch in runner.batches) == 3, "each different text once"


def test_a_classifier_reads_pairs_and_gives_no_vectors():
    engine = pooling_engine(scores=True)
    [output] = engine.score(engine.compare([("a", "b")])).result(SECONDS)
    assert output.prompt_token_ids == [0, 2, 1, 3, 1]
    assert output.outputs.score == sum(output.prompt_token_ids)
    with pytest.raises(Unsupported, match="no embeddings"):
        engine.embed(engine.reader.texts(["a"]))
    engine.shutdown()
