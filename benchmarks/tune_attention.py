"""Find the fastest tilings of attention kernels on this GPU, and write the table of them.

For each shape of heads, all candidates of `paged.attention.tuning` are compiled and timed by the
GPU's own clock (CUPTI), decoding and prefilling, over pages that come from memory. The time is
divided evenly among the shapes; those at the end go without if earlier ones took longer.

    python benchmarks/tune_attention.py --seconds 240 --table paged/attention/tuned.py
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.gpu import gpu_arguments
from benchmarks.tables import entry_lines, short, with_table
from paged.attention import default_backend
from paged.attention.tiling import Key, Tilings
from paged.attention.tuned import TUNED
from paged.attention.tuning.search import Found, fastest, search
from paged.attention.tuning.timer import GpuTimer
from paged.attention.tuning.workloads import Case, Layer, cases
from paged.cache import KV_DTYPES, CacheSpec

DTYPE = jnp.dtype(jnp.bfloat16)
MAX_ROWS, MAX_TOKENS, MAX_LEN = 1024, 8192, 16384
# Llama 3 8B, Qwen 3 8B and 4B; 70B, 32B; gpt-oss; Qwen 2.5 7B; Gemma 2; 8-bit pages; SmolLM2.
SHAPES = [
    "32:8:128",
    "64:8:128",
    "64:8:64",
    "28:4:128",
    "16:8:256",
    "32:8:128:fp8",
    "32:8:128:int8",
    "9:3:64",
]


@dataclass(frozen=True)
class Shape:
    """Heads to tune: query heads, key/value heads, elements of a head, and the pages' type."""

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str = "bfloat16"

    @classmethod
    def parse(cls, text: str) -> Shape:
        try:
            heads, kv_heads, head_dim, *kv_dtype = text.split(":")
            shape = cls(int(heads), int(kv_heads), int(head_dim), *kv_dtype)
            if shape.kv_dtype not in KV_DTYPES or shape.heads % shape.kv_heads:
                raise ValueError("no such pages, or an uneven group")
        except (TypeError, ValueError) as error:
            raise SystemExit(f"not a shape: {text!r} ({error}); see --help") from None
        return shape

    def layer(self, page_size: int, backend: str) -> Layer:
        dtype = KV_DTYPES[self.kv_dtype]
        cache = CacheSpec(1, 1, page_size, self.kv_heads, self.head_dim, dtype)
        return Layer(self.heads, cache, DTYPE, backend)


def main() -> None:
    """Tune all shapes; print what was timed, and the table or write it."""
    options = parse_arguments()
    # Says at each kernel that its backend will go one day.
    warnings.filterwarnings("ignore", message="The Pallas Triton backend is deprecated")
    deadline = time.monotonic() + options.seconds
    device = jax.devices()[0]
    backend = options.backend or default_backend(device)
    print(f"{len(options.shapes)} shapes on {device.device_kind}, {backend}", flush=True)
    found: dict[Key, Tilings] = {}
    report: list[dict[str, Any]] = []
    for place, shape in enumerate(map(Shape.parse, options.shapes)):
        seconds = (deadline - time.monotonic()) / (len(options.shapes) - place)
        layer = shape.layer(options.page_size, backend)
        timed = tune(layer, seconds)
        if timed is None:
            continue
        found[layer.heads.key] = fastest(layer, timed)
        for case, times in timed.items():
            print(f"{shape} {summary(layer, case, times)}", flush=True)
            report.append({"shape": asdict(shape), "case": asdict(case), "times": listed(times)})
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n")
    table = TUNED | {device.device_kind: TUNED.get(device.device_kind, {}) | found}
    if options.table:
        options.table.write_text(source(table))
    print(source(table))


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=SHAPES,
        metavar="HQ:HKV:D",
        help="heads to tune: query and key/value heads, elements; a fourth part is the pages' type",
    )
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page")
    parser.add_argument("--backend", help="triton, say; default what this GPU gets")
    parser.add_argument("--json", type=Path, help="write all that is measured here")
    parser.add_argument("--table", type=Path, help="write the table here, with what it had")
    parser.add_argument("--seconds", type=float, default=240, help="stop after so long")
    return gpu_arguments(parser)


def tune(layer: Layer, seconds: float) -> Found | None:
    """What could be timed within so many seconds; None if nothing."""
    started = time.monotonic()
    steps = cases(MAX_ROWS, MAX_TOKENS, MAX_LEN)
    timer = GpuTimer(layer)
    try:
        found = search(layer, steps, timer, seconds=seconds, advance=lambda _: None)
    except RuntimeError as error:
        print(f"{layer}: {error}", flush=True)
        return None
    finally:
        timer.close()
    timed, total = sum(map(len, found.values())), sum(len(each.candidates(layer)) for each in steps)
    print(f"{timed} of {total} in {time.monotonic() - started:.0f} s", flush=True)
    return found


def summary(layer: Layer, case: Case, times: dict[Any, tuple[float, ...]]) -> str:
    """A line for a case: the tilings from the fastest to the slowest; a star at the rule's."""
    by_rule = case.candidates(layer)[0]
    ranked = sorted(times.items(), key=lambda item: sum(item[1]))
    steps = ", ".join(f"{each.rows}x{each.query} on {each.context}" for each in case.workloads)
    texts = (
        f"{'/'.join(f'{each:.1f}' for each in of_tiling)} {short(tiling)}"
        + ("*" if tiling == by_rule else "")
        for tiling, of_tiling in ranked
    )
    return f"{steps} (us): {' | '.join(texts)}"


def listed(times: dict[Any, tuple[float, ...]]) -> list[tuple[str, tuple[float, ...]]]:
    """For a file."""
    return [(short(tiling), of_tiling) for tiling, of_tiling in times.items()]


def source(table: dict[str, dict[Key, Tilings]]) -> str:
    """The module `paged.attention.tuned` with another table."""
    lines: list[str] = []
    for kind, of_kind in table.items():
        lines.append(f'    "{kind}": {{')
        for (size, group, page_size, dtype), tilings in of_kind.items():
            lines.append(f'        ({size}, {group}, {page_size}, "{dtype}"): Tilings(')
            for name, entries in vars(tilings).items():
                lines += [f"            {name}=(", *entry_lines(entries, 16), "            ),"]
            lines.append("        ),")
        lines.append("    },")
    return with_table("paged.attention.tuned", "TUNED", lines)


if __name__ == "__main__":
    main()
