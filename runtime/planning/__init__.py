"""Planning: memory and speed of a model on a GPU, before either is there.

from paged.runtime.planning import plan
print(plan("benchmarks/models/llama-3.1-8b", "H200", max_model_len=8192).kv_cache_tokens)
"""

from paged.runtime.planning.gpus import GPUS, Gpu, find_gpu
from paged.runtime.planning.plan import Plan, Workload, plan, plan_for

__all__ = ["GPUS", "Gpu", "Plan", "Workload", "find_gpu", "plan", "plan_for"]
