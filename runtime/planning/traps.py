"""Combinations of flags that work and disappoint, each with what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paged.runtime.backend import slower_paths
from paged.runtime.division import weight_shapes
from paged.runtime.memory import size_text
from paged.runtime.planning.planner import Plan

_HIGH_SHARE, _LOW_SHARE = 0.95, 0.5
_LOW_PAGES = 0.1  # of the budget
_LONG_STEP_MS = 250.0
_FEW_TOKENS = 512
_NVLINK = 0.3e12  # bytes per second, above any PCIe
_BFLOAT16_CAPABILITY = 8.0
_LARGE_PAGE = 64
_LONGER = 8  # times the typical length


def warnings(plan: Plan) -> list[str]:
    """What a plan's user should know before trying it."""
    return [text for look in _LOOKS for text in look(plan)]


def _lengths(plan: Plan) -> Iterator[str]:
    length, longest = plan.workload.length, plan.memory.max_model_len
    if length > longest:
        most = plan.source.config.context_length
        remedy = "Raise it." if longest < most else "The model was made for no more."
        yield (
            f"A typical request has {length:,} tokens, more than --max-model-len {longest}: its "
            f"prompt would be refused or its answer cut. {remedy}"
        )
    elif longest > _LONGER * length:
        yield (
            f"--max-model-len {longest} is {longest // length} times a typical request's "
            f"{length:,} tokens. That takes no memory, but a single request may: "
            f"{plan.max_full_length_sequences} of that length fill all pages."
        )


def _sequences(plan: Plan) -> Iterator[str]:
    fit, slots = plan.max_typical_sequences, plan.max_num_seqs
    wanted = plan.workload.concurrency
    if wanted is not None and wanted > plan.concurrency:
        yield (
            f"Of {wanted} requests at once {plan.concurrency} run, and the others wait: pages hold "
            f"{fit}, --max-num-seqs is {slots}."
        )
    elif fit < slots and wanted is None:
        yield (
            f"--max-num-seqs {slots} is more than the {fit} typical sequences that pages hold: "
            "under full load some are preempted and computed again. "
            f"--max-num-seqs {max(fit, 1)} makes them wait instead."
        )
    if plan.memory.num_full_sequences < 2:
        yield (
            f"Pages hold {plan.memory.num_full_sequences:.2f} sequences of full length "
            f"({plan.memory.max_model_len:,} tokens): two of them take turns."
        )


def _memory(plan: Plan) -> Iterator[str]:
    memory, share = plan.memory, plan.config.gpu_memory_utilization
    assert memory.budget is not None
    pages = memory.num_pages * memory.bytes_per_page
    left = size_text(plan.gpu.usable - memory.budget)
    if plan.config.kv_cache_memory_bytes is not None:
        taken = memory.weights + memory.state + memory.steps + memory.transit + pages
        if taken > plan.gpu.usable:
            yield (
                f"--kv-cache-memory-bytes is not checked against the GPU: with weights and steps "
                f"{size_text(taken)} are wanted, and {plan.gpu.name} has "
                f"{size_text(plan.gpu.usable)}. Give at most "
                f"{max(plan.gpu.usable - taken + pages, 0) // 2**20}M."
            )
        return
    if share > _HIGH_SHARE:
        yield (
            f"--gpu-memory-utilization {share:g} leaves {left} for the driver and for others: a "
            "start may run out of memory. Stay at 0.95 or below."
        )
    if share < _LOW_SHARE:
        yield (
            f"--gpu-memory-utilization {share:g} leaves {left} unused unless something else runs "
            "there."
        )
    if pages < _LOW_PAGES * memory.budget:
        yield (
            f"Pages get {pages / memory.budget:.1%} of the memory: few requests run at once, and "
            "each step reads all weights for them. Take fewer bits or more GPUs."
        )


def _weights(plan: Plan) -> Iterator[str]:
    device, capability = plan.gpu.device, float(plan.gpu.capability)
    described = weight_shapes(plan.source.config, plan.dtype, plan.shapes.placement)
    for slower in slower_paths(plan.shapes, plan.dtype, device, described):
        yield f"Not the fastest way of {plan.gpu.name}: {slower}."
    if plan.config.cpu_offload_gb:
        yield (
            f"--cpu-offload-gb copies {size_text(plan.memory.weights_on_host)} from the host in "
            "each step. Fewer bits (--quantization) or --tensor-parallel-size keep it fast."
        )
    if plan.dtype.name == "bfloat16" and capability < _BFLOAT16_CAPABILITY:
        yield f"{plan.gpu.name} does not multiply bfloat16 in hardware: give --dtype float16."
    if plan.dtype.name == "float32":
        yield "--dtype float32 takes twice the memory of 16 bits, and more than twice the time."


def _devices(plan: Plan) -> Iterator[str]:
    number, model = plan.memory.num_devices, plan.source.config
    if number == 1:
        return
    if number > model.num_kv_heads and model.latent_rank is None:
        yield (
            f"{number} GPUs share {model.num_kv_heads} key/value heads, so that some hold the same "
            "pages: more GPUs add less room than their number says."
        )
    if model.latent_rank is not None:
        yield "Latents are shared by all heads: each GPU holds the pages of all tokens."
    if plan.gpu.link < _NVLINK:
        yield (
            f"{plan.gpu.name} has no NVLink: sums over GPUs go over PCIe, which hurts most with "
            "long prompts and large batches."
        )
    whole = 2 * plan.memory.weights * number < plan.memory.budget if plan.memory.budget else False
    if whole:
        yield (
            f"The model fits on one {plan.gpu.name}: {number} servers of one GPU each behind a "
            "proxy give more tokens per second than one server of all; sharing answers one "
            "request sooner."
        )


def _steps(plan: Plan) -> Iterator[str]:
    tokens = plan.max_num_batched_tokens
    chunk = min(tokens, plan.memory.max_model_len)
    milliseconds = 1e3 * plan.speed.prefill(chunk, prompts=tokens // chunk).expected
    if milliseconds > _LONG_STEP_MS:
        yield (
            f"A step of --max-num-batched-tokens {tokens} takes {milliseconds:.0f} ms, which "
            "everyone who is decoding waits for when long prompts come. Lower it, or cap what one "
            "prompt has of a step with --long-prefill-token-threshold: see "
            "docs/failures.md#slow-tokens-under-load."
        )
    if tokens < _FEW_TOKENS:
        yield (
            f"--max-num-batched-tokens {tokens} cuts prompts into small chunks, each of which "
            "reads all weights: first tokens come late. 2048 or more fill the GPU."
        )
    if plan.config.block_size >= _LARGE_PAGE and plan.workload.length < 8 * plan.config.block_size:
        yield (
            f"--block-size {plan.config.block_size} wastes half a page of a sequence, "
            f"{plan.config.block_size / 2 / plan.workload.length:.0%} of a typical one. 16 is fine."
        )
    if not plan.config.enable_prefix_caching:
        yield (
            "--no-enable-prefix-caching computes shared system prompts anew for every request; the "
            "cache costs nothing when nothing is shared: see "
            "docs/failures.md#low-prefix-hit-rate."
        )


_LOOKS: tuple[Callable[[Plan], Iterator[str]], ...] = (
    _lengths,
    _sequences,
    _memory,
    _weights,
    _devices,
    _steps,
)
