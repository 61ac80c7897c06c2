"""Settings that every test runs under: no GPU unless asked for, and no network."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Tests after which it is looked whether compiled programs have become too many. A process with
# 65,530 mappings is ended by the system; some 6,000 stood beside 2 GB of memory.
_OFTEN = 40
_MANY_MAPPINGS = 6_000
_MAPPINGS = Path("/proc/self/maps")
_numbers = count(1)


def wants_gpu(config: pytest.Config) -> bool:
    """Whether the run was started with `-m gpu` or an expression that includes it."""
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports JAX or transformers."""
    if wants_gpu(config):
        # Processes side by side share the GPU, and none needs XLA's fastest product.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        os.environ.setdefault("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    else:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        # Compiling is most of what tests do, and hardly any program runs for as long.
        wanted = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {wanted}".strip()
    # The interpreter of Mosaic GPU kernels runs each warpgroup as a thread that blocks one of XLA's
    # while it waits at a barrier. XLA has as many as the machine has cores, unless told otherwise
    # before anything is computed, and on a small one all of them would wait.
    os.environ.setdefault("NPROC", "16")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Quick tests try the same examples every time, however slow the machine is; a run with the slow
    # ones looks for others.
    settings.register_profile(
        "paged",
        deadline=None,
        derandomize="not slow" in config.option.markexpr,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("paged")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests in a run that put JAX on the CPU."""
    if wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with -m gpu"))


@pytest.fixture(autouse=True, scope="session")
def hears_interrupts() -> Iterator[None]:
    """As at a terminal: what a shell runs in the background is deaf to them, and so would be every
    process that tests start.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder for the programs of engines, which those of other tests find there."""
    return str(tmp_path_factory.mktemp("jit"))


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> None:
    """What one test ran in this process must not decide what the next one does: commands set how
    much is told, and engines where compiled programs are kept. (Set up here, not restored
    afterwards: fixtures of modules run commands and engines, too.)
    """
    for name in ("paged", "uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.filters.clear()
    if compiles := sys.modules.get("paged.runtime.compiles"):
        compiles.use_compile_cache("")


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Drop what tests compiled when it has become too much: there are thousands of shapes, and each
    is mapped into memory in pieces.
    """
    yield
    if next(_numbers) % _OFTEN == 0 and _num_mappings() > _MANY_MAPPINGS:
        import jax

        jax.clear_caches()


def _num_mappings() -> int:
    """Of this process; many, where the system does not say."""
    return _MAPPINGS.read_bytes().count(b"\n") if _MAPPINGS.exists() else _MANY_MAPPINGS + 1
