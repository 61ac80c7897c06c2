import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.models.tokenizer import Tokenizer
from paged.runtime.detokenizer import Detokenizer
from paged.runtime.messages import EngineRequest, SequenceOutput
from paged.runtime.outputs import RequestOutput, join_deltas
from paged.runtime.processor import OutputProcessor
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fakes import EOS, byte_tokenizer, candidates

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
TOKENIZER = byte_tokenizer()


class Request:
    """One request at a processor, fed text by text."""

    def __init__(self, params: SamplingParams, *, prompt: str = "p", **settings: Any) -> None:
        self.params = params
        self.processor = settings.get("processor") or OutputProcessor(
            settings.get("tokenizer", TOKENIZER)
        )
        self.request_id = settings.get("request_id", "r")
        self.aborts: list[tuple[str, int]] = []
        request = EngineRequest(self.request_id, list(prompt.encode()), params, arrival_time=1.0)
        self.processor.add(request, prompt)

    def feed(self, text: str | list[int], index: int = 0, **fields: Any) -> RequestOutput | None:
        """News of one sequence; the output it gives, if any."""
        token_ids = list(text.encode()) if isinstance(text, str) else text
        if self.params.logprobs is not None:
            fields["logprobs"] = [candidates(token, self.params.logprobs) for token in token_ids]
        return self.process(SequenceOutput(self.request_id, index, token_ids, **fields))

    def process(self, *news: SequenceOutput) -> RequestOutput | None:
        outputs, aborts = self.processor.process(news)
        self.aborts += aborts
        assert len(outputs) <= 1
        return outputs[0] if outputs else None


def texts(output: RequestOutput | None) -> dict[int, str]:
    assert output is not None
    return {each.index: each.text for each in output.outputs}


def test_cumulative_outputs_hold_everything_so_far():
    request = Request(SamplingParams())
    first, second = request.feed("ab"), request.feed("c", finish_reason="length")
    assert first is not None
    assert second is not None
    assert texts(first) == {0: "ab"}
    assert first.outputs[0].token_ids == [97, 98]
    assert not first.finished
    assert not first.outputs[0].finished()
    assert texts(second) == {0: "abc"}
    assert second.finished
    assert second.outputs[0].finish_reason == "length"
    assert (second.request_id, second.prompt, second.prompt_token_ids) == ("r", "p", [112])


def test_delta_outputs_hold_what_is_new():
    request = Request(SamplingParams(output_kind=DELTA, logprobs=0))
    first, second = request.feed("ab"), request.feed("c", finish_reason="length")
    assert first is not None
    assert second is not None
    assert texts(first) == {0: "ab"}
    assert texts(second) == {0: "c"}
    assert second.outputs[0].token_ids == [99]
    assert second.outputs[0].logprobs is not None
    assert len(second.outputs[0].logprobs) == 1
    assert second.outputs[0].cumulative_logprob == -6.0


def test_final_only_gives_one_output():
    request = Request(SamplingParams(output_kind=FINAL_ONLY, n=2))
    assert request.feed("ab") is None
    assert request.feed("c", finish_reason="length") is None
    final = request.feed("x", index=1, finish_reason="stop")
    assert final is not None
    assert final.finished
    assert texts(final) == {0: "abc", 1: ""}  # the token that stops is no text


def test_sequences_of_a_request_come_together():
    for kind, second in ((CUMULATIVE, {0: "a", 1: "bc", 2: ""}), (DELTA, {1: "c"})):
        request = Request(SamplingParams(n=3, output_kind=kind))
        news = [SequenceOutput("r", 1, [98]), SequenceOutput("r", 0, [97])]
        request.process(*news)
        assert texts(request.feed("c", index=1)) == second


def test_outputs_of_several_requests_stay_apart():
    processor = OutputProcessor(TOKENIZER)
    for request_id in "ab":
        Request(SamplingParams(), processor=processor, request_id=request_id)
    outputs, _ = processor.process([SequenceOutput(each, 0, [ord(each)]) for each in "ab"])
    assert [(output.request_id, texts(output)) for output in outputs] == [
        ("a", {0: "a"}),
        ("b", {0: "b"}),
    ]


