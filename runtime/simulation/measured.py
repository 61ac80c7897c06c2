"""Steps that were measured, and the engines that ran them."""

from __future__ import annotations

from dataclasses import dataclass

from paged.runtime.simulation.step_times import MeasuredStep, StepTimes, fit


@dataclass(frozen=True)
class MeasuredEngine:
    """What is to be known of an engine to simulate it.

    Attributes:
        source: where the figures are from.
        steps: that ran.
        knots: see `fit`; None for what was measured.
        num_pages: of its pool, the null page included.
        max_num_seqs, max_num_batched_tokens, max_model_len, page_size: as it was started.
        fewest_rows: to which its steps are padded.
        cached_tokens: whose keys and values of a layer its device's cache holds.
    """

    source: str
    steps: tuple[MeasuredStep, ...]
    knots: tuple[int, ...] | None
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    fewest_rows: int
    cached_tokens: float = float("inf")

    def step_times(self) -> StepTimes:
        """Fitted to its steps."""
        return fit(self.steps, self.knots, self.cached_tokens)


def _split(step: MeasuredStep, attention: float) -> tuple[MeasuredStep, MeasuredStep]:
    """A step, and what it took without the milliseconds of its attention."""
    return step, MeasuredStep(step.tokens, 0.0, 0.0, step.milliseconds - attention)


def _decode(rows: int, length: int, milliseconds: float) -> MeasuredStep:
    return MeasuredStep(rows, rows * length, 0.0, milliseconds)


def _prefill(rows: int, length: int, milliseconds: float) -> MeasuredStep:
    return MeasuredStep(rows * length, 0.0, rows * length * length / 2, milliseconds)


MEASURED = {
    "h200-llama-3.1-8b-bf16": MeasuredEngine(
        source=(
            "one NVIDIA H200, Llama-3.1-8B shape, bfloat16; benchmarks/RESULTS.md, the decode "
            'steps of its first table and those of "Where a step\'s time goes"'
        ),
        steps=(
            *(_decode(1, 1090, 4.24), _decode(8, 1090, 4.57), _decode(32, 1090, 5.50)),
            *(_decode(128, 1090, 9.43), _decode(256, 1090, 15.83)),
            *_split(_decode(1, 1088, 4.46), attention=0.26),
            *_split(_decode(8, 1088, 4.80), attention=0.55),
            *_split(_decode(32, 1088, 5.94), attention=1.44),
            *_split(_decode(64, 1088, 7.15), attention=2.45),
            *_split(_decode(128, 1088, 9.60), attention=4.62),
            *_split(_decode(256, 1088, 15.7), attention=8.95),
            *_split(_decode(1024, 364, 35.0), attention=12.9),
            *(_prefill(27, 300, 184.0), _prefill(4, 2048, 191.0)),
            # Of a prompt of 100,000 tokens that took 7.23 s, 8,192 in the middle of it.
            MeasuredStep(8192, 32 * 350, 8192 * 50_000, 7230 * 8192 / 100_000),
            # 256 rows that share 2,048 tokens: what is left for the 61 steps of workload D that
            # only decode, of the 1.528 s that it took, when the others took what they are simulated
            # to. (By this a token is read again at 7.6 TB/s.)
            MeasuredStep(256, 256 * 2143, 0.0, 16.55, again=255 * 2048),
        ),
        knots=(1, 128, 256, 1024, 8192),
        num_pages=55_483,
        max_num_seqs=1024,
        max_num_batched_tokens=8192,
        max_model_len=8192,
        page_size=16,
        fewest_rows=2,
        cached_tokens=50e6 / 4096,
    )
}
"""By the name that `paged simulate --step-times` knows them by."""
