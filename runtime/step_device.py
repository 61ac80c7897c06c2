"""What lives on the device while an engine runs, and the calls that change it.

Whoever drives it names a compiled program and gives arrays of the host. Parameters, pages, slots
and what one program leaves for the next stay here: so a call is all that another process needs to
hear of to do the same (see `paged.runtime.hosts`).
"""

from __future__ import annotations

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

    def call(self, key: Key, *inputs: HostArray) -> Any:
        """Enqueue a program, and give what it makes for the host; None if that is nothing.

        The call itself transfers the inputs, in a third of the time that `device_put` takes before
        one, maybe after it has returned: from then on nobody may write to them.

        Args:
            key: of the program. "sample" and "score" go on from the last "forward".
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

    def call(self, key: Key, *inputs: HostArray) -> Any:
        """See `Device`."""
        program = self.programs[key]
        match key[0]:
            case "forward":
                return self.forward(key, *inputs)
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

    def forward(self, key: Key, *inputs: HostArray | jax.Array) -> ForwardOut:
        """Enqueue the layers of a step, from the packed step and, in a later stage, its relay."""
        held = self.params, self.cache, self._slots
        out: ForwardOut
        self.cache, self._slots, out = self.programs[key](*held, *inputs)
        self._out = out
        return out

    def take(self, tokens: jax.Array) -> None:
        """Enqueue the taking of the newest tokens [R], which the last stage has chosen."""
        assert self._out is not None, "a step is begun before its tokens are chosen"
        program = self.programs["take", len(tokens)]
        self._slots = program(self._slots, self._out.sampling, tokens)

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

    def _sample(self, program: Any, mode: SamplingMode) -> Any:
        assert self._out is not None, "a step is begun before its tokens are chosen"
        kept = self._sampler if mode >= SamplingMode.ADJUSTED else None
        self._slots, kept, sampled = program(
            self._head, self._slots, kept, self._out.last_hidden, self._out.sampling
        )
        if kept is not None:
            self._sampler = kept
        return sampled
