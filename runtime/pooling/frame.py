"""The special tokens that a tokenizer puts around one text or two.

They are learnt from what it makes of texts as they are, and put around texts that were cut. The
tokenizer's own cutting keeps all pieces that it cuts off, and makes every combination of those of
two texts: two of a thousand words, cut to a token each, took it a minute and 6 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend


class Run(NamedTuple):
    """Special tokens and their types; or the text at `text`, all tokens of which have one type."""

    text: int | None
    ids: list[int]
    types: list[int]


@dataclass(frozen=True)
class Frame:
    """What stands around texts; it depends on nothing but which of them are empty."""

    runs: tuple[Run, ...]

    @classmethod
    def learn(
        cls, backend: Backend, texts: Sequence[Encoding], *, add_special_tokens: bool = True
    ) -> Frame:
        """That of one text or two, which the tokenizer has encoded without special tokens."""
        # Its types leave out that there may be no second text.
        process: Callable[..., Encoding] = backend.post_process
        whole = process(*texts, *[None] * (2 - len(texts)), add_special_tokens)
        ids, types, mask = whole.ids, whole.type_ids, whole.special_tokens_mask
        runs, place = [], 0
        for index, text in enumerate(texts):
            if not len(text):
                continue
            start = mask.index(0, place)
            runs.append(Run(None, ids[place:start], types[place:start]))
            runs.append(Run(index, [], types[start : start + 1]))
            place = start + len(text)
            assert ids[start:place] == text.ids, "a text stands in one piece, the first first"
        return cls((*runs, Run(None, ids[place:], types[place:])))

    def around(self, texts: Sequence[list[int]]) -> tuple[list[int], list[int]]:
        """Token ids of all, and the type of each."""
        ids: list[int] = []
        types: list[int] = []
        for run in self.runs:
            text = [] if run.text is None else texts[run.text]
            ids += run.ids if run.text is None else text
            types += run.types if run.text is None else run.types * len(text)
        return ids, types
