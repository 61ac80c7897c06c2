"""A plan as arrays: everything a step needs from the host, in one int32 array and one transfer.

    tokens T | slots R | query_len R | context_len R | page updates 3 * D | sampling rows R * F

Tokens that only the device knows yet are -1; floats travel as their bits. `pack` writes this layout
on the host, `unpack` reads it inside the compiled step; `Layout` is the one place that knows where
things stand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from paged.runtime.buckets import Bucket
from paged.runtime.plan import PageUpdate, StepPlan
from paged.runtime.sampler import SamplingRows

ON_DEVICE = -1
"""A token id that the host does not know: the slot's newest token."""

_INT_FIELDS = ("slots", "samples", "seed_high", "seed_low", "output_index", "top_k")
_FLOAT_FIELDS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
SAMPLING_FIELDS = (*_INT_FIELDS, *_FLOAT_FIELDS)
_SAMPLES, _OUTPUT_INDEX = map(SAMPLING_FIELDS.index, ("samples", "output_index"))


@dataclass(frozen=True)
class Layout:
    """Where each part of a bucket's packed array stands.

    Attributes:
        bucket: T tokens and R rows.
        num_updates: page-table entries D that one step can change.
    """

    bucket: Bucket
    num_updates: int

    @classmethod
    def make(cls, bucket: Bucket, page_size: int, num_groups: int = 1) -> Layout:
        """Room for the pages a step's tokens can fill, and two more a row (its ends, a copy).

        All but the last in each group of layers.
        """
        num_pages = num_groups * (bucket.num_tokens // page_size + bucket.num_rows)
        return cls(bucket, num_pages + bucket.num_rows)

    @property
    def size(self) -> int:
        return self.sampling_start + self.bucket.num_rows * len(SAMPLING_FIELDS)

    def slots(self, packed: NDArray[np.int32], num_rows: int) -> NDArray[np.int32]:
        """Those of the first rows of a packed step."""
        start = self.bucket.num_tokens
        return packed[start : start + num_rows]

    @property
    def updates_start(self) -> int:
        return self.bucket.num_tokens + 3 * self.bucket.num_rows

    @property
    def sampling_start(self) -> int:
        return self.updates_start + 3 * self.num_updates


class StepBatch(NamedTuple):
    """A step's inputs on the device.

    Attributes:
        tokens: [T] int32, ON_DEVICE where the slot's newest token goes.
        slots, query_len, context_len: [R] int32 (see `AttentionMetadata`).
        updates: [D, 3] int32 `PageUpdate`s; padding rows have a table out of range.
        sampling: [R, F] int32, for `unpack_sampling`.
    """

    tokens: jax.Array
    slots: jax.Array
    query_len: jax.Array
    context_len: jax.Array
    updates: jax.Array
    sampling: jax.Array


class SlotSampling:
    """Host table of the sampling parameters of every slot, filled when a sequence is admitted."""

    def __init__(self, num_slots: int) -> None:
        self.table: NDArray[np.int32] = np.zeros((num_slots, len(SAMPLING_FIELDS)), np.int32)
        self.table[:, SAMPLING_FIELDS.index("slots")] = np.arange(num_slots)

    def set(self, slot: int, seed: int, top_k: int, floats: dict[str, float]) -> None:
        """Enter a sequence's parameters; `seed` is its 64 bits, `floats` the float fields."""
        row = self.table[slot]
        seed_bits = np.array([seed & (2**64 - 1)], np.uint64).view(np.int32)
        row[SAMPLING_FIELDS.index("seed_low")], row[SAMPLING_FIELDS.index("seed_high")] = seed_bits
        row[SAMPLING_FIELDS.index("top_k")] = top_k
        values = np.array([floats[name] for name in _FLOAT_FIELDS], np.float32)
        row[len(_INT_FIELDS) :] = values.view(np.int32)


def pack(plan: StepPlan, layout: Layout, sampling: SlotSampling) -> NDArray[np.int32]:
    """The plan as one [layout.size] int32 array; page updates beyond the room are an error."""
    bucket, rows = layout.bucket, plan.rows
    packed = np.zeros(layout.size, np.int32)
    tokens = _tokens(plan)
    packed[: len(tokens)] = tokens
    table = packed[bucket.num_tokens : layout.updates_start].reshape(3, bucket.num_rows)
    slots, lengths, starts = table[:, : len(rows)]
    slots[:] = [row.slot for row in rows]
    lengths[:] = [row.length for row in rows]
    starts[:] = [row.start for row in rows]
    updates = packed[layout.updates_start : layout.sampling_start].reshape(-1, 3)
    updates[:] = pack_updates(plan.page_updates, layout.num_updates)
    fields = packed[layout.sampling_start :].reshape(bucket.num_rows, len(SAMPLING_FIELDS))
    fields = fields[: len(rows)]
    fields[:] = sampling.table[slots]
    fields[:, _SAMPLES] = [row.samples for row in rows]
    fields[:, _OUTPUT_INDEX] = starts + lengths - [len(row.sequence.prompt) for row in rows]
    return packed


def pack_updates(updates: tuple[PageUpdate, ...], size: int) -> NDArray[np.int32]:
    """[size, 3] int32 with padding rows last."""
    packed = np.full((size, 3), np.iinfo(np.int32).max, np.int32)
    if updates:
        packed[: len(updates)] = np.array(updates, np.int32)
    return packed


def _tokens(plan: StepPlan) -> list[int]:
    tokens: list[int] = []
    for row in plan.rows:
        sequence, start, length = row.sequence, row.start, row.length
        num_known = sequence.num_tokens - start
        if num_known > 0:
            tokens += sequence.tokens(start, start + min(length, num_known))
        if num_known < length:  # by one: only the newest is not known
            tokens.append(ON_DEVICE)
    return tokens


def unpack(packed: jax.Array, layout: Layout) -> StepBatch:
    """The parts of a packed step."""
    bucket = layout.bucket
    table = packed[bucket.num_tokens : layout.updates_start].reshape(3, bucket.num_rows)
    return StepBatch(
        tokens=packed[: bucket.num_tokens],
        slots=table[0],
        query_len=table[1],
        context_len=table[2],
        updates=packed[layout.updates_start : layout.sampling_start].reshape(-1, 3),
        sampling=packed[layout.sampling_start :].reshape(bucket.num_rows, len(SAMPLING_FIELDS)),
    )


def unpack_sampling(sampling: jax.Array) -> SamplingRows:
    """The sampling parameters of each row, from [R, F] int32."""
    columns = {name: sampling[:, i] for i, name in enumerate(SAMPLING_FIELDS)}
    floats = {name: lax.bitcast_convert_type(columns[name], jnp.float32) for name in _FLOAT_FIELDS}
    seed = jnp.stack([columns["seed_high"], columns["seed_low"]], axis=1)
    return SamplingRows(
        slots=columns["slots"],
        samples=columns["samples"] != 0,
        seed=lax.bitcast_convert_type(seed, jnp.uint32),
        output_index=columns["output_index"],
        top_k=columns["top_k"],
        **floats,
    )
