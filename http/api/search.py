"""Requests for the best of many answers: `best_of`, and `use_beam_search`."""

from __future__ import annotations

from msgspec.structs import replace

from paged.http.api.protocol import GenerationRequest, ResponseFormat
from paged.runtime.beam_search import MAX_BEAM_WIDTH, BeamSearchParams
from paged.runtime.errors import InvalidRequest
from paged.runtime.outputs import CompletionOutput, RequestOutput
from paged.runtime.sampling_params import MAX_N

# What chooses one token at a time means nothing to a search, in which all are looked at.
_FOR_SAMPLING: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "frequency_penalty": (0,),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex"), ()),
    "guided_whitespace_pattern": (),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": (ResponseFormat(type="text"),),
    "stop": ([],),
    "stream": (False,),
    "structured_outputs": (),
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
}


def beam_search_params(body: GenerationRequest, max_tokens: int | None) -> BeamSearchParams | None:
    """The search that a request asks for; None if it asks for none.

    Raises:
        InvalidRequest: fields that do not go with a search, or need one.
    """
    if not body.use_beam_search:
        _check_needs_search(body)
        return None
    for name, neutral in _FOR_SAMPLING.items():
        if getattr(body, name, None) not in (None, *neutral):
            raise InvalidRequest(f"{name} does not go with use_beam_search", name)
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    width = num_candidates(body)
    if not 1 <= width <= MAX_BEAM_WIDTH:
        allowed = f"between 1 and {MAX_BEAM_WIDTH}"
        raise InvalidRequest(f"A beam search keeps {allowed} beams, got {width}", _named(body))
    return BeamSearchParams(
        beam_width=width,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        length_penalty=penalty,
        early_stopping=bool(body.early_stopping),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        skip_special_tokens=body.skip_special_tokens is not False,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def _check_needs_search(body: GenerationRequest) -> None:
    if body.length_penalty not in (None, 1):
        raise InvalidRequest("length_penalty needs use_beam_search", "length_penalty")
    if body.early_stopping:
        raise InvalidRequest("early_stopping needs use_beam_search", "early_stopping")


def num_candidates(body: GenerationRequest) -> int:
    """How many sequences are made of a prompt, of which the best n are returned.

    Raises:
        InvalidRequest: fewer than n, or the best of them while they are still written.
    """
    wanted = 1 if body.n is None else body.n
    if body.best_of is None or body.best_of == wanted:
        return wanted
    if body.best_of < wanted:
        raise InvalidRequest(
            f"best_of must be at least n ({wanted}), got {body.best_of}", "best_of"
        )
    if body.best_of > MAX_N:
        raise InvalidRequest(f"best_of must be at most {MAX_N}, got {body.best_of}", "best_of")
    if body.stream:
        raise InvalidRequest("best_of above n cannot be streamed", "best_of")
    return body.best_of


def _named(body: GenerationRequest) -> str:
    """The field that says how many sequences are made."""
    return "n" if body.best_of is None else "best_of"


def best(output: RequestOutput, n: int) -> RequestOutput:
    """The n sequences whose tokens are likeliest on average, best first; all if there are no more.

    Where there are more, they bring their log-probabilities.
    """
    if len(output.outputs) <= n:
        return output
    ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)
    return replace(output, outputs=[replace(each, index=i) for i, each in enumerate(ranked[:n])])


def _mean_logprob(sequence: CompletionOutput) -> float:
    assert sequence.cumulative_logprob is not None, "ranked by what was asked for"
    return sequence.cumulative_logprob / max(len(sequence.token_ids), 1)
