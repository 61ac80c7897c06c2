"""Tracing and lowering programs: here, one after the other, or in processes beside this one.

Both are Python, as is making a compiled program into bytes for the next start: threads that did all
that would wait for each other, and the compiler's, which are not Python, for them. Other processes
have no GPU and need none: they send what XLA is to compile, as `jax.export` writes it.

    python -m paged.runtime.lowering DESCRIPTOR

is such a process, at the other end of a socket.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
from jax import export
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.stages import Lowered

from paged.runtime.child_process import ChildProcess
from paged.runtime.program_store import named_apart

logger = logging.getLogger(__name__)

Key = tuple[Any, ...]
"""Names a program: its kind, then what it is specialised for."""

# Kernels of ours, which `jax.export` does not promise to read in years to come. Nobody keeps them.
_CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "triton_kernel_call")
# Of JAX's settings those that say where it runs. All others are as here, since any may matter.
_PLACES = ("platform", "cache", "backend", "visible_devices", "distributed", "coordination")
# A process more is quicker up to here: then the compiler is what a start waits for.
_MOST_PROCESSES = 4
_CORES_FOR_EACH = 4


class Job(NamedTuple):
    """A program to be compiled.

    Attributes:
        args: abstract ones.
        donated: indices of those whose memory the program takes over.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: tuple[int, ...] = ()


def processes_for(devices: Sequence[jax.Device]) -> int:
    """How many beside this one make the many programs of some devices soonest.

    None for a CPU, whose programs take less time than such a process takes to start, and none for
    several devices, which no such process has.
    """
    if devices[0].platform == "cpu" or len(devices) > 1:
        return 0
    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // _CORES_FOR_EACH))


class Lowering:
    """Lowers jobs, those first that are given first.

    Args:
        processes: beside this one, each started when it is first needed; 0 to do it here. Where
            they cannot, it is done here after all, and the log says why.
    """

    def __init__(self, processes: int = 0) -> None:
        self._threads = ThreadPoolExecutor(max(1, processes))
        self._elsewhere = processes > 0
        self._closed = False
        self._here = threading.Lock()
        self._own = threading.local()
        self._workers: list[_Worker] = []

    def __call__(self, key: Key, job: Job) -> Lowered:
        """Wait until it is done. Raises whatever the job's function does when it is traced."""
        return self._threads.submit(self._lower, key, job).result()

    def close(self) -> None:
        """Begin no more; what waits for a job that was not begun is told that it is cancelled."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def _lower(self, key: Key, job: Job) -> Lowered:
        started = time.perf_counter()
        function = self._traced_elsewhere(job) or job.function
        with self._here:
            jitted = jax.jit(named_apart(function, key[0]), donate_argnums=job.donated)
            lowered = jitted.lower(*job.args)
        logger.debug("%s: lowered in %.1f s", key, time.perf_counter() - started)
        return lowered

    def _traced_elsewhere(self, job: Job) -> Callable[..., Any] | None:
        """The same function, ready to be lowered at once; None if that is to be done here."""
        if not self._elsewhere:
            return None
        try:
            return self._worker().trace(job)
        except Exception as error:  # of any kind: it is done again here, and may be raised here
            if self._closed:
                raise
            self._elsewhere = False
            logger.warning("Programs are lowered in this process: %s", error)
            return None

    def _worker(self) -> _Worker:
        """This thread's own."""
        if not hasattr(self._own, "worker"):
            self._own.worker = _Worker()
            self._workers.append(self._own.worker)
        worker: _Worker = self._own.worker
        return worker


class _Worker:
    """The process that traces for one thread."""

    def __init__(self) -> None:
        self._process = ChildProcess(("-m", __name__), environment={"JAX_PLATFORMS": "cpu"})
        self._connection = Connection(self._process.connection.detach())
        self._connection.send((_settings(), _target()))

    def trace(self, job: Job) -> Callable[..., Any]:
        self._connection.send(job)
        exported, out = self._connection.recv()
        if exported is None:
            raise RuntimeError(out)
        call = export.deserialize(exported).call

        def traced(*args: Any) -> Any:
            return jax.tree.unflatten(out, call(*jax.tree.leaves(args)))

        return traced

    def close(self) -> None:
        self._process.end(0)  # before the connection is closed, on which a thread may be waiting
        self._connection.close()


def _settings() -> dict[str, Any]:
    """JAX's settings, but for those that say where it runs."""
    return {
        name: value
        for name, value in jax.config.values.items()
        if not any(place in name for place in _PLACES)
    }


class Target(NamedTuple):
    """What programs are lowered for, told where there is no such device.

    Attributes:
        platform: in the words of `jax.export`.
        mesh: one abstract device, which kernels ask what it is.
    """

    platform: str
    mesh: AbstractMesh


def _target() -> Target:
    mesh = Mesh([jax.devices()[0]], ("device",), axis_types=(AxisType.Auto,))
    return Target(export.default_export_platform(), mesh.abstract_mesh)


def export_job(job: Job, target: Target) -> tuple[bytes, Any]:
    """A job as bytes, its arguments and results one flat list each, and the tree of the results."""
    leaves, tree = jax.tree.flatten(job.args)
    trees: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        out, out_tree = jax.tree.flatten(job.function(*jax.tree.unflatten(tree, leaves)))
        trees.append(out_tree)
        return out

    checks = [export.DisabledSafetyCheck.custom_call(name) for name in _CUSTOM_CALLS]
    make = export.export(jax.jit(flat), platforms=[target.platform], disabled_checks=checks)
    with jax.sharding.use_abstract_mesh(target.mesh):
        exported = make(*leaves)
    return bytes(exported.serialize()), trees[-1]


def _serve(connection: Connection) -> None:
    """Export jobs until the other end hangs up."""
    settings, target = connection.recv()
    for name, value in settings.items():
        if jax.config.values.get(name, value) != value:
            jax.config.update(name, value)
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(export_job(job, target))
        except Exception as error:  # told, and met again where it is done here
            connection.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    # Under its own name, so that what is pickled there and here is of the same classes.
    from paged.runtime import lowering

    lowering._serve(Connection(int(sys.argv[1])))
