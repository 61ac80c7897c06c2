"""Models cut into stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from paged.errors import ConfigError
from paged.groups import group_layers
from paged.models.registry import get_family, model_config
from paged.models.stages import NoEmbedding, divide, of_stage
from tests.models.harness import load_golden

DTYPE = jnp.dtype(jnp.float32)


@pytest.mark.parametrize(
    ("num_layers", "number", "expected"),
    [(4, 2, [(0, 2), (2, 4)]), (7, 3, [(0, 3), (3, 5), (5, 7)]), (3, 3, [(0, 1), (1, 2), (2, 3)])],
)
def test_layers_are_divided_evenly(
    num_layers: int, number: int, expected: list[tuple[int, int]]
) -> None:
    stages = divide(num_layers, number, 8, DTYPE)
    assert [(stage.first, stage.end) for stage in stages] == expected
    assert [stage.is_first for stage in stages] == [True, *[False] * (number - 1)]
    assert [stage.is_last for stage in stages] == [*[False] * (number - 1), True]


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match="-size 3 is more than the 2 layers"):
        divide(2, 3, 8, DTYPE)


@pytest.mark.parametrize("name", ["llama", "gemma3"])  # the latter's head is its embedding
def test_each_stage_has_what_it_runs(name: str) -> None:
    config = model_config(load_golden(name)["config"])
    specs = get_family(config.architecture).specs(config)
    first, last = (of_stage(specs, each) for each in divide(config.num_layers, 2, 8, DTYPE))
    assert first.layers + last.layers == specs.layers
    assert first.embedding is specs.embedding
    assert first.head is None
    assert last.head is specs.head
    is_tied = specs.head is None
    assert isinstance(last.embedding, NoEmbedding) != is_tied
    weights = len(jax.tree.leaves(specs)) + len(jax.tree.leaves(specs.final_norm))
    found = len(jax.tree.leaves((first, last)))
    assert found == weights + is_tied * len(jax.tree.leaves(specs.embedding))


def test_groups_keep_their_places() -> None:
    """Page tables are those of all layers, in every stage."""
    groups = group_layers((64, 64, None, 64, 64, None), 1024)
    first, last = divide(6, 2, 8, DTYPE)
    assert [group.window for group in first.own(groups)] == [group.window for group in groups]
    for group, early, late in zip(groups, first.own(groups), last.own(groups), strict=True):
        assert early.layers + late.layers == group.layers
        assert all(layer < 3 for layer in early.layers)
