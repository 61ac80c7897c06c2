"""A tiny model with random weights, and the command line around it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paged.http.cli import main
from tests.runtime.fakes import write_model

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 256,
}


@pytest.fixture(scope="session")
def engine_flags(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> dict[str, Any]:
    """Of an engine that has few programs to compile, and keeps them."""
    return {
        "model": str(write_model(tmp_path_factory.mktemp("tiny"), MODEL)),
        "load_format": "dummy",
        "kv_cache_memory_bytes": 2**20,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "compile_cache_dir": compile_cache,
    }


@pytest.fixture
def bench(engine_flags: dict[str, Any]) -> Callable[..., None]:
    """Runs `paged bench COMMAND` with the engine's flags, which must succeed."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in engine_flags.items()]

    def run(command: str, *argv: str | Path) -> None:
        assert main(["bench", command, *flags, "--disable-tqdm", *map(str, argv)]) == 0

    return run
