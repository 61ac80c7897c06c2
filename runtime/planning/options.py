"""What `paged plan` is told beside the engine's own flags."""

from __future__ import annotations

from dataclasses import dataclass

from paged.runtime.flags import option


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Which GPU, which requests, and how the answer is told."""

    gpu: str | None = option(None, "GPU to plan for: H200, A100-40GB, RTX-4090, ...")
    input_len: int = option(1024, "Tokens of a typical prompt.")
    output_len: int = option(128, "Tokens of its answer.")
    concurrency: int | None = option(
        None, "Requests that run at once; default as many as fit and --max-num-seqs allows."
    )
    json: bool = option(False, "Print the plan as JSON.")
    svg: str | None = option(None, "File for a picture of it.", metavar="FILE")
