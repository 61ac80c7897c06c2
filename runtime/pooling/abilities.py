"""What a model for vectors or scores can be asked for."""

from __future__ import annotations

from dataclasses import dataclass

from paged.runtime.errors import InvalidRequest, Unsupported
from paged.runtime.pooling.whole import check_whole


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What a model gives.

    Attributes:
        scores: a score of two texts that it reads together, and no vectors.
        size: numbers in a vector.
        dimensions: to which a vector may be cut; None for any up to its size.
        normalized: vectors have length 1, and get it again when they are cut.
    """

    scores: bool
    size: int
    dimensions: tuple[int, ...] | None
    normalized: bool

    def check_embeds(self) -> None:
        """Raise Unsupported if the model gives no vectors."""
        if self.scores:
            raise Unsupported("this model scores pairs of texts and gives no embeddings")

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise InvalidRequest if vectors may not be cut so short."""
        check_whole("dimensions", dimensions)
        if dimensions is None or dimensions == self.size:
            return
        if self.dimensions == ():
            raise InvalidRequest(
                f"this model's embeddings have {self.size} dimensions and may not be cut: its "
                "config.json has neither is_matryoshka nor matryoshka_dimensions",
                "dimensions",
            )
        allowed = self.dimensions or range(1, self.size + 1)
        if dimensions not in allowed:
            text = f"1 to {self.size}" if self.dimensions is None else f"one of {self.dimensions}"
            raise InvalidRequest(f"dimensions must be {text}, got {dimensions}", "dimensions")
