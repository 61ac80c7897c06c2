"""What lives on the device while an engine runs, and the calls that change it.

Whoever drives it names a compiled program and gives arrays of the host. Parameters, pages, slots
and what one program leaves for the next stay here: so a call is all that another process needs to
hear of to do the same (see `paged.runtime.hosts`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from numpy.typing import NDArray

from paged.cache import PagedKVCache
from paged.models.layers import DecoderParams
from paged.runtime.compiler import Compiler
from paged.runtime.lowering import Key
from paged.runtime.programs import Programs
from paged.runtime.sampler import SamplerState, SamplingMode
from paged.runtime.steps import ForwardOut, StepShapes

HostArray = NDArray[Any] | np.generic

GIVING = ("sample", "score")
"""Programs that make something for the host."""


@dataclass
class Result:
    """What a call makes for the host, on its way there.

    Attributes:
        arrays: None until the program is enqueued, which a device made of stages puts off.
    """

    arrays: Any = None

    def come(self, arrays: Any) -> None:
        """The program is enqueued: have what it makes copied to the host."""
        self.arrays = arrays
        for array in jax.tree.leaves(arrays):
            array.copy_to_host_async()


class Device(Protocol):
    """What steps are launched on: one device, or several that work as one.

    Attributes:
        shapes: all that its programs are specialised for.
        params: of the model.
        programs: that can be called.
        cache: the pages.
    """

    shapes: StepShapes
    params: DecoderParams
    programs: Programs
    cache: PagedKVCache

    def call(self, key: Key, *inputs: HostArray) -> Result | None:
        """Enqueue a program, and give what it makes for the host; None if that is nothing.

        The call itself transfers the inputs, in a third of the time that `device_put` takes before
        one, maybe after it has returned: from then on nobody may write to them.

        Args:
            key: of the program. "sample" and "score" go on from the last "forward"; "drain" is
                none, but has all that was put off enqueued.
        """

    def explain(self, error: Exception) -> str:
        """What a call, or reading what it made, has failed of."""

    def wait(self) -> None:
        """Until all that is enqueued is done."""

    def close(self) -> None:
        """Give the device's memory back."""


def alone(device: Device) -> Device:
    """A device that nobody follows."""
    return device


class StepDevice:
    """A `Device` whose programs have all layers of the model, or those of one stage."""

    def __init__(
        self, shapes: StepShapes, params: DecoderParams, compiler: Compiler, *, progress: bool
    ) -> None:
        """Compile every program, then take the memory of pages and slots."""
        self.shapes = shapes
        self.params = params
        self._head = params.without_layers
        self.programs = Programs(shapes, params, compiler, show_progress=progress)
        self.cache: PagedKVCache = shapes.placement.zeros(shapes.cache)
        self._slots = shapes.placement.copied(shapes.slot_state())
        self._sampler: SamplerState = shapes.placement.copied(shapes.sampler_state())
        self._out: ForwardOut | None = None

    def call(self, key: Key, *inputs: HostArray) -> Result | None:
        """See `Device`."""
        if key[0] == "drain":
            return None  # nothing is ever put off
        made = self.enqueue(key, *inputs)
        if key[0] not in GIVING:
            return None
        result = Result()
        result.come(made)
        return result

    def enqueue(self, key: Key, *inputs: HostArray | jax.Array) -> Any:
        """Enqueue a program, and give what it makes beside the device's own state."""
        program = self.programs[key]
        match key[0]:
            case "forward":
                return self._forward(program, *inputs)
            case "sample":
                return self._sample(program, key[2])
            case "score":
                assert self._out is not None, "a step is begun before its prompt is scored"
                return program(self._head, self._out.hidden, *inputs)
            case "copy_pages":
                self.cache = program(self.cache, *inputs)
            case "update_tables":
                self._slots = program(self._slots, *inputs)
            case _:  # what the sampler is told
                self._sampler = program(self._sampler, *inputs)
        return None

    def take(self, tokens: jax.Array, sampling: jax.Array) -> None:
        """Enqueue the taking of a step's newest tokens [R], which the last stage has chosen.

        For `sampling` see `ForwardOut`, which the step's forward program made here.
        """
        self._slots = self.programs["take", len(tokens)](self._slots, sampling, tokens)

    def explain(self, error: Exception) -> str:
        """See `Device`."""
        return f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """See `Device`."""
        jax.block_until_ready(self._slots)

    def close(self) -> None:
        """See `Device`."""
        for array in jax.tree.leaves((self.params, self.cache, self._slots, self._sampler)):
            array.delete()

    def _forward(self, program: Any, *inputs: HostArray | jax.Array) -> ForwardOut:
        """The layers of a step, from the packed step and, in a later stage, its relay."""
        out: ForwardOut
        self.cache, self._slots, out = program(self.params, self.cache, self._slots, *inputs)
        self._out = out
        return out

    def _sample(self, program: Any, mode: SamplingMode) -> Any:
        assert self._out is not None, "a step is begun before its tokens are chosen"
        kept = self._sampler if mode >= SamplingMode.ADJUSTED else None
        self._slots, kept, sampled = program(
            self._head, self._slots, kept, self._out.last_hidden, self._out.sampling
        )
        if kept is not None:
            self._sampler = kept
        return sampled
