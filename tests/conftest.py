"""Settings that every test runs under: no GPU unless asked for, and no network."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment before any test module imports JAX or transformers."""
    if config.option.markexpr != "gpu":
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
