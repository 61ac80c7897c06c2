"""Settings that every test runs under: no GPU unless asked for, and no network."""

import os

import pytest


def wants_gpu(config: pytest.Config) -> bool:
    """Whether the run was started with `-m gpu` or an expression that includes it."""
    return "gpu" in config.option.markexpr.replace("not gpu", "")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports JAX or transformers."""
    if not wants_gpu(config):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip GPU tests in a run that put JAX on the CPU."""
    if wants_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU: run with -m gpu"))
