"""Weights as GGUF files store them, and their way into `GroupShifted`.

A row of a tensor is a run of records of 32 or 256 neighbouring inputs. A record holds a scale, and
of some types a shift, in float16; of 256 inputs, these are the units of the scales and shifts of
smaller groups. Nothing is rounded: values of 5 and 6 bits take a byte here, of 2 and 3 half of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.quantized.groups import pack
from paged.models.quantized.making import made
from paged.models.quantized.shifted import GroupShifted, ShiftedEmbedding
from paged.models.quantized.stored import Tensor, stored
from paged.models.weights import Dense, Embedding, Linear, ParamSpec

_BYTES, _UNITS, _F16 = jnp.dtype(jnp.uint8), jnp.dtype(jnp.int8), jnp.dtype(jnp.float16)
_MOST_UNITS = 127
Fields = Mapping[str, jax.Array]


class _Kind(NamedTuple):
    """A type of tensors.

    Attributes:
        record: inputs of a record.
        size: bytes of a record.
        group: inputs that share a scale.
        bits: that a value takes here.
        shifted: groups have shifts; else the middle value stands for 0.
        read: fields of records [N, R, size] uint8, with the values [N, R, record], and for scales,
            shifts and units as many as a record has.
    """

    record: int
    size: int
    group: int
    bits: int
    shifted: bool
    read: Callable[[jax.Array], Fields]

    @property
    def in_units(self) -> bool:
        """Scales and shifts are integers, in units that a record has."""
        return self.group < self.record

    @property
    def fields(self) -> tuple[str, ...]:
        """What the arrays of a weight are called."""
        numbers = ("scale", "shift") if self.shifted else ("scale",)
        return ("weight", *numbers, *(f"{each}_unit" for each in numbers if self.in_units))


@dataclass(frozen=True)
class GgmlTensors:
    """The scheme of the tensors of a type, and their layout.

    Attributes:
        kind: name of the type, one of `KEPT_TYPES`.
    """

    kind: str

    def describe(self, weight: Dense) -> Linear:
        """See `Scheme`."""
        return stored(self._described(weight, _F16), self)

    def describe_embedding(self, embedding: Embedding) -> Any:
        """The description of an embedding stored in this way, from that in full precision.

        Every device has it whole.
        """
        table: Any = embedding.table
        inputs_first: Any = ParamSpec(
            table.parts, table.shape[::-1], (None, None), table.init, transpose=True
        )
        rows: Any = self._described(Dense(inputs_first), None)
        return ShiftedEmbedding(stored(rows, self))

    def tensors(self, field: str, outputs: int, inputs: int) -> tuple[Tensor, ...]:
        """See `Layout`."""
        kind = _KINDS[self.kind]
        return (Tensor("weight", (outputs, inputs // kind.record * kind.size), np.dtype(np.uint8)),)

    def decode(self, field: str, outputs: int, *tensors: jax.Array) -> jax.Array:
        """See `Layout`."""
        kind = _KINDS[self.kind]
        records = tensors[0].reshape(outputs, -1, kind.size)
        return kind.read(records)[field].reshape(outputs, -1)

    def arrange(self, field: str, rows: jax.Array) -> jax.Array:
        """See `Layout`."""
        kind, inputs_first = _KINDS[self.kind], jnp.moveaxis(rows, -1, 0)
        return pack(inputs_first, kind.bits, kind.group) if field == "weight" else inputs_first

    def __call__(self, kernel: jax.Array) -> Fields:
        """See `Quantizer`: of weights that are drawn at random."""
        kind = _KINDS[self.kind]
        groups = kernel.reshape(-1, kind.group, *kernel.shape[1:])
        low, high = jnp.min(groups, axis=1), jnp.max(groups, axis=1)
        if not kind.shifted:
            high = jnp.maximum(-low, high)
            low = -high
        scale = jnp.maximum((high - low) / (2**kind.bits - 1), jnp.finfo(_F16).tiny)
        numbers = {"scale": scale} | ({"shift": low} if kind.shifted else {})
        values = jnp.round((groups - low[:, None]) / scale[:, None]).astype(jnp.uint8)
        out = {"weight": pack(values.reshape(kernel.shape), kind.bits, kind.group)}
        for name, each in numbers.items():
            out |= _units(name, each, kind.record // kind.group) if kind.in_units else {name: each}
        return out

    def _described(self, weight: Dense, floats: jnp.dtype | None) -> GroupShifted:
        """As it is made of a plain weight, with scales and shifts in `floats`."""
        kernel: Any = weight.kernel
        kind = _KINDS[self.kind]
        (inputs, *outputs), (input_axis, *axes) = kernel.shape, kernel.axes

        def array(field: str) -> Any:
            dtype, each = _UNITS if kind.in_units else floats, kind.group
            if field == "weight":
                dtype, each = _BYTES, 8 // kind.bits
            elif field.endswith("_unit"):
                dtype, each = floats, kind.record
            rows = inputs // each
            axis = input_axis if rows > 1 else None
            return made(self, kernel, field, (rows, *outputs), (axis, *axes), dtype)

        arrays = {field: array(field) for field in kind.fields}
        return GroupShifted(**arrays, bias=weight.bias, bits=kind.bits)


def _units(name: str, numbers: jax.Array, many: int) -> Fields:
    """Numbers [G, *N] as integers, and the units that so many neighbours share."""
    shared = numbers.reshape(-1, many, *numbers.shape[1:])
    unit = jnp.max(jnp.abs(shared), axis=1) / _MOST_UNITS
    whole = jnp.round(shared / unit[:, None]).astype(_UNITS)
    return {name: whole.reshape(numbers.shape), f"{name}_unit": unit}


def _float16(two: jax.Array) -> jax.Array:
    """Bytes [..., 2] to [..., 1]."""
    return jax.lax.bitcast_convert_type(two, _F16)[..., None]


def _runs(data: jax.Array, many: int, bits: int) -> jax.Array:
    """Bytes [..., many * S] of S bytes a run: first the lowest bits of all, then those above, ...

    Returns:
        [..., many, 8 / bits, S].
    """
    runs = data.reshape(*data.shape[:-1], many, 1, -1)
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]
    return (runs >> shifts) & (2**bits - 1)


def _flat(values: jax.Array) -> jax.Array:
    """[N, R, ...] to [N, R, C]."""
    return values.reshape(*values.shape[:2], -1)


def _fifth_bits(four: jax.Array) -> jax.Array:
    """Bytes [N, R, 4], a bit for each of 32 values, to [N, R, 32] of 0 or 16."""
    bits = (four[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
    return _flat(bits) << 4


def _q4_0(data: jax.Array) -> Fields:
    return {"weight": _flat(_runs(data[..., 2:], 1, 4)), "scale": _float16(data[..., :2])}


def _q4_1(data: jax.Array) -> Fields:
    scale, shift = _float16(data[..., :2]), _float16(data[..., 2:4])
    return {"weight": _flat(_runs(data[..., 4:], 1, 4)), "scale": scale, "shift": shift}


def _q5_0(data: jax.Array) -> Fields:
    values = _flat(_runs(data[..., 6:], 1, 4)) | _fifth_bits(data[..., 2:6])
    return {"weight": values + (128 - 16), "scale": _float16(data[..., :2])}


def _q5_1(data: jax.Array) -> Fields:
    values = _flat(_runs(data[..., 8:], 1, 4)) | _fifth_bits(data[..., 4:8])
    scale, shift = _float16(data[..., :2]), _float16(data[..., 2:4])
    return {"weight": values, "scale": scale, "shift": shift}


def _q8_0(data: jax.Array) -> Fields:
    return {"weight": data[..., 2:] ^ 128, "scale": _float16(data[..., :2])}


def _q2_k(data: jax.Array) -> Fields:
    numbers, values = data[..., :16], _flat(_runs(data[..., 16:80], 2, 2))
    return {"weight": values, **_scaled(numbers & 15, numbers >> 4, data[..., 80:84])}


def _q3_k(data: jax.Array) -> Fields:
    third, low = data[..., None, :32], _runs(data[..., 32:96], 2, 2)
    bits = (third >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1
    values = low + (bits.reshape(low.shape) << 2)
    scale = _flat(_runs(data[..., 96:104], 1, 4)) | _flat(_runs(data[..., 104:108], 1, 2)) << 4
    return {
        "weight": _flat(values) + (8 - 4),
        "scale": scale.astype(_UNITS) - 32,
        "scale_unit": _float16(data[..., 108:]),
    }


def _q4_k(data: jax.Array) -> Fields:
    return {"weight": _flat(_runs(data[..., 16:], 4, 4)), **_six_bits(data)}


def _q5_k(data: jax.Array) -> Fields:
    high = (data[..., None, 16:48] >> jnp.arange(8, dtype=jnp.uint8)[:, None]) & 1
    values = _flat(_runs(data[..., 48:], 4, 4)) | _flat(high) << 4
    return {"weight": values, **_six_bits(data)}


def _q6_k(data: jax.Array) -> Fields:
    low = data[..., :128].reshape(*data.shape[:-1], 2, 1, 64)
    low = jnp.concatenate([low & 15, low >> 4], axis=-2)
    values = _flat(low) | _flat(_runs(data[..., 128:192], 2, 2)) << 4
    scale = jax.lax.bitcast_convert_type(data[..., 192:208], _UNITS)
    unit = _float16(data[..., 208:])
    return {"weight": values + (128 - 32), "scale": scale, "scale_unit": unit}


def _six_bits(data: jax.Array) -> Fields:
    """Of 8 groups, whose scales and shifts of 6 bits are in 12 bytes behind two units."""
    first, second, rest = data[..., 4:8], data[..., 8:12], data[..., 12:16]
    scale = jnp.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], axis=-1)
    shift = jnp.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], axis=-1)
    return _scaled(scale, shift, data[..., :4])


def _scaled(scale: jax.Array, shift: jax.Array, units: jax.Array) -> Fields:
    """Scales and shifts in units, which the shifts are subtracted in."""
    return {
        "scale": scale.astype(_UNITS),
        "shift": shift.astype(_UNITS),
        "scale_unit": _float16(units[..., :2]),
        "shift_unit": -_float16(units[..., 2:]),
    }


_KINDS = {
    "Q4_0": _Kind(32, 18, 32, 4, False, _q4_0),
    "Q4_1": _Kind(32, 20, 32, 4, True, _q4_1),
    "Q5_0": _Kind(32, 22, 32, 8, False, _q5_0),
    "Q5_1": _Kind(32, 24, 32, 8, True, _q5_1),
    "Q8_0": _Kind(32, 34, 32, 8, False, _q8_0),
    "Q2_K": _Kind(256, 84, 16, 4, True, _q2_k),
    "Q3_K": _Kind(256, 110, 16, 4, False, _q3_k),
    "Q4_K": _Kind(256, 144, 32, 4, True, _q4_k),
    "Q5_K": _Kind(256, 176, 32, 8, True, _q5_k),
    "Q6_K": _Kind(256, 210, 16, 8, False, _q6_k),
}
KEPT_TYPES = tuple(_KINDS)
