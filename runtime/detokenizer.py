"""Token ids to text, a token at a time, as the tokenizer would decode the whole."""

from __future__ import annotations

from collections.abc import Sequence

from paged.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # what decoders make of bytes that are no character, or not yet one
_MAX_CHARACTER = 4  # bytes, and so at most tokens, of a character in UTF-8
_CONTEXT = 16  # prompt tokens that the first output tokens are decoded with
_STALL = 16  # tokens held back before they count as broken rather than unfinished


class Detokenizer:
    """The text of one sequence, given out as soon as no later token can change it.

    How a token reads depends on the tokens before it: a first word loses its space, a character
    may be spread over several tokens. So held tokens are always decoded behind some context:

        prompt and output so far ... | context                 | held            |
                                     | given: text handed out  | waits for more  |

    All pieces joined are what decoding the whole output behind the prompt gives, with one
    exception. A tokenizer with byte fallback decodes a run of byte tokens as one, and gives up
    whole characters if broken bytes follow them. Here, what was handed out stays.

    The `tokenizers` library has a stream for this, which fails at that exception, says a prompt's
    last characters again if they are not whole, and slows down without limit over broken bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        self._backend = tokenizer.backend
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._context = self._end_of(prompt)
        self._given = self._decode(self._context)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token settles; often empty."""
        if token in self._skipped:
            return ""
        self._held.append(token)
        text = self._decode(self._context + self._held)
        if not text.endswith(_REPLACEMENT) and text != self._given:
            return self._hand_out(text)
        if len(self._held) < _STALL:
            return ""
        return self._hand_out(text, keep=_MAX_CHARACTER - 1)  # may still begin a character

    def finish(self) -> str:
        """The text held back; an unfinished character comes out as U+FFFD."""
        return self._hand_out(self._decode(self._context + self._held))

    def _hand_out(self, text: str, keep: int = 0) -> str:
        """What is new in `text`, that of context and held tokens, save the last characters."""
        new = self._unsaid(text)
        self._context, self._held = self._held, []
        said = self._decode(self._context)
        self._given = said[: len(said) - keep]
        return new[: max(len(new) - keep, 0)]

    def _unsaid(self, text: str) -> str:
        if text.startswith(self._given):
            return text[len(self._given) :]
        whole = self._given.rstrip(_REPLACEMENT)
        if text.startswith(whole):  # the output completes the prompt's last character
            return text[len(whole) :]
        return self._decode(self._held)  # the decoder took characters back

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last visible tokens, from the start of a character."""
        visible = [token for token in prompt[-4 * _CONTEXT :] if token not in self._skipped]
        if len(visible) <= _CONTEXT:
            return visible
        starts = range(-_CONTEXT, _MAX_CHARACTER - _CONTEXT)
        tails = [visible[start:] for start in starts]
        whole = (tail for tail in tails if not self._decode(tail).startswith(_REPLACEMENT))
        return next(whole, tails[0])

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
