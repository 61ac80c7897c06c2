"""The whole comparison with vLLM: one command, one table.

    python benchmarks/against_vllm.py --out FOLDER [--parts decode,offline,serve,start]

Runs `offline_baselines.py` (decode, offline), then `paged serve` under `paged bench serve` (serve),
and starts servers with an empty and a full compile cache (start). Each has the GPU to itself, in
processes of its own. After every figure FOLDER/figures.json is written anew and FOLDER/table.md
beside it: what `yardstick.json` asks for, what came out, the floor (`floors.py`) from this very
card's ceilings, and vLLM's figure. When --seconds are over, what runs is ended and the rest is left
out.

The starts of the offline engine and of the measured server are told too: as cold ones if the
compile cache was empty before, else as warm ones.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Timer
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.floors import Ceilings, ModelWork, Request, floor_seconds
from paged.runtime.bench.workloads import IdRange, baseline_requests

ROOT = Path(__file__).parents[1]
PARTS = ("decode", "offline", "serve", "start")
SERVE_PROMPT, SERVE_OUTPUT = 300, 128
REQUESTS_PER_STREAM = 8
SHARED_PREFIX = {"D": 2048}
_SECONDS_TO_END = 20


@dataclass
class Book:
    """Figures by name, kept on disk as they come.

    Attributes:
        out: folder of figures.json and table.md.
        model: what a token costs; with `ceilings` it gives the floors.
        raw: everything the programs told.
    """

    out: Path
    model: ModelWork
    ceilings: Ceilings | None = None
    figures: dict[str, float] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    raw: list[dict[str, Any]] = field(default_factory=list)

    def note(self, told: dict[str, Any]) -> None:
        """Keep what a program told, and write everything."""
        print(json.dumps(told), flush=True)
        self.raw.append(told)
        (self.out / "table.md").write_text("\n".join(table(self)) + "\n")
        record = {"figures": self.figures, "floors": self.floors, "raw": self.raw}
        (self.out / "figures.json").write_text(json.dumps(record, indent=1) + "\n")

    def seconds(self, requests: Sequence[Request]) -> float | None:
        """The least time for requests that run at once, if the ceilings are known."""
        if self.ceilings is None:
            return None
        return floor_seconds(self.model, self.ceilings, requests)

    def set(self, name: str, figure: float, floor: float | None = None) -> None:
        self.figures[name] = figure
        if floor is not None:
            self.floors[name] = floor


def table(book: Book) -> Iterator[str]:
    """Markdown: a row of the yardstick for each figure there is."""
    yield "| | unit | target | Paged | floor | share of it | vLLM | times vLLM |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in json.loads((ROOT / "benchmarks" / "yardstick.json").read_text())["rows"]:
        if row["name"] in book.figures:
            figure, floor = book.figures[row["name"]], book.floors.get(row["name"])
            more, vllm = row.get("more_is_better", False), row.get("vllm")
            cells = (
                row["title"],
                row["unit"],
                _number(row.get("target")),
                _number(figure),
                _number(floor),
                _gain(figure, floor, more),
                _number(vllm),
                _gain(figure, vllm, more),
            )
            yield f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 1000 or value == 0 else 1 if value >= 20 else 2
    return f"{value:,.{digits}f}"


def _gain(figure: float, other: float | None, more_is_better: bool) -> str:
    """How many times better than the other; 1 is as good."""
    if not other or not figure:
        return ""
    return f"{figure / other if more_is_better else other / figure:.2f}"


def keep_offline(book: Book, told: dict[str, Any], *, cold: bool) -> None:
    """Enter a figure of `offline_baselines.py`."""
    match told:
        case {"bytes_per_second": read, "flop_per_second": multiplied}:
            book.ceilings = Ceilings(read, multiplied)
        case {"start_seconds": seconds, "kv_cache_tokens": tokens}:
            book.set("start cold" if cold else "start warm", seconds)
            book.set("kv tokens", tokens)
        case {"batch": batch, "decode_step_ms": milliseconds, "context": context}:
            floor = book.seconds([Request(context, 2, cached=context)] * batch)
            book.set(f"decode {batch}", milliseconds, floor and 1e3 * floor)
        case {"workload": name}:
            kind = "total" if name == "B3" else "output"
            figure = told[f"{kind}_tokens_per_second"]
            floor = book.seconds(_requests(name))
            # The floor does the same tokens in less time.
            book.set(name, figure, floor and figure * told["seconds"] / floor)
    if "compiles" in told:
        book.set("compiles", max(told["compiles"], book.figures.get("compiles", 0)))


def _requests(workload: str) -> list[Request]:
    requests = baseline_requests(workload, None, seed=None, ids=IdRange())
    prefix = SHARED_PREFIX.get(workload, 0)
    first, *others = (Request(each.num_input_tokens, each.num_output_tokens) for each in requests)
    return [first, *(replace(each, cached=prefix, shared=prefix) for each in others)]


@dataclass(frozen=True)
class Processes:
    """Starts programs of this repository, and ends them when the time is up.

    Attributes:
        engine_flags: of every engine, the model first.
        deadline: on the clock of `time.monotonic`.
    """

    engine_flags: tuple[str, ...]
    deadline: float

    @contextmanager
    def program(self, *command: str) -> Iterator[subprocess.Popen[str]]:
        """A running program, its standard output to be read; it is ended at the latest here."""
        path = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )
        timer = Timer(max(self.deadline - time.monotonic(), 0), process.terminate)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            _end(process)

    def lines(self, *command: str) -> Iterator[str]:
        """What a program prints. Raises RuntimeError if it fails."""
        with self.program(*command) as process:
            assert process.stdout
            yield from process.stdout
            if status := process.wait():
                raise RuntimeError(f"{' '.join(command[:3])} ended with exit status {status}")


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it to leave, then make it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_SECONDS_TO_END)
        return
    process.kill()
    process.wait()


def run_offline(processes: Processes, book: Book, args: argparse.Namespace) -> None:
    """Decode steps and workloads, on one engine."""
    cold = _cache_is_empty(args)
    batches = args.batches if "decode" in args.parts else ""
    workloads = args.workloads if "offline" in args.parts else ""
    program = ("benchmarks/offline_baselines.py", *processes.engine_flags)
    for line in processes.lines(*program, "--batches", batches, "--workloads", workloads):
        if line.startswith("{"):
            told = json.loads(line)
            keep_offline(book, told, cold=cold)
            book.note(told)


def _cache_is_empty(args: argparse.Namespace) -> bool:
    folder = Path(args.compile_cache_dir or Path.home() / ".cache" / "paged" / "jit")
    return not (folder.is_dir() and any(folder.iterdir()))


@contextmanager
def server(processes: Processes, *more: str) -> Iterator[tuple[str, float]]:
    """A server that is ready: its address, and the seconds from its start to that."""
    begin = time.monotonic()
    door = ("--host", "127.0.0.1", "--port", "0", "--disable-uvicorn-access-log")
    model = (*processes.engine_flags, "--load-format", "dummy", "--skip-tokenizer-init")
    with processes.program("-m", "paged.http", "serve", *model, *door, *more) as process:
        assert process.stdout
        for line in process.stdout:
            if found := re.match(r"Ready: .* at (http\S+)/v1", line):
                yield found[1], time.monotonic() - begin
                return
        raise RuntimeError(f"the server ended with exit status {process.wait()}")


def run_serve(processes: Processes, book: Book, args: argparse.Namespace) -> None:
    """A closed loop of each number of streams, on one server."""
    kind = "cold" if _cache_is_empty(args) else "warm"
    with server(processes) as (url, seconds):
        book.set(f"server {kind}", seconds)
        book.note({"server_ready_seconds": round(seconds, 1)})
        for streams in map(int, args.streams.split(",")):
            report = bench_serve(processes, url, streams, args.model)
            request = Request(SERVE_PROMPT, SERVE_OUTPUT)
            floor = book.seconds([request] * streams)
            book.set(f"serve {streams}", report["request_throughput"], floor and streams / floor)
            # All streams begin at once: the last of them waits for the prompts of all.
            burst = book.seconds([Request(SERVE_PROMPT, 1)] * streams)
            book.set(f"ttft {streams}", report["p99_ttft_ms"] / 1e3, burst)
            compiles = metric(url, "paged:compiles_after_warmup_total")
            book.set("compiles", max(compiles, book.figures.get("compiles", 0)))
            book.note(report)


def bench_serve(processes: Processes, url: str, streams: int, model: str) -> dict[str, Any]:
    """What `paged bench serve` reports of a closed loop of so many streams."""
    with tempfile.TemporaryDirectory() as folder:
        workload = ("--dataset-name", "baseline", "--workload", "E")
        size = ("--num-prompts", str(REQUESTS_PER_STREAM * streams))
        load = ("--max-concurrency", str(streams), "--num-warmups", str(streams))
        # Another seed for each: a prompt seen before would be in the prefix cache.
        seed = ("--seed", str(1000 + streams))
        target = ("--base-url", url, "--tokenizer", model, "--skip-tokenizer-init")
        report = ("--save-result", "--result-dir", folder, "--result-filename", "report.json")
        command = (*target, *workload, *size, *load, *seed, *report, "--disable-tqdm")
        for _ in processes.lines("-m", "paged.http", "bench", "serve", *command):
            pass  # the same as text
        return json.loads((Path(folder) / "report.json").read_text())


def metric(url: str, name: str) -> float:
    """A number that the server counts."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", answer.read().decode(), re.MULTILINE)
    assert found, f"the server does not count {name}"
    return float(found[1])


