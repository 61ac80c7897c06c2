"""The device side: parameters, a program for each shape, and the launching of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from numpy.typing import NDArray

from paged.models.embedder import Embedder
from paged.runtime.compiler import Compiler
from paged.runtime.compiles import num_compiles
from paged.runtime.lowering import Job
from paged.runtime.pooling.grid import Grid, Shape
from paged.runtime.pooling.vectors import Vectors
from paged.runtime.pooling.waiting import Batch

Programs = dict[Shape, Compiled]


def compile_programs(
    embedder: Embedder, grid: Grid, params: Any, *, show_progress: bool
) -> Programs:
    """A program for each shape of the grid.

    Args:
        params: parameters, or their shapes.
    """
    step = partial(embed, embedder)
    jobs = ((("embed", shape), Job(step, (params, packed_shape(shape)))) for shape in grid.all())
    with Compiler() as compiler:
        compiled = compiler.programs(embedder, jobs, show_progress=show_progress)
    return {shape: program for (_, shape), program in compiled.items()}


def packed_shape(shape: Shape) -> jax.ShapeDtypeStruct:
    """That of what `pack` makes."""
    return jax.ShapeDtypeStruct((shape.rows, 2 * shape.length + 1), jnp.int32)


def embed(embedder: Embedder, params: Any, packed: jax.Array) -> jax.Array:
    """Vectors [R, N] float32 of a batch [R, 2 * L + 1] as `pack` makes it."""
    length = packed.shape[1] // 2
    tokens, types, lengths = jnp.split(packed, (length, 2 * length), axis=1)
    return embedder(params, tokens, types, lengths[:, 0])


def pack(batch: Batch) -> NDArray[np.int32]:
    """[R, 2 * L + 1] int32: L tokens, their types, their number. Empty rows have one token, 0."""
    length = batch.shape.length
    packed = np.zeros(packed_shape(batch.shape).shape, np.int32)
    packed[:, -1] = 1
    for row, text in zip(packed, batch.texts, strict=False):
        token_ids, types = text.tokens
        row[: len(token_ids)] = token_ids
        row[length : length + len(types)] = types
        row[-1] = len(token_ids)
    return packed


@dataclass(frozen=True)
class Launched:
    """A batch whose vectors are on their way to the host."""

    vectors: jax.Array

    def read(self) -> Vectors:
        """Wait for the vectors [rows, N]. Raises what the device raised."""
        return np.asarray(self.vectors)


class PoolingRunner:
    """Owns everything on the device; `launch` enqueues work and returns."""

    def __init__(self, programs: Programs, params: Any) -> None:
        self._programs = programs
        self._params = params
        if jax.default_backend() != "cpu":
            self._run_each_once()
        self._compiles_at_start = num_compiles()

    @property
    def num_compiles(self) -> int:
        return num_compiles() - self._compiles_at_start

    def watch(self, when_gone: Callable[[str], object]) -> None:
        """Nothing: it goes with this process."""

    def launch(self, batch: Batch) -> Launched:
        return self.launch_packed(batch.shape, pack(batch))

    def launch_packed(self, shape: Shape, packed: NDArray[np.int32]) -> Launched:
        """Launch what `pack` has made."""
        vectors = self._programs[shape](self._params, packed)
        vectors.copy_to_host_async()
        return Launched(vectors)

    def kill(self, reason: str) -> None:
        """Nothing: a thread cannot be ended from outside."""

    def close(self) -> None:
        """Give the device's memory back."""
        for array in jax.tree.leaves(self._params):
            array.delete()

    def _run_each_once(self) -> None:
        """A GPU takes up to 0.2 s to prepare a program's first run."""
        for shape in self._programs:
            self.launch(Batch(shape, [])).read()
