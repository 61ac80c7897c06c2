"""From the tensors of a checkpoint to the parameters of a model.

All that headers can tell of a checkpoint that is wrong is found before memory is taken.
Tensors then go to their devices, each device getting what it needs of them alone, and are joined,
transposed and cast there. Several parameters are on their way at a time, the files of a checkpoint
being read side by side; together they stay within `_IN_FLIGHT` bytes, unless one alone is larger.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.loading.checkpoint import (
    Checkpoint,
    CheckpointError,
    check_tensors,
    check_values,
    release,
)
from paged.models.loading.progress import progress
from paged.models.weights import ParamSpec, param_bytes

# Parameters on their way at a time, and their bytes. Threads mostly wait, for disk and device.
_THREADS = 8
_IN_FLIGHT = 2**29
# Held while JAX compiles what is not compiled yet: of threads that compile the same program, one
# would read from the compilation cache what another is writing. What is compiled is only enqueued.
_COMPILING = threading.Lock()
# Elements of a tensor on their way at a time, where a parameter is made of it alone.
_PIECE = 2**23


def load_params(
    specs: Any,
    checkpoint: Checkpoint,
    dtype: jnp.dtype,
    *,
    show_progress: bool = True,
    sharding: Any = None,
    of: Any = None,
) -> Any:
    """Load the described parameters.

    Args:
        specs: pytree of `ParamSpec`.
        dtype: of the parameters; tensors are cast as they arrive.
        show_progress: a bar on a terminal, or log lines elsewhere.
        sharding: None for the default device, or a pytree of shardings like `specs`.
        of: description of all that the checkpoint has to hold, if that is more.

    Raises:
        CheckpointError: tensors are missing, unexpected, of the wrong shape or dtype, or have NaN.
    """
    check_tensors(specs if of is None else of, checkpoint)
    described, structure = jax.tree.flatten(specs)
    targets = [None] * len(described) if sharding is None else jax.tree.leaves(sharding)
    budget = _Budget(_IN_FLIGHT)

    # Neighbours that are made of the same tensors, as a weight and its scales, read them once.
    pairs = zip(described, targets, strict=True)
    groups = [[*group] for _, group in groupby(pairs, key=lambda pair: pair[0].parts)]

    def load(group: list[tuple[ParamSpec, Any]]) -> list[jax.Array]:
        with budget.share(sum(spec.bytes_to_make(dtype) for spec, _ in group)):
            return _load_group(group, checkpoint, dtype)

    # Processes that share the devices must use them in one and the same order.
    num_threads = _THREADS if jax.process_count() == 1 else 1
    params: list[jax.Array] = []
    total = param_bytes(specs, dtype)
    with (
        progress(total, "Loading weights", "B", show=show_progress) as advance,
        ThreadPoolExecutor(num_threads, "loading") as threads,
    ):
        for made in threads.map(load, groups):
            params += made
            advance(sum(param.nbytes for param in made))
    return jax.tree.unflatten(structure, params)


def load_param(spec: ParamSpec, checkpoint: Checkpoint, dtype: jnp.dtype) -> jax.Array:
    """Load one parameter; it has arrived when this returns.

    Args:
        dtype: that of the others, if the parameter has one of its own.

    Raises:
        CheckpointError: it has NaN or infinity in it.
    """
    return _load_group([(spec, None)], checkpoint, dtype)[0]


def _load_group(
    group: Sequence[tuple[ParamSpec, Any]], checkpoint: Checkpoint, dtype: jnp.dtype
) -> list[jax.Array]:
    """Load parameters made of the same tensors, each with its sharding."""
    first, sharding = group[0]
    large = math.prod(first.parts[0].view) > _PIECE
    if sharding is None and type(first) is ParamSpec and len(first.parts) == 1 and large:
        [part] = first.parts
        view = part.cut(checkpoint.read(part.name)).reshape(part.view)
        params = [_in_pieces(view, first.dtype_among(dtype), transpose=first.transpose)]
    else:
        views = _views(first, checkpoint, sharding)
        params = [_assemble(spec, views, spec.dtype_among(dtype), target) for spec, target in group]
    with _COMPILING:
        for param, (spec, _) in zip(params, group, strict=True):
            check_values(param, spec, checkpoint)
            if flaw := spec.flaw(param):
                raise CheckpointError(f"tensor {spec.parts[0].name!r}: {flaw}")
    return [spec.at_home(param) for param, (spec, _) in zip(params, group, strict=True)]


def _views(spec: ParamSpec, checkpoint: Checkpoint, sharding: Any) -> list[jax.Array]:
    """What a parameter is made of, on the devices that its sharding needs it on."""
    views = []
    places = zip(spec.parts, spec.spread(sharding), strict=True)
    for name, group in groupby(places, key=lambda pair: pair[0].name):
        tensor = checkpoint.read(name)
        for part, place in group:
            view = part.cut(tensor)
            # Waiting here keeps the host from copying all that a parameter is made of at once.
            views.append(_put_on(place, view.reshape(part.view)).block_until_ready())
            release(view)
    return views


def _put_on(place: Any, view: np.ndarray) -> jax.Array:
    """A view on the devices, or on those of this process, which does not ask others for theirs."""
    if place is None or place.is_fully_addressable:
        return jax.device_put(view, place)
    return jax.make_array_from_callback(view.shape, place, lambda index: view[index])


def _in_pieces(view: np.ndarray, dtype: jnp.dtype, *, transpose: bool) -> jax.Array:
    """A parameter of one large tensor, some rows of which are on their way at a time."""
    shape = (*view.shape[-1:], *view.shape[:-1]) if transpose else view.shape
    param = jnp.zeros(shape, dtype)
    step = max(_PIECE // math.prod(view.shape[1:]), 1)
    for start in range(0, len(view), step):
        rows = view[start : start + step]
        arrived = jax.device_put(rows)
        with _COMPILING:
            piece = _turned(arrived, dtype, transpose=transpose)
            param = _put(param, piece, start, axis=int(transpose))
        param.block_until_ready()
        release(rows)
    return param


@partial(jax.jit, static_argnames=("dtype", "transpose"))
def _turned(rows: jax.Array, dtype: jnp.dtype, *, transpose: bool) -> jax.Array:
    """Rows of a tensor as a parameter has them. In one program with `_put`: thrice the time."""
    piece = rows.astype(dtype)
    return jnp.moveaxis(piece, -1, 0) if transpose else piece


@partial(jax.jit, static_argnames="axis", donate_argnames="param")
def _put(param: jax.Array, piece: jax.Array, start: int, *, axis: int) -> jax.Array:
    """Overwrite a part of a parameter in place."""
    return jax.lax.dynamic_update_slice_in_dim(param, piece, start, axis)


class _Budget:
    """Bytes that threads share; who wants more than there are waits to have them all."""

    def __init__(self, total: int) -> None:
        self._total = self._free = total
        self._changed = threading.Condition()

    @contextmanager
    def share(self, size: int) -> Iterator[None]:
        size = min(size, self._total)
        with self._changed:
            self._changed.wait_for(lambda: size <= self._free)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def _assemble(
    spec: ParamSpec, views: list[jax.Array], dtype: jnp.dtype, sharding: Any
) -> jax.Array:
    """Join one parameter on the device.

    Compiled once for all parameters of the same make: their names do not count.
    """
    with _COMPILING:
        param = _assembler(spec.anonymous(), dtype, sharding)(views)
    return param.block_until_ready()


@cache
def _assembler(
    spec: ParamSpec, dtype: jnp.dtype, sharding: Any
) -> Callable[[list[jax.Array]], jax.Array]:
    return jax.jit(partial(spec.assemble, dtype=dtype), out_shardings=sharding)
