"""An engine on one device and on several, in a process that has them: the same tokens.

    python -m tests.runtime.spread_engine FOLDER GOLDEN FLAGS STAGESxDEVICES ...

FOLDER has the model of a golden, FLAGS is a JSON object of keywords of `LLM`. Prints a JSON list:
on one device first, then as asked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from paged.runtime.llm import LLM
from paged.runtime.load_costs import LoadCosts
from paged.runtime.sampling_params import SamplingParams
from tests.models.harness import load_golden, write_checkpoint

FEW: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 96}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"seed": 1},
    "filtered": {"seed": 2, "top_p": 0.9, "top_k": 40},
    "penalties": {"seed": 3, "frequency_penalty": 1.0, "logit_bias": {5: 4.0}},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
}
ENVIRONMENT = {
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
    "JAX_PLATFORMS": "cpu",
}


def answers(
    folder: str, golden: str, flags: dict[str, Any], stages: int, devices: int
) -> dict[str, Any]:
    """The tokens of every request, log-probabilities of the last, and what the engine counted.

    The first request comes again when others have taken its pages.
    """
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        pipeline_parallel_size=stages,
        tensor_parallel_size=devices,
        compile_cache_dir="",
        **FEW | flags,
    )
    prompt: list[int] = load_golden(golden)["prompt"]
    others = [prompt[start:] + prompt[:start] for start in (1, 2, 3)]
    asked = [*ASKED.values(), *[ASKED["greedy"]] * (len(others) + 1)]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **each) for each in asked]
    outputs = llm.generate([*[prompt] * len(ASKED), *others, prompt], params, use_tqdm=False)
    told = outputs[len(ASKED) - 1]
    scored = told.prompt_logprobs or []
    of_prompt = [max(each.logprob for each in known.values()) for known in scored if known]
    metrics = llm.get_metrics()
    return {
        "tokens": [list(each.outputs[0].token_ids) for each in outputs],
        "sums": [told.outputs[0].cumulative_logprob, sum(of_prompt)],
        "compiles": metrics.compiles_after_warmup,
        "loaded": metrics.host_bytes_loaded,
    }


def asked_apart(
    folder: Path, golden: str, flags: dict[str, Any], *sizes: str
) -> list[dict[str, Any]]:
    """What this module prints, from a process of its own."""
    model = str(write_checkpoint(folder, load_golden(golden)))
    argv = [sys.executable, "-m", "tests.runtime.spread_engine", model, golden, json.dumps(flags)]
    done = subprocess.run(
        [*argv, *sizes], env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    assert len(found) == 1 + len(sizes)
    return found


if __name__ == "__main__":
    folder, golden, flags, *sizes = sys.argv[1:]
    pairs = [(1, 1), *(tuple(map(int, size.split("x"))) for size in sizes)]
    with patch.object(LoadCosts, "are_worth", return_value=True):  # however fast the machine is
        found = [answers(folder, golden, json.loads(flags), *pair) for pair in pairs]
    sys.stdout.write(json.dumps(found))
