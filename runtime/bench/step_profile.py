"""`paged bench profile`: where the time of an engine's steps goes, kernel by kernel.

JAX's profiler records them. On a GPU it tells of kernels by the card's own clock; on a CPU of XLA's
operations, each on one thread or spread over several, by the clock of the host.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax

from paged.runtime.bench.offline import config_of, sampling
from paged.runtime.bench.options import ProfileOptions
from paged.runtime.bench.publish import write_text
from paged.runtime.bench.workloads import IdRange, random_requests
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.engine import find_model
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.messages import EngineRequest

# Steps that a batch decodes before any is recorded: pages and programs are warm then.
_WARM_STEPS = 3
_STREAM = "Stream"


@dataclass(frozen=True)
class Kernel:
    """What the trace says of one kernel or operation.

    Attributes:
        program: that it is part of, as XLA calls it.
        ms: of a step, in all its launches.
        launches: in a step.
    """

    name: str
    program: str
    ms: float
    launches: float


@dataclass(frozen=True)
class ProfileReport:
    """Some steps of an engine.

    Attributes:
        num_steps, num_tokens: recorded, and the tokens in them.
        step_ms: of a step by the clock.
        host_ms: of the host in a step, which the device may hide.
        kernels: the longest first.
        device: what ran them.
        top: how many kernels `lines` tells.
    """

    phase: str
    num_steps: int
    num_tokens: int
    step_ms: float
    host_ms: float
    kernels: list[Kernel]
    device: str
    top: int

    @property
    def kernel_ms(self) -> float:
        """Of all kernels in a step."""
        return sum(kernel.ms for kernel in self.kernels)

    def lines(self) -> Iterator[str]:
        launches = sum(kernel.launches for kernel in self.kernels)
        yield (
            f"{self.num_steps} steps ({self.phase}) of {self.num_tokens / self.num_steps:.1f} "
            f"tokens on {self.device}: {self.step_ms:.3f} ms each by the clock, kernels "
            f"{self.kernel_ms:.3f} ms in {launches:.1f} launches, host {self.host_ms:.3f} ms"
        )
        yield f"{'ms/step':>9} {'share':>6} {'launches':>9}  kernel"
        for kernel in self.kernels[: self.top]:
            share = kernel.ms / self.kernel_ms
            name = f"{kernel.name} ({kernel.program})" if kernel.program else kernel.name
            yield f"{kernel.ms:9.4f} {share:6.1%} {kernel.launches:9.1f}  {name}"
        if left := self.kernels[self.top :]:
            ms = sum(kernel.ms for kernel in left)
            yield f"{ms:9.4f} {ms / self.kernel_ms:6.1%} {'':9}  {len(left)} more"

    def as_json(self) -> dict[str, Any]:
        return {
            name: value for name, value in asdict(self).items() if name not in ("top", "kernels")
        } | {"kernel_ms": self.kernel_ms, "kernels": [asdict(each) for each in self.kernels]}


def run_profile(args: argparse.Namespace) -> int:
    """Returns 0.

    Raises:
        ConfigError, InvalidRequest: the run cannot be made as asked.
    """
    options = read_flags(ProfileOptions, args)
    report = profile(config_of(args), options)
    for line in report.lines():
        sys.stdout.write(line + "\n")
    if options.output_json:
        text = json.dumps(report.as_json(), indent=2) + "\n"
        write_text(Path(options.output_json), text)
    return 0


def profile(config: EngineConfig, options: ProfileOptions) -> ProfileReport:
    """Start an engine, give it a batch, and record its steps. Raises ConfigError."""
    with ExitStack() as stack:
        folder = _made(options.trace_dir) or Path(stack.enter_context(TemporaryDirectory()))
        core = EngineCore(config, find_model(config), progress=not options.disable_tqdm)
        stack.callback(core.close)
        return _profile(core, config, options, folder)


def _made(folder: str | None) -> Path | None:
    """The folder, there before anything is measured. Raises ConfigError if it cannot be."""
    if folder is None:
        return None
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--trace-dir {folder}: {error.strerror}") from error
    return Path(folder)


def _profile(
    core: EngineCore, config: EngineConfig, options: ProfileOptions, folder: Path
) -> ProfileReport:
    is_prefill = options.phase == "prefill"
    num_outputs = options.num_steps + _WARM_STEPS + 4
    if options.input_len + num_outputs > core.max_model_len:
        raise ConfigError(
            f"--input-len {options.input_len} and {num_outputs} tokens after it are more than the "
            f"model's {core.max_model_len}: lower --input-len or --num-steps"
        )
    if not is_prefill:  # the first prompts are computed, and programs run, before the record
        _add_batch(core, config, options, num_outputs)
        _decode_all(core, options.batch_size)
    before = core.stats()
    with _recorded(folder):
        start = time.perf_counter()
        if is_prefill:
            _add_batch(core, config, options, num_outputs)
            _decode_all(core, options.batch_size, more=0)
        else:
            for _ in range(options.num_steps):
                core.step()
        seconds = time.perf_counter() - start
    after = core.stats()
    num_steps = after.num_steps - before.num_steps
    host = after.steps.host_seconds.total - before.steps.host_seconds.total
    return ProfileReport(
        phase=options.phase,
        num_steps=num_steps,
        num_tokens=int(after.steps.num_tokens.total - before.steps.num_tokens.total),
        step_ms=1e3 * seconds / num_steps,
        host_ms=1e3 * host / num_steps,
        kernels=read_kernels(folder, num_steps),
        device=jax.devices()[0].device_kind,
        top=options.top,
    )


def _add_batch(
    core: EngineCore, config: EngineConfig, options: ProfileOptions, num_outputs: int
) -> None:
    """Queue prompts that have nothing in common."""
    ids = IdRange.below(core.vocab_size)
    batch = random_requests(
        options.batch_size, options.input_len, num_outputs, seed=config.seed, ids=ids
    )
    for number, request in enumerate(batch):
        params = sampling(num_outputs, n=1, ignore_eos=True, detokenize=False)
        assert isinstance(request.prompt, list), "random prompts are token ids"
        core.add(EngineRequest(str(number), request.prompt, params))


def _decode_all(core: EngineCore, batch_size: int, more: int = _WARM_STEPS) -> None:
    """Step until every sequence has had a token, and a few times more."""
    begun: set[str] = set()
    while len(begun) < batch_size:
        begun |= {news.request_id for news in core.step()}
    for _ in range(more):
        core.step()


@contextmanager
def _recorded(folder: Path) -> Iterator[None]:
    """Meanwhile JAX's profiler records into a folder."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # which would slow the host, and be most of the trace
    jax.profiler.start_trace(folder, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()


class _Event(NamedTuple):
    """One run of a kernel or operation; nanoseconds."""

    start: float
    end: float
    name: str
    program: str


def read_kernels(folder: Path, num_steps: int) -> list[Kernel]:
    """The kernels of the newest trace in a folder, per step, the longest first."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise RuntimeError(f"JAX's profiler has left no trace in {folder}")
    data = jax.profiler.ProfileData.from_file(str(traces[-1]))
    times: dict[tuple[str, str], float] = defaultdict(float)
    counts: dict[tuple[str, str], int] = defaultdict(int)
    for line in _lines(data):
        for event, nanoseconds in own_times(line):
            key = (event.name, event.program)
            times[key] += nanoseconds
            counts[key] += 1
    if not times:
        raise RuntimeError("JAX's profiler has seen no kernel; is another profiler attached?")
    kernels = [
        Kernel(name, program, spent / 1e6 / num_steps, counts[name, program] / num_steps)
        for (name, program), spent in times.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel.ms)


def _lines(data: Any) -> Iterator[list[_Event]]:
    """What ran on each stream of a GPU, or else on each thread of the host."""
    planes = list(data.planes)
    on_gpu = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in on_gpu or planes:
        for line in plane.lines:
            if not on_gpu or line.name.startswith(_STREAM):
                yield list(_events(line, only_operations=not on_gpu))


def _events(line: Any, *, only_operations: bool) -> Iterator[_Event]:
    with warnings.catch_warnings():
        # What reads the trace has types that Python finds incomplete.
        warnings.simplefilter("ignore", DeprecationWarning)
        for event in line.events:
            stats = dict(event.stats)
            if only_operations and "hlo_op" not in stats:
                continue
            start = event.start_ns
            program = str(stats.get("hlo_module", ""))
            yield _Event(start, start + event.duration_ns, event.name, program)


def own_times(events: list[_Event]) -> Iterator[tuple[_Event, float]]:
    """Events of one line with their nanoseconds less those of what ran within them."""
    open_events: list[tuple[_Event, list[float]]] = []
    for event in sorted(events, key=lambda each: (each.start, -each.end)):
        while open_events and open_events[-1][0].end <= event.start:
            yield _closed(open_events)
        if open_events:
            open_events[-1][1].append(event.end - event.start)
        open_events.append((event, []))
    while open_events:
        yield _closed(open_events)


def _closed(open_events: list[tuple[_Event, list[float]]]) -> tuple[_Event, float]:
    event, within = open_events.pop()
    return event, max(event.end - event.start - sum(within), 0.0)
