"""Stages of a model one after the other, as one device that works on a step in each of them.

Each stage has programs of its own, for its own devices. What it makes of a step goes to the next by
a small program that both run, and the tokens that the last one chooses go back to the first. Where
other processes have some of the stages, each calls what is its own, in the one order that follows
from the calls (see `paged.runtime.hosts`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled

from paged.models.mesh import TENSOR
from paged.runtime.buckets import Bucket
from paged.runtime.lowering import Key
from paged.runtime.placement import own_devices
from paged.runtime.programs import all_jobs, relay_shape
from paged.runtime.step_device import GIVING, HostArray, Result, StepDevice
from paged.runtime.steps import ForwardOut, StepShapes

_STAGE = "stage"
_TO_ALL = ("copy_pages", "update_tables")


class Hop:
    """Carries arrays that each device of a stage has to each device of another.

    Some of either must be this process's; the others' processes do the same at the same time.

    Args:
        source, target: meshes of as many devices.
        kinds: by key, the shapes of what will be carried.
    """

    def __init__(self, source: Mesh, target: Mesh, kinds: Mapping[Key, Any]) -> None:
        devices = np.stack([source.devices, target.devices])
        types = (AxisType.Auto,) * 2
        self._both = NamedSharding(
            Mesh(devices, (_STAGE, TENSOR), axis_types=types), PartitionSpec(_STAGE)
        )
        self._there = NamedSharding(target, PartitionSpec())
        self._target = own_devices(list(target.devices.flat))
        self._own = own_devices(list(devices.flat))
        self._kinds = dict(kinds)
        self._nothing: dict[jax.ShapeDtypeStruct, list[jax.Array]] = {}
        alike = {repr(kind): kind for kind in self._kinds.values()}
        compiled = {name: self._compiled(kind) for name, kind in alike.items()}
        self._programs = {key: compiled[repr(kind)] for key, kind in self._kinds.items()}

    def __call__(self, key: Key, arrays: Any) -> Any:
        """Enqueue the way of some arrays.

        Args:
            key: of the call that has made them.
            arrays: what is to be carried, if the source is here.

        Returns:
            The same at the target; None if that is elsewhere.
        """
        kind = self._kinds[key]
        leaves, tree = jax.tree.flatten(kind)
        sent = [None] * len(leaves) if arrays is None else jax.tree.leaves(arrays)
        joined = [self._joined(*pair) for pair in zip(leaves, sent, strict=True)]
        arrived = self._programs[key](joined)
        if not self._target:
            return None
        return jax.tree.unflatten(tree, [self._arrived(each) for each in arrived])

    def _compiled(self, kind: Any) -> Compiled:
        def carry(arrays: list[jax.Array]) -> list[jax.Array]:
            return [lax.ppermute(each, _STAGE, [(0, 1)]) for each in arrays]

        leaves: list[jax.ShapeDtypeStruct] = jax.tree.leaves(kind)
        for each in leaves:
            nothing = np.zeros(each.shape, each.dtype)
            self._nothing[each] = [jax.device_put(nothing, device) for device in self._target]
        spec = self._both.spec
        spread = jax.shard_map(
            carry, mesh=self._both.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        shapes = [
            jax.ShapeDtypeStruct(_twice(each.shape), each.dtype, sharding=self._both)
            for each in leaves
        ]
        return jax.jit(spread).lower(shapes).compile()

    def _joined(self, kind: jax.ShapeDtypeStruct, sent: jax.Array | None) -> jax.Array:
        """One array of both stages: what is sent, and at the target as much of nothing."""
        own = {each.device: each for each in self._nothing[kind]}
        own |= {} if sent is None else {x.device: x.data for x in sent.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            _twice(kind.shape), self._both, [own[device] for device in self._own]
        )

    def _arrived(self, joined: jax.Array) -> jax.Array:
        """The target's part."""
        shards = {each.device: each.data for each in joined.addressable_shards}
        own = [shards[device] for device in self._target]
        return jax.make_array_from_single_device_arrays(own[0].shape, self._there, own)


@dataclass
class _Call:
    """A call that some stage makes when the step comes to it.

    Attributes:
        result: what the host waits for, if anything.
        made: the same on the devices that make it.
    """

    key: Key
    inputs: tuple[HostArray, ...]
    result: Result | None
    made: Any = None


@dataclass
class _Wave:
    """A step on its way through the stages, with all that is called for its sake.

    Attributes:
        forward: the key of its layers; None while they have not been called.
        relay: what the next stage goes on from, if it or the one before is here.
        sampling: see `ForwardOut`; there where the first stage is.
    """

    calls: list[_Call] = field(default_factory=list)
    forward: Key | None = None
    relay: Any = None
    sampling: Any = None


