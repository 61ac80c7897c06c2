"""The named workloads that other engines were measured on: fixed for good, seeds included."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedBaseline:
    """Requests of one length.

    Attributes:
        num_requests: its size; None where the load decides (a batch, a closed loop).
        prefix_len: tokens all prompts share, on top of input_len.
    """

    num_requests: int | None
    input_len: int
    output_len: int
    seed: int
    prefix_len: int = 0


@dataclass(frozen=True)
class ChatBaseline:
    """Requests of lognormal lengths, with the defaults of `lognormal_requests`."""

    num_requests: int
    seed: int


BASELINES: dict[str, FixedBaseline | ChatBaseline] = {
    "B1": FixedBaseline(1024, 300, 128, seed=11),
    "B2": FixedBaseline(512, 1024, 512, seed=21),
    "B3": FixedBaseline(64, 8000, 64, seed=31),
    "B4": ChatBaseline(1000, seed=41),
    "C1": FixedBaseline(1, 128, 256, seed=51),
    "C": FixedBaseline(None, 1024, 128, seed=61),
    "D": FixedBaseline(256, 64, 64, seed=71, prefix_len=2048),
    "D-unique": FixedBaseline(256, 2112, 64, seed=72),
    "E": FixedBaseline(None, 300, 128, seed=81),
}
