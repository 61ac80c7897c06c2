"""An engine in one piece and in stages, in a process that has four devices: the same tokens.

    python -m tests.runtime.staged_engine FOLDER GOLDEN STAGESxDEVICES ...

FOLDER has the model of a golden. Prints a JSON list: in one piece first, then as asked.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from paged.runtime.llm import LLM
from paged.runtime.sampling_params import SamplingParams
from tests.models.harness import load_golden
from tests.runtime.spread_engine import ASKED, FEW


def answers(folder: str, golden: str, stages: int, devices: int) -> dict[str, Any]:
    """The tokens of every request, log-probabilities of the last, and compiles meanwhile."""
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        pipeline_parallel_size=stages,
        tensor_parallel_size=devices,
        compile_cache_dir="",
        kv_cache_memory_bytes=2**19,
        **FEW | {"max_num_seqs": 3},
    )
    prompt: list[int] = load_golden(golden)["prompt"]
    params = [SamplingParams(max_tokens=16, ignore_eos=True, **asked) for asked in ASKED.values()]
    outputs = llm.generate([prompt for _ in params], params)
    found: dict[str, Any] = {
        name: list(each.outputs[0].token_ids) for name, each in zip(ASKED, outputs, strict=True)
    }
    scored = outputs[-1].prompt_logprobs or []
    of_prompt = [max(each.logprob for each in known.values()) for known in scored if known]
    return found | {
        "sums": [outputs[-1].outputs[0].cumulative_logprob, sum(of_prompt)],
        "compiles": llm.get_metrics().compiles_after_warmup,
    }


if __name__ == "__main__":
    folder, golden, *sizes = sys.argv[1:]
    pairs = [(1, 1), *(tuple(map(int, size.split("x"))) for size in sizes)]
    sys.stdout.write(json.dumps([answers(folder, golden, *pair) for pair in pairs]))
