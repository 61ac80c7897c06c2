"""Beam search: the likeliest continuations of a prompt, found by keeping several and growing each.

The search is a few host operations on top of an engine. It asks for one more token of every beam
by a request that reads the beam as its prompt. The prefix cache has all of it but the newest token:
beams share the pages that are full, and each copies the one that it goes on in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from math import inf, isfinite
from operator import attrgetter

from paged.models.tokenizer import Tokenizer
from paged.runtime.config import MAX_LOGPROBS
from paged.runtime.detokenizer import Detokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.front import Front, Prepared, TokensPrompt
from paged.runtime.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
_STEEPEST = 10.0


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """What to search for, with vLLM's names.

    Attributes:
        beam_width: beams kept, and sequences in the result.
        max_tokens: output tokens at most; None leaves it to the model's length.
        ignore_eos: go on after the model's end-of-sequence token.
        temperature: 0; beams are ranked by the model's own probabilities.
        length_penalty: a sequence scores its log-probability divided by the number of its tokens
            to this power: above 0 favours long ones, below 0 short ones.
        early_stopping: end as soon as `beam_width` sequences have ended, whatever the others might
            still become; False goes on until none of them can score better.
        stop_token_ids: token ids that end a sequence, as end-of-sequence does.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: let the text hold the token that ended it.

    Raises:
        InvalidRequest: a value out of its range.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool = False
    stop_token_ids: tuple[int, ...] = ()
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise InvalidRequest(
                f"beam_width must be between 1 and {MAX_BEAM_WIDTH}, got {self.beam_width}",
                "beam_width",
            )
        if self.temperature != 0:
            raise InvalidRequest(
                f"temperature must be 0 in a beam search, got {self.temperature}", "temperature"
            )
        if not (isfinite(self.length_penalty) and abs(self.length_penalty) <= _STEEPEST):
            raise InvalidRequest(
                f"length_penalty must be between -{_STEEPEST:g} and {_STEEPEST:g}, "
                f"got {self.length_penalty}",
                "length_penalty",
            )

    @property
    def whole(self) -> SamplingParams:
        """What a request for the whole output would say: the front checks it."""
        return SamplingParams(
            temperature=0,
            max_tokens=self.max_tokens,
            stop_token_ids=list(self.stop_token_ids),
            skip_special_tokens=self.skip_special_tokens,
        )

    @property
    def one_token(self) -> SamplingParams:
        """How a beam is asked for its next token. Twice the width leaves enough that do not end."""
        return SamplingParams(
            temperature=0,
            max_tokens=1,
            logprobs=2 * self.beam_width,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


@dataclass(frozen=True)
class Beam:
    """One continuation.

    Attributes:
        tokens: of the output.
        logprob: the sum of theirs.
        finish_reason, stop_reason: see `CompletionOutput`.
    """

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: int | None = None

    def score(self, length_penalty: float, length: int | None = None) -> float:
        """What it is ranked by when it ends, or would be if it got longer without losing any."""
        return self.logprob / max(length or len(self.tokens), 1) ** length_penalty


@dataclass
class BeamSearch:
    """One prompt's search. Ask for `prompts` and pass the answers to `advance` while there are any.

    Attributes:
        prepared: the request, checked by the front as one for the whole output.
        eos_token_ids: of the model.
        alive: beams to be continued, likeliest first.
        ended: the best that have ended, best first.
        metrics, num_cached_tokens: of the result.
    """

    prepared: Prepared
    params: BeamSearchParams
    eos_token_ids: frozenset[int]
    alive: list[Beam] = field(default_factory=lambda: [Beam()])
    ended: list[Beam] = field(default_factory=list)
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0

    @property
    def max_tokens(self) -> int:
        """Of each sequence."""
        max_tokens = self.prepared.request.params.max_tokens
        assert max_tokens is not None, "the front sets max_tokens"
        return max_tokens

    def prompts(self) -> list[TokensPrompt]:
        """What to ask one more token of each; empty when the search is over."""
        request = self.prepared.request
        return [
            TokensPrompt(
                prompt_token_ids=[*request.prompt_token_ids, *beam.tokens],
                cache_salt=request.cache_salt,
            )
            for beam in self.alive
        ]

    def advance(self, answers: Sequence[RequestOutput]) -> None:
        """Grow the beams by the answers to `prompts`, and keep the best."""
        self._note(answers)
        reasons = {answer.outputs[0].finish_reason for answer in answers}
        if failure := reasons & {"abort", "error"}:
            self._give_up(failure.pop() or "error")
            return
        grown = [
            each
            for beam, answer in zip(self.alive, answers, strict=True)
            for each in self._grown(beam, answer)
        ]
        going = [beam for beam in grown if beam.finish_reason is None]
        self._keep([beam for beam in grown if beam.finish_reason is not None])
        self.alive = nlargest(self.params.beam_width, going, key=attrgetter("logprob"))
        if self.alive and len(self.alive[0].tokens) == self.max_tokens:
            self._give_up("length")
        elif self._is_settled():
            self.alive = []

    def result(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """The best sequences, best first."""
        request, prompt = self.prepared
        assert self.metrics is not None, "a search takes a step at least"
        return RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=None,
            outputs=[self._output(*item, tokenizer) for item in enumerate(self.ended)],
            finished=True,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )

    def _grown(self, beam: Beam, answer: RequestOutput) -> list[Beam]:
        """The beam with each of its likeliest next tokens."""
        [candidates] = answer.outputs[0].logprobs or [{}]
        return [
            self._with(beam, token, entry.logprob)
            for token, entry in candidates.items()
            if entry.logprob > -inf
        ]

    def _with(self, beam: Beam, token: int, logprob: float) -> Beam:
        grown = Beam((*beam.tokens, token), beam.logprob + logprob)
        if token in self.params.stop_token_ids:
            return replace(grown, finish_reason="stop", stop_reason=token)
        if token in self.eos_token_ids and not self.params.ignore_eos:
            return replace(grown, finish_reason="stop")
        return grown

    def _keep(self, ended: list[Beam]) -> None:
        """The best of those that ended earlier and now."""
        penalty = self.params.length_penalty
        both = [*self.ended, *ended]
        self.ended = nlargest(self.params.beam_width, both, key=lambda beam: beam.score(penalty))

    def _give_up(self, reason: str) -> None:
        """End the beams as they are."""
        self._keep([replace(beam, finish_reason=reason) for beam in self.alive])
        self.alive = []

    def _is_settled(self) -> bool:
        """Whether no beam can get among the best any more: log-probabilities only fall."""
        if len(self.ended) < self.params.beam_width or not self.alive:
            return False
        best, penalty = self.alive[0], self.params.length_penalty
        lengths = (len(best.tokens) + 1, self.max_tokens)
        attainable = max(best.score(penalty, length) for length in lengths)
        return self.params.early_stopping or attainable <= self.ended[-1].score(penalty)

    def _note(self, answers: Sequence[RequestOutput]) -> None:
        """Times from the first token to the last."""
        last = answers[0].metrics
        if self.metrics is None:
            self.metrics, self.num_cached_tokens = last, answers[0].num_cached_tokens
        self.metrics = RequestMetrics(
            arrival_time=self.prepared.request.arrival_time,
            first_scheduled_time=self.metrics.first_scheduled_time,
            first_token_time=self.metrics.first_token_time,
            finished_time=last.finished_time,
        )

    def _output(self, index: int, beam: Beam, tokenizer: Tokenizer | None) -> CompletionOutput:
        hidden = beam.finish_reason == "stop" and not self.params.include_stop_str_in_output
        shown = beam.tokens[: len(beam.tokens) - hidden]
        return CompletionOutput(
            index,
            text=self._text(shown, tokenizer) if tokenizer else "",
            token_ids=list(beam.tokens),
            cumulative_logprob=beam.logprob,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )

    def _text(self, tokens: Sequence[int], tokenizer: Tokenizer) -> str:
        detokenizer = Detokenizer(
            tokenizer,
            self.prepared.request.prompt_token_ids,
            skip_special_tokens=self.params.skip_special_tokens,
        )
        return "".join([*map(detokenizer.push, tokens), detokenizer.finish()])


def begin_search(front: Front, prepared: Prepared, params: BeamSearchParams) -> BeamSearch:
    """The search of a prompt that `front` has prepared with `params.whole`.

    Raises:
        InvalidRequest: it needs more log-probabilities than the engine gives.
    """
    if (needed := 2 * params.beam_width) > front.max_logprobs:
        raise InvalidRequest(
            f"{params.beam_width} beams need {needed} log-probabilities a token, and the engine "
            f"gives {front.max_logprobs} (--max-logprobs)",
            "n",
        )
    return BeamSearch(prepared, params, front.eos_token_ids)
