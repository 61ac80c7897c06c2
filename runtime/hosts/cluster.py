"""Joining the devices of all processes, by `jax.distributed`."""

from __future__ import annotations

import os
import sys

import jax

# Seconds in which all must have found each other, once all are there; and to part.
_TIME_TO_BEGIN = 120
_TIME_TO_PART = 5
# Processes that compile for GPUs would share out the timing of kernels among themselves, and wait
# for each other: for ever, where one finds on its disk what another has yet to compile.
_ALONE = "--xla_gpu_shard_autotuning=false"


def begin(coordinator: str, number: int, rank: int) -> None:
    """Make one machine of so many processes; before JAX looks at its devices.

    Args:
        coordinator: the address of rank 0 for this alone, "host:port".
    """
    if "xla_gpu_shard_autotuning" not in (flags := os.environ.get("XLA_FLAGS", "")):
        os.environ["XLA_FLAGS"] = f"{flags} {_ALONE}".strip()
    # Gloo talks to standard output, where whoever started this process is told that it is ready.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        number,
        rank,
        coordinator_bind_address=coordinator,
        initialization_timeout=_TIME_TO_BEGIN,
        shutdown_timeout_seconds=_TIME_TO_PART,
    )


def end() -> None:
    """Part from the others, who do the same."""
    jax.distributed.shutdown()
