"""Planning: memory and speed of a model on a GPU, before either is there.

    from paged.runtime.planning import plan
    print(plan("benchmarks/models/llama-3.1-8b", "H200", max_model_len=8192).kv_cache_tokens)

Names are resolved on first use, so that the command line has the flags without JAX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "GPUS": "paged.runtime.planning.gpus",
    "Gpu": "paged.runtime.planning.gpus",
    "find_gpu": "paged.runtime.planning.gpus",
    "Plan": "paged.runtime.planning.planner",
    "Workload": "paged.runtime.planning.planner",
    "plan": "paged.runtime.planning.planner",
    "plan_for": "paged.runtime.planning.planner",
}

__all__ = ["GPUS", "Gpu", "Plan", "Workload", "find_gpu", "plan", "plan_for"]

if TYPE_CHECKING:
    from paged.runtime.planning.gpus import GPUS, Gpu, find_gpu
    from paged.runtime.planning.planner import Plan, Workload, plan, plan_for


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'paged.runtime.planning' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