def test_a_request_is_forgotten_at_its_end():
    request = Request(SamplingParams(n=2))
    request.feed("a", finish_reason="length")
    assert request.processor.request_ids == ["r"]
    request.feed("b", index=1, finish_reason="abort")
    assert request.processor.request_ids == []
    assert request.feed("late") is None


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_held_text_comes_with_the_end(reason):
    request = Request(SamplingParams(stop=["STOP"], output_kind=DELTA))
    held = [*b"xST", *"é".encode()[:1]]
    assert texts(request.feed(held)) == {0: "x"}
    final = request.feed([], finish_reason=reason)
    assert texts(final) == {0: "ST\ufffd"}


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abEND")])
def test_a_stop_string_ends_its_sequence(include, text):
    params = SamplingParams(stop=["END", "zz"], include_stop_str_in_output=include, n=2)
    request = Request(params)
    request.feed("abE")
    output = request.feed("NDcd")
    assert output is not None
    ended, other = output.outputs
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (text, "stop", "END")
    assert ended.token_ids == list(b"abEND")
    assert not other.finished()
    assert request.aborts == [("r", 0)]
    assert request.feed("more") is None


def test_a_stop_string_in_the_last_news_needs_no_abort():
    request = Request(SamplingParams(stop="END"))
    output = request.feed("aEND", finish_reason="length")
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "stop")
    assert output.finished
    assert request.aborts == []


def test_stop_strings_wait_for_min_tokens():
    request = Request(SamplingParams(stop="b", min_tokens=4))
    output = request.feed("abcbd")
    assert output is not None
    assert output.outputs[0].text == "abc"
    assert output.outputs[0].token_ids == list(b"abcb")


@pytest.mark.parametrize(
    ("token", "include", "skip", "text"),
    [
        (EOS, False, True, "a"),
        (EOS, True, True, "a"),
        (EOS, True, False, "a<eos>"),
        (EOS, False, False, "a"),
        (10, False, True, "a"),
        (10, True, True, "a\n"),
    ],
)
def test_the_token_that_stops_is_text_only_on_demand(token, include, skip, text):
    params = SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip)
    stop_reason = None if token == EOS else token
    output = Request(params).feed([97, token], finish_reason="stop", stop_reason=stop_reason)
    assert output is not None
    assert output.outputs[0].text == text
    assert output.outputs[0].token_ids == [97, token]
    assert output.outputs[0].stop_reason == stop_reason


@given(data=st.data(), text=st.text("abcE😀", max_size=20))
def test_text_does_not_depend_on_how_tokens_come(data, text):
    params = SamplingParams(stop=["abE", "cc"], logprobs=1)
    tokens = list(text.encode())
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=5)))
    whole = Request(params).feed(tokens, finish_reason="length")
    for kind in RequestOutputKind:
        pieces = Request(replace(params, output_kind=kind))
        outputs = [
            pieces.feed(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)
        ]
        outputs.append(pieces.feed([], finish_reason="length"))
        received = [output for output in outputs if output is not None]
        final = received[-1]
        if kind is DELTA:
            for earlier in reversed(received[:-1]):
                final = join_deltas(earlier, final)
        assert whole is not None
        assert final.outputs == whole.outputs
        assert final.finished


def test_logprobs_hold_the_chosen_token_and_the_best():
    output = Request(SamplingParams(logprobs=3)).feed("ab")
    assert output is not None
    (sequence,) = output.outputs
    assert sequence.logprobs is not None
    first = sequence.logprobs[0]
    assert list(first) == [97, 98, 99]
    assert first[97] == (-2.0, 2, "a")
    assert first[98] == (-1.0, 1, "b")
    assert first[99] == (-3.0, 3, "c")
    assert sequence.cumulative_logprob == -4.0


def test_logprobs_zero_is_the_chosen_token_alone():
    output = Request(SamplingParams(logprobs=0)).feed("a")
    assert output is not None
    assert output.outputs[0].logprobs == [{97: (-2.0, 2, "a")}]


