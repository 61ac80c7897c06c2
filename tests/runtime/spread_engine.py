"""An engine on one device and on two, in a process that has eight: the same tokens.

    python -m tests.runtime.spread_engine FOLDER

FOLDER has the model of a golden. Prints a JSON object: what was asked, to the tokens on each.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from paged.runtime.llm import LLM
from paged.runtime.sampling_params import SamplingParams
from tests.models.harness import load_golden

GOLDEN = "llama"
FEW: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "max_model_len": 96}
PAGES = {"kv_cache_memory_bytes": 2**16, "kv_offloading_size": 2**-10}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "random": {"seed": 1},
    "filtered": {"seed": 2, "top_p": 0.9, "top_k": 40},
    "penalties": {"seed": 3, "frequency_penalty": 1.0, "logit_bias": {5: 4.0}},
    "logprobs": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
}


def answers(folder: str, devices: int) -> dict[str, Any]:
    """The tokens of every request, and log-probabilities of the last."""
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        tensor_parallel_size=devices,
        compile_cache_dir="",
        **FEW,
        **PAGES,
    )
    prompt: list[int] = load_golden(GOLDEN)["prompt"]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **asked) for asked in ASKED.values()]
    outputs = [each.outputs[0] for each in llm.generate([prompt for _ in params], params)]
    found: dict[str, Any] = {
        name: list(each.token_ids) for name, each in zip(ASKED, outputs, strict=True)
    }
    return found | {"sum": outputs[-1].cumulative_logprob}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([answers(sys.argv[1], devices) for devices in (1, 2)]))
