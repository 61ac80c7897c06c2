"""The choices of a completion, made from the engine's outputs: whole ones or chunks of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import UNSET

from paged.http.engine import Tokenizer
from paged.http.logprobs import completion_logprobs, prompt_logprobs
from paged.http.protocol import CompletionChoice, CompletionLogprobs, CompletionRequest
from paged.runtime.outputs import CompletionOutput, RequestOutput, TokenLogprobs


@dataclass
class ChoiceMaker:
    """Makes the choices of one request.

    Attributes:
        body: what was asked for.
        prompts: as they came, text or token ids.
        tokenizer: for prompts that came as token ids.
        offsets: by choice index, where its next token begins in the text; present once it began.
        scores: by prompt, its log-probabilities: a stream has them in the first output alone.
    """

    body: CompletionRequest
    prompts: Sequence[str | list[int]]
    tokenizer: Tokenizer | None
    offsets: dict[int, int] = field(default_factory=dict)
    scores: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)

    def choices(self, prompt_index: int, output: RequestOutput) -> Iterator[CompletionChoice]:
        """What an output says, except of sequences that have no news."""
        if output.prompt_logprobs is not None:
            self.scores[prompt_index] = output.prompt_logprobs
        for sequence in output.outputs:
            choice = self._choice(prompt_index, sequence, output)
            if choice.text or choice.finish_reason or choice.logprobs or choice.token_ids:
                yield choice

    def _choice(
        self, prompt_index: int, sequence: CompletionOutput, output: RequestOutput
    ) -> CompletionChoice:
        index = prompt_index * (self.body.n or 1) + sequence.index
        begins = index not in self.offsets
        echoes = bool(self.body.echo and begins)
        scores = self.scores.get(prompt_index) if begins else None
        shows_scores = self.body.prompt_logprobs is not None
        shows_ids = self.body.return_token_ids
        return CompletionChoice(
            index=index,
            text=(self._prompt_text(prompt_index) if echoes else "") + sequence.text,
            logprobs=self._logprobs(index, sequence, output, scores if echoes else None),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=prompt_logprobs(scores) if shows_scores else None,
            token_ids=sequence.token_ids if shows_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if shows_ids and begins else UNSET,
        )

    def _logprobs(
        self,
        index: int,
        sequence: CompletionOutput,
        output: RequestOutput,
        echoed: list[TokenLogprobs | None] | None,
    ) -> CompletionLogprobs | None:
        """An entry per token of the prompt, if it is echoed, and per new one."""
        start = self.offsets.setdefault(index, 0)
        prompt = output.prompt_token_ids if echoed else []
        token_ids = [*prompt, *sequence.token_ids]
        if self.body.logprobs is None or not token_ids:
            return None
        logprobs = [*(echoed or ()), *(sequence.logprobs or ())]
        first = self._decode(prompt[:1])
        made = completion_logprobs(token_ids, logprobs, first_text=first, text_offset=start)
        self.offsets[index] = made.text_offset[-1] + len(made.tokens[-1])
        return made

    def _prompt_text(self, prompt_index: int) -> str:
        prompt = self.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._decode(prompt)

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None or not token_ids:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)