def test_no_logprobs_unless_asked_for():
    output = Request(SamplingParams()).feed("a")
    assert output is not None
    assert output.prompt_logprobs is None
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs_begin_with_none(kind):
    request = Request(SamplingParams(prompt_logprobs=1, output_kind=kind), prompt="xyz")
    scores = [candidates(token, 1) for token in b"yz"]
    outputs = [
        request.feed("a", prompt_logprobs=scores),
        request.feed("b", finish_reason="length"),
    ]
    expected = [None, {121: (-2.0, 2, "y"), 122: (-1.0, 1, "z")}]
    expected.append({122: (-2.0, 2, "z"), 123: (-1.0, 1, "{")})
    given = [output.prompt_logprobs for output in outputs if output is not None]
    once = [expected, None]
    assert given == {CUMULATIVE: [expected] * 2, DELTA: once, FINAL_ONLY: [expected]}[kind]


@pytest.mark.parametrize("settings", [{"tokenizer": None}, {}])
def test_token_ids_alone(settings):
    output = Request(SamplingParams(detokenize=False, logprobs=0), **settings).feed("ab")
    assert output is not None
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [97, 98])
    assert output.outputs[0].logprobs is not None
    assert output.outputs[0].logprobs[0][97].decoded_token is None


def test_times_and_cached_tokens():
    request = Request(SamplingParams(n=2))
    before = time.time()
    request.feed("a", index=1, first_scheduled_time=2.0, num_cached_tokens=9)
    request.feed("a", first_scheduled_time=2.0, num_cached_tokens=5, finish_reason="length")
    final = request.feed("b", index=1, finish_reason="length")
    assert final is not None
    assert final.num_cached_tokens == 5
    metrics = final.metrics
    assert (metrics.arrival_time, metrics.first_scheduled_time) == (1.0, 2.0)
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert before <= metrics.first_token_time <= metrics.finished_time <= time.time()


def test_earlier_outputs_do_not_change():
    request = Request(SamplingParams(logprobs=0))
    first = request.feed("a")
    request.feed("b", finish_reason="length")
    assert first is not None
    assert first.outputs[0].token_ids == [97]
    assert first.outputs[0].logprobs is not None
    assert len(first.outputs[0].logprobs) == 1
    assert first.metrics.finished_time is None


def test_an_error_reaches_its_request():
    output = Request(SamplingParams()).feed([], finish_reason="error", error="no luck")
    assert output is not None
    assert output.finished
    assert (output.outputs[0].finish_reason, output.outputs[0].error) == ("error", "no luck")


def test_a_failing_tokenizer_fails_its_request_alone(monkeypatch, caplog):
    processor = OutputProcessor(TOKENIZER)
    Request(SamplingParams(n=2, logprobs=0), processor=processor, request_id="bad")
    Request(SamplingParams(), processor=processor, request_id="good")

    def fail(self: Tokenizer, token: int) -> str:
        raise KeyError(token)

    monkeypatch.setattr(Tokenizer, "token_text", fail)
    scores = [candidates(97, 0)]
    outputs, aborts = processor.process(
        [SequenceOutput("bad", 0, [97], scores), SequenceOutput("good", 0, [97])]
    )
    assert aborts == [("bad", 0), ("bad", 1)]
    assert [output.finished for output in outputs] == [True, False]
    assert {each.finish_reason for each in outputs[0].outputs} == {"error"}
    assert outputs[0].outputs[1].error == "KeyError: 97"
    assert "bad failed" in caplog.text
    assert processor.request_ids == ["good"]


def test_a_failure_ends_once_what_had_ended_before(monkeypatch):
    request = Request(SamplingParams(n=3, output_kind=DELTA))
    request.feed("a", finish_reason="length")

    def fail(self: Detokenizer, token: int) -> str:
        raise KeyError(token)

    monkeypatch.setattr(Detokenizer, "push", fail)
    output = request.feed("b", index=1)
    assert output is not None
    assert output.finished
    assert [(each.index, each.finish_reason) for each in output.outputs] == [
        (1, "error"),
        (2, "error"),
    ]
