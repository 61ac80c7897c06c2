"""llama.cpp's side of `one_stream.py`: streams decoded together by its C interface.

Needs `llama-cpp-python`, and nothing of this repository.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp as llama


def float32_copy(gguf: str, folder: str) -> str:
    """The same model with every weight in float32, made by llama.cpp itself."""
    copy = str(Path(folder) / "float32.gguf")
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama.LLAMA_FTYPE_ALL_F32, True
    if llama.llama_model_quantize(gguf.encode(), copy.encode(), params):
        raise SystemExit(f"llama.cpp cannot write {gguf} in float32")
    return copy


@llama.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


class Streams:
    """A model, and a context that holds so many streams of so many tokens."""

    def __init__(self, gguf: str, threads: int, num_streams: int, length: int) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = num_streams * length
        params.n_seq_max, params.kv_unified = num_streams, True
        params.n_threads = params.n_threads_batch = threads
        self._model = llama.llama_model_load_from_file(
            gguf.encode(), llama.llama_model_default_params()
        )
        self._context = llama.llama_init_from_model(self._model, params)
        self._batch = llama.llama_batch_init(params.n_batch, 0, 1)
        self._greedy = llama.llama_sampler_init_greedy()

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Continue all prompts by so many tokens, greedily and whatever they are."""
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        new, outputs = prompts, [list[int]() for _ in prompts]
        start = 0
        for _ in range(num_tokens):
            places = self._decode(new, start)
            start += len(new[0])
            sample = llama.llama_sampler_sample
            tokens = [sample(self._greedy, self._context, place) for place in places]
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
            new = [[token] for token in tokens]
        return outputs

    def _decode(self, new: list[list[int]], start: int) -> list[int]:
        """Compute each stream's new tokens, at positions from `start`; where their last stand."""
        batch, place, last = self._batch, 0, []
        for stream, tokens in enumerate(new):
            for position, token in enumerate(tokens, start):
                batch.token[place], batch.pos[place] = token, position
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
                batch.logits[place] = position == start + len(tokens) - 1
                place += 1
            last.append(place - 1)
        batch.n_tokens = place
        if llama.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp failed in a step")
        return last


@contextmanager
def worker(
    gguf: str, weights: str, threads: int, prompt: list[int], num_tokens: int
) -> Iterator[Callable[[int], float]]:
    """A function that gives the seconds to generate for a number of concurrent requests.

    Args:
        weights: "float32", or "file" for those of the file as they are.
    """
    llama.llama_log_set(_silent, None)
    with tempfile.TemporaryDirectory() as folder:
        path = float32_copy(gguf, folder) if weights == "float32" else gguf
        streams = Streams(path, threads, 16, len(prompt) + 1 + num_tokens)

        def run(count: int) -> float:
            prompts = [[*prompt, i] for i in range(count)]
            start = time.perf_counter()
            outputs = streams.generate(prompts, num_tokens)
            seconds = time.perf_counter() - start
            assert all(len(output) == num_tokens for output in outputs)
            return seconds

        yield run