def run_start(processes: Processes, book: Book) -> None:
    """Servers with an empty compile cache, then with a full one."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("cold", "warm"):
            with server(processes, "--compile-cache-dir", folder) as (_, seconds):
                book.set(f"server {kind}", seconds)
                book.note({f"server_{kind}_seconds": round(seconds, 1)})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--out", type=Path, required=True, help="folder for what comes out")
    parser.add_argument("--parts", default="decode,offline,serve", help=",".join(PARTS))
    parser.add_argument("--batches", default="1,8,32,128,256", help="of the decode part")
    parser.add_argument("--workloads", default="B1,B2,B3,B4,D", help="of the offline part")
    parser.add_argument("--streams", default="64,128,256", help="of the serve part")
    parser.add_argument("--seconds", type=float, default=570, help="for everything")
    parser.add_argument("--max-model-len", default="8192")
    parser.add_argument("--max-num-seqs")
    parser.add_argument("--max-num-batched-tokens")
    parser.add_argument("--compile-cache-dir")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts are {','.join(PARTS)}, not {', '.join(unknown)}")
    return args


def _engine_flags(args: argparse.Namespace) -> tuple[str, ...]:
    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "compile_cache_dir")
    given = [(name, getattr(args, name)) for name in names if getattr(args, name) is not None]
    return (args.model, *(f"--{name.replace('_', '-')}={value}" for name, value in given))


def main() -> int:
    """Run the parts; a part that fails, or has no time left, does not take the others' figures."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    processes = Processes(_engine_flags(args), time.monotonic() + args.seconds)
    book = Book(args.out, ModelWork.of(ROOT / args.model))
    jobs = {
        "decode, offline": lambda: run_offline(processes, book, args),
        "serve": lambda: run_serve(processes, book, args),
        "start": lambda: run_start(processes, book),
    }
    failed = False
    for name, job in jobs.items():
        if set(args.parts) & set(name.split(", ")):
            try:
                job()
            except (RuntimeError, OSError) as error:
                failed = True
                print(f"{name}: {error}", file=sys.stderr)
    print("\n".join(table(book)))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
