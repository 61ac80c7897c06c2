"""Running a program of `benchmarks/` on a tiny model, for the tests of these programs."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def run_benchmark(name: str, folder: Path, *flags: str, timeout: float = 280) -> None:
    """Give it a model in `folder`, which also keeps what is compiled. It must succeed."""
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    command = (f"benchmarks/{name}.py", str(folder), f"--compile-cache-dir={folder}/cache", *flags)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=timeout)
