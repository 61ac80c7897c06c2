"""`benchmarks/host_time.py`: the stopwatch, and a run on a tiny model."""

import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.host_time import Stopwatch

ROOT = Path(__file__).parents[2]
TINY = {
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
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def test_a_part_is_timed_without_the_parts_within() -> None:
    watch = Stopwatch()
    inner = watch.timed("inner", partial(time.sleep, 0.02))
    own = partial(time.sleep, 0.005)
    outer = watch.timed("outer", lambda: [part() for part in (inner, own, inner)])
    for _ in range(3):
        outer()
    medians = watch.medians()
    assert len(watch.steps) == 3
    assert medians["inner"] >= 40_000
    assert 5_000 <= medians["outer"] < 40_000


def test_a_part_that_raises_is_timed_too() -> None:
    watch = Stopwatch()

    def fail() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        watch.timed("failing", fail)()
    assert watch.medians().keys() == {"failing"}
    watch.timed("next", lambda: None)()
    assert len(watch.steps) == 2


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), ("--no-device",)])
def test_every_part_of_a_step_is_told(tmp_path: Path, more: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    limits = ("--max-model-len=2048", "--max-num-seqs=4", "--max-num-batched-tokens=256")
    files = (f"--compile-cache-dir={tmp_path}/cache", f"--json={tmp_path}/host.json")
    command = ("benchmarks/host_time.py", str(tmp_path), "--batches=4")
    call = [sys.executable, *command, *limits, *files, *more]
    subprocess.run(call, cwd=ROOT, check=True, timeout=250)
    [result] = json.loads((tmp_path / "host.json").read_text())
    parts = {"schedule", "pack", "dispatch forward", "dispatch sample", "update"}
    assert parts < result["parts"].keys()
    assert all(microseconds > 0 for microseconds in result["parts"].values())
    assert result["host"] < sum(result["parts"].values())
