"""From a request's fields to a checked job for the engine: what chat and completions share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import structs

from paged.http.api.protocol import GenerationRequest, PromptTokensDetails, Usage, now
from paged.http.api.search import beam_search_params, best, num_candidates
from paged.http.api.structured import form_field, structured_outputs
from paged.http.api.timeouts import deadline_of
from paged.runtime.beam_search import BeamSearchParams
from paged.runtime.errors import InvalidRequest
from paged.runtime.messages import Terms
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

_MAX_STOP_LENGTH = 1024

_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingParams.__dataclass_fields__
    if name in GenerationRequest.__struct_fields__
)


@dataclass(frozen=True)
class Job:
    """A checked request.

    Attributes:
        id: of the reply; the engine's ids are made from it.
        model: the name that replies carry.
        prompts: token ids of each prompt.
        params: the same for all prompts.
        priority, cache_salt: see the engine.
        deadline: on the clock of `time.monotonic`; 0 for none.
        form: the field that asks for a form of the output, if one does.
        n: sequences of each prompt that are returned.
        beams: how to search for them; None samples.
        created: seconds.
    """

    id: str
    model: str
    prompts: tuple[list[int], ...]
    params: SamplingParams
    priority: int
    cache_salt: str
    deadline: float = 0.0
    form: str = "structured_outputs"
    n: int = 1
    beams: BeamSearchParams | None = None
    created: int = field(default_factory=now)

    def head(self) -> dict[str, Any]:
        """The fields that a reply and all its chunks share."""
        return {"id": self.id, "model": self.model, "created": self.created}

    def terms(self, index: int) -> Terms:
        """Of one prompt: for the first, the queue must have room for all."""
        if index:
            return Terms(self.deadline)
        each = self.params.n if self.beams is None else self.beams.beam_width
        num_tokens = sum(map(len, self.prompts))
        return Terms(self.deadline, each * len(self.prompts), num_tokens)

    def best(self, output: RequestOutput) -> RequestOutput:
        """A whole output with those of its sequences alone that are returned."""
        if self.beams is not None:
            return structs.replace(output, outputs=output.outputs[: self.n])
        return best(output, self.n)


def make_job(
    body: GenerationRequest,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    *,
    id: str,
    model: str,
    started: float,
) -> Job:
    """Put a request together.

    Args:
        started: when it came in, on the clock of `time.monotonic`.

    Raises:
        InvalidRequest: an empty cache_salt, or fields that do not go with a search.
    """
    if body.cache_salt == "":
        raise InvalidRequest("cache_salt must not be empty", "cache_salt")
    salt = body.cache_salt or ""
    beams = beam_search_params(body, params.max_tokens)
    n = 1 if body.n is None else body.n
    form = form_field(body) or "tools"
    deadline = deadline_of(body.timeout, started)
    priority = body.priority or 0
    return Job(id, model, tuple(prompts), params, priority, salt, deadline, form, n, beams)


def sampling_params(
    body: GenerationRequest, defaults: SamplingParams, **overrides: Any
) -> SamplingParams:
    """The request's own values over the model's defaults.

    Args:
        body: null fields are left to the defaults, but max_tokens to the model's length.
        defaults: of the model.
        overrides: fields that chat and completions name or fill in differently.

    Raises:
        InvalidRequest: a value out of its range, or fields that do not go together.
    """
    _check_combinations(body)
    given = {name: getattr(body, name) for name in _SAMPLING_FIELDS} | overrides
    given["structured_outputs"] = structured_outputs(body)
    values = {name: value for name, value in given.items() if value is not None}
    num_sequences = num_candidates(body)
    values["n"] = 1 if body.use_beam_search else num_sequences
    if num_sequences != (1 if body.n is None else body.n):  # to be ranked
        values.setdefault("logprobs", 0)
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    params = replace(defaults, **({"max_tokens": None} | values), output_kind=kind)
    longest = max(map(len, params.stop_strings), default=0)
    if longest > _MAX_STOP_LENGTH:
        raise InvalidRequest(
            f"A stop string may have {_MAX_STOP_LENGTH} characters, got {longest}", "stop"
        )
    return params


def _check_combinations(body: GenerationRequest) -> None:
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options need stream to be true", "stream_options")


@dataclass
class Tally:
    """Tokens used so far, over all prompts and sequences of a job."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output's tokens; a prompt counts once, whatever n is."""
        if prompt_index not in self._seen:
            self._seen.add(prompt_index)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
        for sequence in output.outputs:
            self.completion_tokens += len(sequence.token_ids)

    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        cached = PromptTokensDetails(self.cached_tokens)
        return Usage(self.prompt_tokens, self.completion_tokens, total, cached)