class Pipeline:
    """A `Device` made of stages, each of which works on another step.

    A step moves on by one stage when the next one is called, or with "drain" through all that are
    left: its results are enqueued when it leaves the last one. Every stage makes the calls of a
    step, those before its layers included, when the step comes to it: so each sees all steps in
    their order. Tokens are back at the first stage before it begins the step that is called as
    many steps later as there are stages, and not sooner.

    Args:
        own: the stages of this process, by their index.
        shapes: of all stages.
        last_params: the shapes of the last one's parameters.
    """

    def __init__(
        self, own: Mapping[int, StepDevice], shapes: Sequence[StepShapes], last_params: Any
    ) -> None:
        self._own = own
        some = next(iter(own.values()))
        self.shapes, self.params = some.shapes, some.params
        self.programs, self.cache = some.programs, some.cache
        forward = {("forward", each): _relay(shapes[0], each) for each in self.shapes.buckets.all()}
        self._onward = [_hop(*pair, forward) for pair in pairwise(shapes)]
        self._back = _hop(shapes[-1], shapes[0], _results(shapes[-1], last_params))
        self._called = _Wave()
        # What each stage but the first works on next: the newest step first.
        self._line: deque[_Wave | None] = deque([None] * len(self._onward))

    def call(self, key: Key, *inputs: HostArray) -> Result | None:
        """See `Device`. Results are there where the first stage is."""
        if key[0] == "drain":
            self._drain()
            return None
        if key[0] == "forward" and self._called.forward is not None:
            self._called = _Wave()  # no token of that step was wanted
        wave = self._called
        result = Result() if key[0] in GIVING else None
        wave.calls.append(_Call(key, inputs, result))
        if key[0] == "forward":
            wave.forward = key
            self._move_on(wave)
        elif key[0] == "sample":
            self._called = _Wave()
        return result

    def explain(self, error: Exception) -> str:
        """See `Device`."""
        return f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """See `Device`."""
        for stage in self._own.values():
            stage.wait()

    def close(self) -> None:
        """See `Device`."""
        for stage in self._own.values():
            stage.close()

    def _drain(self) -> None:
        while any(self._line):
            self._move_on(None)
        if self._called.forward is not None:
            self._called = _Wave()

    def _move_on(self, wave: _Wave | None) -> None:
        """Have every stage enqueue its part of its step, then all steps move on by one.

        What moves ties two stages together, and is enqueued in the same order by all of them.
        """
        at = [wave, *self._line]
        for index, stage in self._own.items():
            if (each := at[index]) is not None:
                self._make_calls(index, stage, each)
        for index, hop in enumerate(self._onward):
            if hop is not None and (each := at[index]) is not None and each.forward is not None:
                each.relay = hop(each.forward, each.relay if index in self._own else None)
        if (done := at.pop()) is not None and self._back is not None:
            self._give_back(self._back, done)
        self._line = deque(at)

    def _make_calls(self, index: int, stage: StepDevice, wave: _Wave) -> None:
        is_last = index == len(self._onward)
        for call in wave.calls:
            if call.key[0] == "forward":
                received = () if index == 0 else (wave.relay,)
                out: ForwardOut = stage.enqueue(call.key, *call.inputs, *received)
                wave.relay = out.relay
                if index == 0:
                    wave.sampling = out.sampling
            elif is_last or call.key[0] in _TO_ALL:
                call.made = stage.enqueue(call.key, *call.inputs)

    def _give_back(self, back: Hop, wave: _Wave) -> None:
        """Enqueue the way of what the last stage has made to the first one."""
        for call in wave.calls:
            if call.result is None:
                continue
            arrived = back(call.key, call.made)
            if 0 in self._own:
                call.result.come(arrived)
                if call.key[0] == "sample":
                    self._own[0].take(arrived.tokens, wave.sampling)


def _hop(source: StepShapes, target: StepShapes, kinds: Mapping[Key, Any]) -> Hop | None:
    """The way from one stage to another; None if this process has neither."""
    here, there = source.placement.mesh, target.placement.mesh
    assert here is not None, "stages have meshes"
    assert there is not None, "stages have meshes"
    devices = [*here.devices.flat, *there.devices.flat]
    return Hop(here, there, kinds) if own_devices(devices) else None


def _relay(shapes: StepShapes, bucket: Bucket) -> jax.ShapeDtypeStruct:
    assert shapes.stage is not None, "a pipeline is of stages"
    return relay_shape(shapes.stage, bucket)


def _results(shapes: StepShapes, params: Any) -> dict[Key, Any]:
    """What the last stage makes for the host, by the calls that it makes it at."""
    results = {}
    for key, job in all_jobs(shapes, params):
        if key[0] in GIVING:
            out = jax.eval_shape(job.function, *job.args)
            results[key] = out[2] if key[0] == "sample" else out
    return {key: jax.tree.map(_bare, each) for key, each in results.items()}


def _bare(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(each.shape, each.dtype)


def _twice(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (2 * shape[0], *shape[1:])
