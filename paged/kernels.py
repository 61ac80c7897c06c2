"""What the kernels of all folders of this floor share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

# An array in memory as a kernel sees it, or a view of one: `jax.Ref` is no type for views.
Ref = Any

MULTIPROCESSORS = 132
"""Of an H100 and an H200. A smaller GPU runs the same programs in more than one go."""


def divide(number: jax.Array | int, by: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of numbers that are not negative."""
    return lax.div(number, by), lax.rem(number, by)


def up_to[T](size: int, entries: Sequence[tuple[int, T]]) -> T:
    """Of entries for up to so much each, in rising order, that for `size`.

    The last is for more too.
    """
    return next((each for most, each in entries if size <= most), entries[-1][1])


def swizzled(columns: int, itemsize: int, *middle: int) -> tuple[plgpu.Transform, ...]:
    """The layout in shared memory from which Hopper's tensor cores multiply.

    Tiles of 8 rows and `columns` columns, at most 128 bytes of a row; of `middle` elements of the
    axes between.
    """
    # Their base class is abstract by the letter, for a method whose body is empty.
    return (
        plgpu.TilingTransform((8, *middle, columns)),  # type: ignore[abstract]
        plgpu.SwizzleTransform(columns * itemsize),  # type: ignore[abstract]
    )
