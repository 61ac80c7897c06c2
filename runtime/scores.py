"""Log-probabilities on their way from steps to the requests that asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from paged.runtime.live_requests import Owner
from paged.runtime.messages import Candidates
from paged.runtime.plan import StepPlan, TokenEvent
from paged.runtime.runner import StepResult
from paged.runtime.sampler import TokenLogprobs
from paged.runtime.sequence import Sequence


class Scores(NamedTuple):
    """What news say beside tokens; entries as in `SequenceOutput`."""

    logprobs: list[Candidates] | None
    prompt_logprobs: list[Candidates] | None


_NONE = Scores(None, None)


def scores_of(owner: Owner, event: TokenEvent, result: StepResult) -> Scores:
    """Those of the new token and, once, of the prompt, as far as asked for."""
    if not owner.says_more:
        return _NONE
    live, params = owner.live, owner.live.request.params
    logprobs, prompt_logprobs = None, None
    if params.logprobs is not None:
        assert result.logprobs is not None, "a step samples as its most demanding row asks"
        logprobs = [_candidates(result.logprobs, event.row, event.token, params.logprobs)]
    if owner.index == 0:
        prompt_logprobs, live.prompt_scores = live.prompt_scores, None
    return Scores(logprobs, prompt_logprobs)


def keep_prompt_scores(
    plan: StepPlan, scores: TokenLogprobs, owners: Mapping[Sequence, Owner]
) -> None:
    """File a step's prompt log-probabilities with their requests; a preempted prompt starts over.

    Args:
        owners: of the sequences that have not ended.
    """
    begin = 0
    for row in plan.rows:
        owner = owners.get(row.sequence)
        live = owner.live if owner and owner.index == 0 else None
        if live is not None and live.prompt_scores is not None:
            top = live.request.params.prompt_logprobs or 0
            prompt = row.sequence.prompt
            following = prompt[row.start + 1 : row.start + 1 + row.length]
            del live.prompt_scores[row.start :]
            live.prompt_scores += [
                _candidates(scores, begin + i, token, top) for i, token in enumerate(following)
            ]
        begin += row.length


def _candidates(scores: TokenLogprobs, position: int, token: int, top: int) -> Candidates:
    return Candidates(
        token=token,
        logprob=float(scores.logprob[position]),
        rank=int(scores.rank[position]),
        top_tokens=scores.top_token[position, :top].tolist(),
        top_logprobs=scores.top_logprob[position, :top].tolist(),
    )
