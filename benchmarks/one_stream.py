"""One stream, and sixteen, of the embedded model on this machine's CPU, against others.

    python benchmarks/one_stream.py [--transformers PYTHON] [--llamacpp PYTHON] [--rounds N]

PYTHON is an interpreter that has torch, transformers, accelerate and gguf, or llama-cpp-python. All
take the same prompts and decode greedily. Paged and transformers hold the file's weights (Q4_1)
widened to float32, and Paged also as they are in the file (--quantization gguf), which it widens at
each product; llama.cpp runs twice, with such weights and with the file's as they are, which
are a sixth of the bytes and are multiplied as integers of 8 bits. Its threads are one fewer than
the cores, unless --threads tells otherwise. The sides stand ready in processes of their own and run
in turns, so that a noisy machine is noisy for all; the table gives the medians, and their ratios
are the figures to quote.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

PROMPT = list(range(100, 132))
NUM_TOKENS = 128


def paged_worker(quantization: Literal["gguf"] | None = None) -> Callable[[int], float]:
    """Seconds to generate for a number of concurrent requests."""
    from paged import LLM, SamplingParams
    from paged.runtime.front import TokensPrompt

    llm = LLM(
        dtype="float32", quantization=quantization, max_num_seqs=16, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)

    def run(streams: int) -> float:
        prompts = [TokensPrompt(prompt_token_ids=[*PROMPT, i]) for i in range(streams)]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        return seconds

    return run


def transformers_worker(gguf: str) -> Callable[[int], float]:
    """The same with transformers' `generate`."""
    import torch  # type: ignore[import-not-found]
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


def be_worker(side: str, *rest: str) -> None:
    """Serve one side's turns."""
    if side == "llamacpp":
        from benchmarks.llama_streams import worker

        gguf, weights, threads = rest
        with worker(gguf, weights, int(threads), PROMPT, NUM_TOKENS) as run:
            serve_turns(run)
    elif side == "transformers":
        serve_turns(transformers_worker(*rest))
    else:
        serve_turns(paged_worker("gguf" if side == "paged-gguf" else None))


def start(args: argparse.Namespace) -> Iterator[tuple[str, tuple[Worker, int]]]:
    """What to measure: a title, and who runs how many streams."""
    from paged.models.loading.source import embedded_model

    gguf = str(embedded_model())
    worker = Worker(sys.executable, __file__, "--worker", "paged")
    yield "paged, 1 stream", (worker, 1)
    yield "paged, 16 streams", (worker, 16)
    kept = Worker(sys.executable, __file__, "--worker", "paged-gguf")
    yield "paged, Q4_1, 1 stream", (kept, 1)
    yield "paged, Q4_1, 16 streams", (kept, 16)
    if args.transformers:
        other = Worker(args.transformers, __file__, "--worker", "transformers", gguf)
        yield "transformers, 1 stream", (other, 1)
    for weights in ("float32", "file") if args.llamacpp else ():
        how = ("llamacpp", gguf, weights, str(args.threads))
        other = Worker(args.llamacpp, __file__, "--worker", *how)
        title = "float32" if weights == "float32" else "Q4_1"
        yield f"llama.cpp, {title}, 1 stream", (other, 1)
        yield f"llama.cpp, {title}, 16 streams", (other, 16)


def main() -> None:
    """Read the arguments, run the sides in turns and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--transformers", metavar="PYTHON", help="interpreter with torch")
    parser.add_argument("--llamacpp", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--threads", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        be_worker(*args.worker)
        return

    cases = dict(start(args))
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (worker, streams) in cases.items():
            rates[name].append(worker.run(streams))
    for worker in {id(worker): worker for worker, _ in cases.values()}.values():
        worker.close()
    base = statistics.median(rates["paged, 1 stream"])
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:32} {median:8.1f} tokens/s   {median / base:5.2f} of paged's one stream")


if __name__ == "__main__":
    main()
