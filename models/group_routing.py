"""How tokens of DeepSeek choose experts: first the best groups of them, then among those."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from paged.errors import ConfigError
from paged.models.experts import Routing


@dataclass(frozen=True)
class GroupRouting(Routing):
    """A choice among the experts of a token's best groups.

    Attributes:
        num_groups: how many there are, all of the same size.
        chosen_groups: those that a token chooses among.
        best: a group is as good as the sum of so many of its experts, the best ones.
        sigmoid: an expert counts by the sigmoid of its score; else by its share in a softmax.
        factor: on what a token's experts count.
    """

    num_groups: int
    chosen_groups: int
    best: int
    sigmoid: bool
    factor: float

    def __post_init__(self) -> None:
        super().__post_init__()
        groups, size = self.num_groups, self.num_experts // self.num_groups
        if self.num_experts % groups or size < self.best:
            raise ConfigError(
                f"{self.num_experts} experts cannot stand in n_group {groups} groups of equal size "
                f"with {self.best} or more in each"
            )
        if self.chosen_groups > groups:
            raise ConfigError(
                f"topk_group {self.chosen_groups} is more than the n_group {groups} there are"
            )
        if self.num_chosen > self.chosen_groups * size:
            raise ConfigError(
                f"num_experts_per_tok {self.num_chosen} is more than the experts of topk_group "
                f"{self.chosen_groups} groups of {size}"
            )

    def choose(
        self, scores: jax.Array, bias: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """See `Routing.choose`; the bias is added to what experts count."""
        counts = jax.nn.sigmoid(scores) if self.sigmoid else jax.nn.softmax(scores)
        preferred = counts if bias is None else counts + bias
        _, experts = lax.top_k(self._in_best_groups(preferred), self.num_chosen)
        weights = jnp.take_along_axis(counts, experts, axis=-1)
        if self.renormalise:
            weights /= weights.sum(axis=-1, keepdims=True) + 1e-20
        return weights * self.factor, experts

    def _in_best_groups(self, preferred: jax.Array) -> jax.Array:
        """`preferred` [T, X], but never the experts of groups that are not chosen."""
        if self.chosen_groups == self.num_groups:
            return preferred
        grouped = preferred.reshape(len(preferred), self.num_groups, -1)
        quality = lax.top_k(grouped, self.best)[0].sum(axis=-1)
        _, chosen = lax.top_k(quality, self.chosen_groups)
        is_chosen = (jnp.arange(self.num_groups) == chosen[..., None]).any(axis=1)
        return jnp.where(is_chosen[..., None], grouped, -jnp.inf).reshape(preferred.shape)
