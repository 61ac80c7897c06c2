"""One stream, and sixteen, of the embedded model on this machine's CPU, against transformers.

    python benchmarks/one_stream.py [--transformers PYTHON] [--rounds N]

PYTHON is an interpreter that has torch, transformers, accelerate and gguf. Both sides hold the same
weights in float32, take the same prompt and decode greedily. They stand ready
in processes of their own and run in turns, so that a noisy machine is noisy for both; the table
gives the medians, and their ratio is the figure to quote.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

PROMPT = list(range(100, 132))
NUM_TOKENS = 128


def paged_worker() -> Callable[[int], float]:
    """Seconds to generate for a number of concurrent requests."""
    from paged import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=16, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

    def run(streams: int) -> float:
        prompts = [{"prompt_token_ids": [*PROMPT, i]} for i in range(streams)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        return seconds

    return run


def transformers_worker(gguf: str) -> Callable[[int], float]:
    """The same with transformers' `generate`."""
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

    def run(streams: int) -> float:
        ids = torch.tensor([[*PROMPT, i] for i in range(streams)])
        start = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=NUM_TOKENS,
                max_new_tokens=NUM_TOKENS,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - start
        assert out.shape[1] == ids.shape[1] + NUM_TOKENS
        return seconds

    return run


class Worker:
    """A side in its own process, that runs when it is told to."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.run(1)  # load and warm up

    def run(self, streams: int) -> float:
        """Output tokens per second of this many streams."""
        assert self._process.stdin
        assert self._process.stdout
        print(streams, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                return streams * NUM_TOKENS / float(json.loads(line)["seconds"])
        raise SystemExit(f"a worker ended with exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def serve_turns(run: Callable[[int], float]) -> None:
    """Be a worker: a number of streams per line in, seconds out."""
    for line in sys.stdin:
        print(json.dumps({"seconds": run(int(line))}), flush=True)


def main() -> None:
    """Read the arguments, run the sides in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter with torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        side, *rest = args.worker
        serve_turns(paged_worker() if side == "paged" else transformers_worker(*rest))
        return

    cases = {"paged, 1 stream": (Worker(sys.executable, __file__, "--worker", "paged"), 1)}
    cases["paged, 16 streams"] = (cases["paged, 1 stream"][0], 16)
    if args.transformers:
        from paged.models.loading.source import embedded_model

        gguf = str(embedded_model())
        other = Worker(args.transformers, __file__, "--worker", "transformers", gguf)
        cases["transformers, 1 stream"] = (other, 1)
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (worker, streams) in cases.items():
            rates[name].append(worker.run(streams))
    for worker in {id(worker): worker for worker, _ in cases.values()}.values():
        worker.close()
    base = statistics.median(rates["paged, 1 stream"])
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:24} {median:8.1f} tokens/s   {median / base:5.2f} of paged's one stream")


if __name__ == "__main__":
    main()
