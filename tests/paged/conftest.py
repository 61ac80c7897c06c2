"""Settings for kernels in an interpreter, and what their compiler says."""

from collections.abc import Callable, Iterator

import pytest


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
