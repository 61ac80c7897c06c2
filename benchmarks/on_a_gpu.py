"""All that only a GPU can show, one after another, each with its time: tests first, then figures.

    python benchmarks/on_a_gpu.py --out FOLDER [--list] [--only goldens,kernels] [--seconds 570]

Every stage has the GPU to itself, in a process of its own that is ended when its seconds are over.
FOLDER gets its output, NAME.log, and what it wrote, in NAME/; summary.json is written anew after
each. A stage that the rest of --seconds does not hold is left out, and said. Exit status 1 if a
stage failed or was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LLAMA, LLAMA_70B = "benchmarks/models/llama-3.1-8b", "benchmarks/models/llama-3.1-70b"
DECODE = "decode:1x1088,decode:32x1088,decode:128x1088,decode:256x1088"
DUMMY = ("--load-format=dummy", "--skip-tokenizer-init", "--max-model-len=8192")


@dataclass(frozen=True)
class Stage:
    """One program.

    Attributes:
        seconds: it is ended after so many. On an H200, from an empty compile cache.
        args: what Python is to run; OUT stands for the stage's folder.
        num_gpus: it is left out on a machine with fewer.
    """

    name: str
    seconds: int
    args: tuple[str, ...]
    num_gpus: int = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a stage: "passed", "failed", "ended" (by the clock) or "left out: why"."""

    name: str
    result: str
    seconds: float = 0.0


def tests(name: str, seconds: int, *what: str) -> Stage:
    """Tests of kernels and models, several at a time: most of their time is compiling.

    Each is told when it ends, so that the log of a stage that is ended has those that failed.
    Without pytest-benchmark, which warns when tests run several at a time: warnings are errors.
    """
    how = ("-v", "-p", "no:benchmark", "-m", "gpu", "-n", "12")
    return Stage(name, seconds, ("-m", "pytest", *how, *what))


def script(name: str, seconds: int, *args: str, num_gpus: int = 1) -> Stage:
    """A program of this folder."""
    program, *rest = args
    return Stage(name, seconds, (f"benchmarks/{program}.py", *rest), num_gpus)


def quantised(name: str, *flags: str) -> Stage:
    """Decode steps, and throughput by concurrency, with weights or pages of fewer bits."""
    sizes = ("--batches", "1,16,32,128,256", "--streams", "16,32,64,128", "--workloads", "B1")
    return script(name, 200, "offline_baselines", LLAMA, *sizes, *flags)


STAGES = (
    tests("goldens", 150, "tests/models"),
    tests("kernels", 330, "tests/paged"),
    script("vllm", 330, "against_vllm", "--out", "OUT", "--seconds", "320"),
    script("host", 40, "host_time", LLAMA, "--batches", "256", "--json", "OUT/host.json"),
    *(
        script(
            f"steps-{form}",
            150,
            *("step_kernels", LLAMA, "--quantization", form, "--json", "OUT/steps.json"),
            *("--cases", f"{DECODE},mixed:0x0+27x300"),
        )
        for form in ("fp8", "int4", "int8")
    ),
    quantised("bf16"),
    quantised("fp8", "--quantization", "fp8"),
    quantised("fp8-kv-fp8", "--quantization", "fp8", "--kv-cache-dtype", "fp8"),
    quantised("int4", "--quantization", "int4"),
    quantised("int8-kv-int8", "--quantization", "int8", "--kv-cache-dtype", "int8"),
    script(
        "attention",
        160,
        *("attention_kernels", "--kv-dtype", "bfloat16", "fp8", "int8", "--json", "OUT/found.json"),
    ),
    script("experts-mxfp4", 90, "coded_experts"),
    *(
        script(
            f"tune-{form}",
            120,
            *("tune_narrow", "--format", form, "--seconds", "100"),
            *("--json", "OUT/found.json", "--table", "OUT/tuned.py"),
        )
        for form in ("fp8", "int8", "int4", "tiles")
    ),
    script("weight-offload", 150, "weight_offload", LLAMA, "--json", "OUT/found.json"),
    script("kv-offload", 180, "kv_offload", LLAMA, "--json", "OUT/found.json"),
    script(
        "lanes",
        180,
        *("mixed_lengths", LLAMA, "--max-model-len", "32768", "--tuning-seconds", "20"),
        *("--json", "OUT/found.json", "--plot", "OUT/lanes.svg"),
    ),
    Stage("bench-steps", 180, ("-m", "paged.http", "bench", "steps", LLAMA, *DUMMY)),
    Stage("profile", 120, ("-m", "paged.http", "bench", "profile", LLAMA, *DUMMY)),
    Stage("doctor", 60, ("-m", "paged.http", "doctor")),
    script(
        "two-gpus",
        300,
        *("tensor_parallel", LLAMA_70B, "--quantization", "fp8", "--json", "OUT/scaling.json"),
        num_gpus=2,
    ),
    script(
        "two-gpus-b1",
        300,
        *("offline_baselines", LLAMA, "--workloads", "B1", "--batches", "1,32,256"),
        *("--tensor-parallel-size", "2"),
        num_gpus=2,
    ),
)


def main() -> int:
    """Run what was asked for, in the order above."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for what comes out")
    parser.add_argument("--only", help="stages, by commas; default: all")
    parser.add_argument("--seconds", type=float, default=3600, help="for everything")
    parser.add_argument("--list", action="store_true", help="tell the stages, and run none")
    args = parser.parse_args()
    stages = chosen(args.only, parser)
    if args.list:
        for stage in stages:
            print(f"{stage.name:16} {stage.seconds:4} s  {' '.join(stage.args)}")
        return 0
    if args.out is None:
        parser.error("--out FOLDER is needed")
    deadline = time.monotonic() + args.seconds
    outcomes: list[Outcome] = []
    for stage in stages:
        outcomes.append(run(stage, args.out, deadline - time.monotonic()))
        print(f"== {stage.name}: {outcomes[-1].result}, {outcomes[-1].seconds:.0f} s", flush=True)
        summary = json.dumps([asdict(outcome) for outcome in outcomes], indent=1)
        (args.out / "summary.json").write_text(summary + "\n")
    return int(any(outcome.result != "passed" for outcome in outcomes))


def chosen(names: str | None, parser: argparse.ArgumentParser) -> list[Stage]:
    """The stages of these names, in the order of `STAGES`."""
    wanted = [stage.name for stage in STAGES] if names is None else names.split(",")
    unknown = set(wanted) - {stage.name for stage in STAGES}
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; --list tells which there are")
    return [stage for stage in STAGES if stage.name in wanted]


def run(stage: Stage, out: Path, seconds_left: float) -> Outcome:
    """Run one stage in a process group, so that nothing of it keeps the GPU."""
    folder = out / stage.name
    folder.mkdir(parents=True, exist_ok=True)
    if (found := num_gpus()) < stage.num_gpus:
        return Outcome(stage.name, f"left out: needs {stage.num_gpus} GPUs, found {found}")
    if seconds_left < min(stage.seconds, 30):
        return Outcome(stage.name, f"left out: {max(seconds_left, 0):.0f} s are left")
    command = [sys.executable, *(arg.replace("OUT", str(folder)) for arg in stage.args)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with (out / f"{stage.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(min(stage.seconds, seconds_left))
            result = "passed" if status == 0 else "failed"
        except subprocess.TimeoutExpired:
            result = "ended"
        finally:
            end_group(process)
    return Outcome(stage.name, result, time.monotonic() - began)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a stage started, whether it ended itself or not."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def num_gpus() -> int:
    """Of this machine, as the driver tells."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return len(listed.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
