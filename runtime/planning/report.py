"""A plan for people, as some lines, and for programs, as one object."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import shorten
from typing import Any

from paged.runtime.memory import size_text
from paged.runtime.planning.levers import Lever
from paged.runtime.planning.picture import GLYPHS, bar, shares_of, words
from paged.runtime.planning.planner import Plan

_WIDTH = 60
_REASON = 72


def report(plan: Plan, levers: Sequence[Lever], warnings: Sequence[str]) -> str:
    """Where the memory goes, what fits, how long steps take, and what would change that."""
    return "\n\n".join(
        [
            _title(plan),
            _memory(plan),
            _capacity(plan),
            _steps(plan),
            _speed(plan),
            _levers(plan, levers),
            *(["\n".join(f"! {text}" for text in warnings)] if warnings else []),
        ]
    )


def lever_table(levers: Sequence[Lever]) -> str:
    """What each flag would come to, for a model that does not fit as it is."""
    rows = [("", "KV tokens", "full length", "decode step", "output tok/s")]
    return _table([*rows, *map(_lever_row, levers)])


def as_json(plan: Plan, levers: Sequence[Lever], warnings: Sequence[str]) -> dict[str, Any]:
    """All of it; bytes are those of each GPU, times are milliseconds."""
    return {
        "model": plan.source.name,
        "gpu": _gpu(plan),
        **_settings(plan),
        "memory": {"usable": plan.gpu.usable, "budget": plan.memory.budget, **shares_of(plan)},
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "input_len": plan.workload.input_len,
        "output_len": plan.workload.output_len,
        **_outcome(plan),
        "decode_steps": [_step(plan, batch) for batch in plan.batches],
        "levers": [_lever(each) for each in levers],
        "warnings": list(warnings),
    }


def _title(plan: Plan) -> str:
    number = plan.memory.num_devices
    cards = f"{number} x {plan.gpu.name}" if number > 1 else plan.gpu.name
    method = plan.source.config.quantization
    weights = plan.dtype.name if method is None else f"{method.name} and {plan.dtype.name}"
    return (
        f"{plan.source.name} on {cards}: weights {weights}, pages {plan.shapes.cache.dtype.name}, "
        f"up to {plan.memory.max_model_len:,} tokens a sequence, {plan.max_num_seqs:,} sequences "
        f"and {plan.max_num_batched_tokens:,} tokens a step"
    )


def _memory(plan: Plan) -> str:
    each = " of each GPU" if plan.memory.num_devices > 1 else ""
    rows = [
        (f"  {GLYPHS[name]} {words(name)}", size_text(size), f"{size / plan.gpu.usable:.1%}")
        for name, size in shares_of(plan).items()
        if size
    ]
    heading = f"Memory{each}, {size_text(plan.gpu.usable)} as CUDA counts it:"
    return "\n".join([heading, f"  [{bar(plan, _WIDTH)}]", _table(rows)])


def _capacity(plan: Plan) -> str:
    memory = plan.memory
    return _table(
        [
            ("GPU KV cache size", f"{plan.kv_cache_tokens:,} tokens"),
            (f"sequences of {memory.max_model_len:,} tokens", f"{memory.num_full_sequences:,.2f}"),
            (f"sequences of {plan.workload.length:,} tokens", f"{plan.max_typical_sequences:,}"),
            ("a token in the pages takes", f"{plan.kv_bytes_per_token / 1024:,.0f} KiB"),
        ]
    )


def _steps(plan: Plan) -> str:
    rows = [
        ("decode step, batch", "floor", "expected", "products", "attention", "rest", "tokens/s")
    ]
    for batch in plan.batches:
        step = plan.decode_step(batch)
        times = (step.floor, step.expected, step.products, step.attention, step.rest)
        rate = f"{batch / step.expected:,.0f}"
        rows.append((f"{batch:,}", *(f"{1e3 * each:.2f} ms" for each in times), rate))  # type: ignore[arg-type]
    return _table(rows)


def _speed(plan: Plan) -> str:
    work = plan.workload
    return _table(
        [
            (
                f"{plan.concurrency:,} requests at once, {work.input_len:,} tokens in, "
                f"{work.output_len:,} out",
                f"{plan.requests_per_second:,.1f} requests/s",
                f"{plan.output_tokens_per_second:,.0f} output tok/s",
            ),
            (
                "time to first token, alone / last of all at once",
                f"{plan.ttft_ms:,.0f} ms",
                f"{plan.burst_ttft_ms:,.0f} ms",
            ),
        ]
    )


def _levers(plan: Plan, levers: Sequence[Lever]) -> str:
    now = _lever_row(Lever("now", plan))
    rows = [("what would change", "KV tokens", "full length", "decode step", "output tok/s"), now]
    return _table([*rows, *map(_lever_row, levers)])


def _lever_row(lever: Lever) -> tuple[str, ...]:
    made = lever.plan
    if made is None:
        reason = lever.refusal.partition(". ")[0]
        return (lever.flag, f"no: {shorten(reason, _REASON, placeholder=' ...')}")
    return (
        lever.flag,
        f"{made.kv_cache_tokens:,}",
        f"{made.memory.num_full_sequences:,.1f}",
        f"{made.decode_step_ms:.2f} ms x {made.concurrency:,}",
        f"{made.output_tokens_per_second:,.0f}",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Columns that line up, the first to the left; a last cell alone takes the room it needs."""
    most = max(map(len, rows))
    full = [row for row in rows if len(row) == most]
    widths = [max(map(len, column)) for column in zip(*full, strict=True)]
    widths[0] = max(len(row[0]) for row in rows)
    lines = []
    for first, *others in rows:
        cells = map(str.rjust, others, widths[1:]) if len(others) + 1 == most else others
        lines.append("  ".join([first.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _gpu(plan: Plan) -> dict[str, Any]:
    gpu = plan.gpu
    return {"name": gpu.name, "bandwidth": gpu.bandwidth, "compute_capability": gpu.capability}


def _settings(plan: Plan) -> dict[str, Any]:
    method = plan.source.config.quantization
    return {
        "tensor_parallel_size": plan.memory.num_devices,
        "dtype": plan.dtype.name,
        "quantization": None if method is None else method.name,
        "kv_cache_dtype": plan.shapes.cache.dtype.name,
        "gpu_memory_utilization": plan.config.gpu_memory_utilization,
        "max_model_len": plan.memory.max_model_len,
        "max_num_seqs": plan.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
    }


def _outcome(plan: Plan) -> dict[str, Any]:
    return {
        "kv_cache_tokens": plan.kv_cache_tokens,
        "max_full_length_sequences": plan.max_full_length_sequences,
        "max_typical_sequences": plan.max_typical_sequences,
        "concurrency": plan.concurrency,
        "decode_step_ms": plan.decode_step_ms,
        "decode_step_floor_ms": 1e3 * plan.decode_step(plan.concurrency).floor,
        "ttft_ms": plan.ttft_ms,
        "burst_ttft_ms": plan.burst_ttft_ms,
        "requests_per_second": plan.requests_per_second,
        "output_tokens_per_second": plan.output_tokens_per_second,
    }


def _step(plan: Plan, batch: int) -> dict[str, Any]:
    step = plan.decode_step(batch)
    return {
        "batch": batch,
        "floor_ms": 1e3 * step.floor,
        "expected_ms": 1e3 * step.expected,
        "products_ms": 1e3 * step.products,
        "attention_ms": 1e3 * step.attention,
        "rest_ms": 1e3 * step.rest,
    }


def _lever(lever: Lever) -> dict[str, Any]:
    if lever.plan is None:
        return {"flag": lever.flag, "refusal": lever.refusal}
    return {"flag": lever.flag, **_outcome(lever.plan)}
