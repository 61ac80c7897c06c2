"""Settings for kernels in an interpreter, and what their compiler says."""

import os
from collections.abc import Callable, Iterator

import pytest

# The interpreter of Mosaic GPU kernels runs each warpgroup as a thread that blocks one of XLA's
# while it waits at a barrier. XLA has as many as the machine has cores, unless told otherwise, and
# on a small one all of them would wait.
os.environ.setdefault("NPROC", "16")


@pytest.fixture(autouse=True)
def forget_slow_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Drop what a slow test compiled: each has shapes of its own, there are hundreds of them, and
    a process that maps them all is ended by the system's limit on mappings."""
    yield
    if request.node.get_closest_marker("slow"):
        import jax

        jax.clear_caches()


@pytest.fixture
def ptxas(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What it says of the Mosaic kernels that were compiled since it was last asked."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    return lambda: "".join(capfd.readouterr())
