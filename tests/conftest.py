"""Settings that every test runs under: no GPU unless asked for, and no network."""

import logging
import os
import signal
from collections.abc import Iterator
from itertools import count

import pytest

# Tests after which compiled programs are dropped.
_OFTEN = 40
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
    # The interpreter of Mosaic GPU kernels runs each warpgroup as a thread that blocks one of XLA's
    # while it waits at a barrier. XLA has as many as the machine has cores, unless told otherwise
    # before anything is computed, and on a small one all of them would wait.
    os.environ.setdefault("NPROC", "16")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


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


@pytest.fixture(autouse=True)
def loggers_of_a_new_process() -> None:
    """Commands set how much is told: what one test ran in this process must not decide what the
    next one hears. (Set up here, not restored afterwards: fixtures of modules run commands, too.)
    """
    for name in ("paged", "uvicorn", "uvicorn.access", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.NOTSET)
        logger.filters.clear()


@pytest.fixture(autouse=True)
def forget_programs() -> Iterator[None]:
    """Drop what tests compiled, now and then: there are thousands of shapes, each is mapped into
    memory in pieces, and a process with 65,530 mappings is ended by the system.
    """
    yield
    if next(_numbers) % _OFTEN == 0:
        import jax

        jax.clear_caches()
