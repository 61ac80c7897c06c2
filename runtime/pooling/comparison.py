"""Scores of pairs of texts: read together by a classifier, or by how near their vectors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from paged.runtime.errors import InvalidRequest
from paged.runtime.pooling.outputs import ScoringOutput, ScoringRequestOutput
from paged.runtime.pooling.reader import Reader, Tokens
from paged.runtime.pooling.vectors import Vectors, normalized


@dataclass(frozen=True)
class Comparison:
    """Pairs of texts on their way to their scores.

    Attributes:
        texts: what is computed: each pair as one, or every different text of all pairs.
        pairs: two of `texts` each, whose vectors are compared; None where a text is a pair.
    """

    texts: list[Tokens]
    pairs: list[tuple[int, int]] | None

    @classmethod
    def by_classifier(
        cls, reader: Reader, pairs: Sequence[tuple[str, str]], truncate: int | None
    ) -> Comparison:
        """By a model that reads two texts as one. Raises InvalidRequest, as `reader` does."""
        return cls(reader.pairs(pairs, truncate), None)

    @classmethod
    def by_vectors(
        cls, reader: Reader, pairs: Sequence[tuple[str, str]], truncate: int | None
    ) -> Comparison:
        """By the cosine of their vectors, each text's made once. Raises as `reader` does."""
        different = list(dict.fromkeys(text for pair in pairs for text in pair))
        places = {text: place for place, text in enumerate(different)}
        texts = reader.texts(different, truncate)
        return cls(texts, [(places[first], places[second]) for first, second in pairs])

    def outputs(self, vectors: Vectors) -> list[ScoringRequestOutput]:
        """One output for each pair, of the vectors of the texts."""
        if self.pairs is None:
            scores, tokens = vectors[:, 0], [text.token_ids for text in self.texts]
        else:
            first, second = np.array(self.pairs).T
            directions = normalized(vectors)
            cosines = np.sum(directions[first] * directions[second], axis=1)
            scores = np.clip(cosines, -1, 1)  # which rounding may leave
            tokens = [self.texts[a].token_ids + self.texts[b].token_ids for a, b in self.pairs]
        return [
            ScoringRequestOutput(ids, ScoringOutput(float(score)))
            for ids, score in zip(tokens, scores, strict=True)
        ]


def pair_up(queries: str | Sequence[str], documents: str | Sequence[str]) -> list[tuple[str, str]]:
    """One query with each document, or as many queries as documents, each with its own.

    Raises:
        InvalidRequest: the numbers do not go together, there is nothing, or it is no text.
    """
    first, second = _texts(queries), _texts(documents)
    if not first or not second or len(first) not in (1, len(second)):
        raise InvalidRequest(
            f"{len(first)} and {len(second)} texts cannot be paired: give one first text and any "
            "number of second ones, or as many of the one as of the other"
        )
    return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    given = list(value) if isinstance(value, Iterable) else [value]
    texts = [text for text in given if isinstance(text, str)]
    if len(texts) < len(given):
        raise InvalidRequest("what is scored must be a text, or a list of texts")
    return texts
