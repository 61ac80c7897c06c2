"""What the host does in a decode step, part by part, and how long the device waits for it.

    python benchmarks/host_time.py MODEL --batches 32,256 [--json FILE] [--no-device]

Every part is timed by the clock while `batch` sequences decode, by wrapping the engine's own
functions; a part's time is without the parts within it. The device's own time of a step is that of
many equal steps enqueued without reading any: what the engine's steps take beyond it, relative to
them, is the idle share. The host's time matters only as far as it is not hidden behind the device.

--no-device puts nothing in place of the compiled steps, so that nothing is compiled and nobody else
wants the processor: what is left is the Python of a step, to be compared between two commits.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.offline_baselines import add_engine_arguments, decoding, engine_config
from paged.models.loading import resolve_model
from paged.runtime import runner, step_device
from paged.runtime.core import EngineCore
from paged.runtime.plan import StepPlan
from paged.runtime.programs import Programs
from paged.runtime.runner import InFlight, StepRunner
from paged.runtime.scheduler import Scheduler
from paged.runtime.steps import ForwardOut, Sampled, StepShapes

STEPS = 64
REPLAYS = (8, 32)
WAIT = "wait for the device"
PARTS: tuple[tuple[Any, str, str], ...] = (
    (EngineCore, "step", "outputs and the rest"),
    (Scheduler, "schedule", "schedule"),
    (StepRunner, "launch", "launch, the rest"),
    (runner, "pack", "pack"),
    (InFlight, "read", WAIT),
    (Scheduler, "update", "update"),
)
"""What is timed, where its name is looked up, and what to call it."""


@dataclass
class Stopwatch:
    """Times nested calls: seconds of each part in each step, without the parts within it."""

    steps: list[dict[str, float]] = field(default_factory=list)
    _open: list[float] = field(default_factory=list)  # seconds of the parts within, by depth

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, its calls counted under a name."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                self.steps.append(defaultdict(float))
            self._open.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - start
                self.steps[-1][name] += seconds - self._open.pop()
                if self._open:
                    self._open[-1] += seconds

        return call

    def medians(self) -> dict[str, float]:
        """Microseconds of each part in a step."""
        names = dict.fromkeys(name for step in self.steps for name in step)
        return {
            name: 1e6 * statistics.median(step.get(name, 0.0) for step in self.steps)
            for name in names
        }


class NoPrograms(Programs):
    """Programs that do nothing: every row's token is 0."""

    def __init__(self, shapes: StepShapes, *_: object, **__: object) -> None:
        tokens = jnp.zeros(shapes.buckets.max_num_seqs, jnp.int32)
        nothing = ForwardOut(tokens, tokens, None)
        self._of_kind: dict[str, Callable[..., Any]] = {
            "forward": lambda params, cache, slots, packed: (cache, slots, nothing),
            "sample": lambda params, slots, kept, *out: (slots, kept, Sampled(tokens, None)),
            "update_tables": lambda slots, updates: slots,
        }

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self._of_kind[key[0]]


@contextmanager
def watched(programs: type[Programs]) -> Iterator[Stopwatch]:
    """Meanwhile every part of a step is timed, the calls of `programs` among them."""
    watch = Stopwatch()
    find = programs.__getitem__

    def program(self: Programs, key: tuple[Any, ...]) -> Callable[..., Any]:
        return watch.timed(f"dispatch {key[0]}", find(self, key))

    with ExitStack() as stack:
        for owner, name, title in PARTS:
            part = watch.timed(title, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, part))
        stack.enter_context(patch.object(programs, "__getitem__", program))
        yield watch


@contextmanager
def last_launch() -> Iterator[Callable[[], InFlight]]:
    """Meanwhile gives a call that enqueues the engine's latest step again."""
    calls: list[tuple[StepRunner, StepPlan]] = []
    launch = StepRunner.launch

    def remembered(self: StepRunner, plan: StepPlan) -> InFlight:
        calls[:] = [(self, plan)]
        return launch(self, plan)

    with patch.object(StepRunner, "launch", remembered):
        yield lambda: launch(*calls[0])


@dataclass(frozen=True)
class HostTime:
    """One batch size.

    Attributes:
        batch: sequences that decode.
        parts: microseconds of each part, medians over steps.
        host: microseconds of all parts but the wait.
        step: microseconds of a step, mean, nothing wrapped.
        device: microseconds of a step on the device alone.
    """

    batch: int
    parts: dict[str, float]
    host: float
    step: float
    device: float

    @property
    def idle(self) -> float:
        """Share of the time in which the device waited."""
        return max(1 - self.device / self.step, 0.0)

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"batch {self.batch}: step {self.step:,.0f} us, device {self.device:,.0f} us"
        for name, microseconds in self.parts.items():
            yield f"  {name:24} {microseconds:8,.0f} us"
        yield f"  {'host, all but the wait':24} {self.host:8,.0f} us"
        yield f"  {'device idle':24} {self.idle:8.1%}"


def measure(core: EngineCore, batch: int, vocab_size: int, programs: type[Programs]) -> HostTime:
    """Decode with `batch` sequences: as it is, then watched, then without a host."""
    with last_launch() as again, decoding(core, batch, vocab_size):
        step = _seconds_per_call(core.step)
        with watched(programs) as watch:
            for _ in range(STEPS):
                core.step()
        device = _device_seconds(again)
    parts = watch.medians()
    host = sum(microseconds for name, microseconds in parts.items() if name != WAIT)
    return HostTime(batch, parts, host, 1e6 * step, 1e6 * device)


def _seconds_per_call(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        function()
    return (time.perf_counter() - start) / STEPS


def _device_seconds(again: Callable[[], InFlight]) -> float:
    """Of one of many equal steps that wait in the device's queue; what they take once is left out.

    (On a device faster than its host it is the host's time.)
    """
    few, many = (min(_queue_seconds(again, count) for _ in range(3)) for count in REPLAYS)
    return (many - few) / (REPLAYS[1] - REPLAYS[0])


def _queue_seconds(again: Callable[[], InFlight], count: int) -> float:
    """From an idle device to the end of the last of so many steps."""
    again().read()
    start = time.perf_counter()
    steps = [again() for _ in range(count)]
    steps[-1].read()
    return time.perf_counter() - start


def main() -> None:
    """Start the engine and measure each batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add_engine_arguments(parser)
    parser.add_argument("--batches", default="1,32,128,256")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--no-device", action="store_true", help="steps that compute nothing")
    args = parser.parse_args()
    source = resolve_model(args.model, load_format="dummy")
    programs = NoPrograms if args.no_device else Programs
    with patch.object(step_device, "Programs", programs):
        core = EngineCore(engine_config(args), source, progress=False)
    results = []
    for batch in map(int, args.batches.split(",")):
        result = measure(core, batch, source.config.vocab_size, programs)
        print("\n".join(result.lines()), flush=True)
        results.append({**vars(result), "idle": result.idle})
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    core.close()


if __name__ == "__main__":
    main()
