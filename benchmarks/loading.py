"""How fast a checkpoint becomes parameters on the device, and what that takes of the host's memory.

Makes a checkpoint of random weights in the shape of a config.json, in several safetensors files;
loads it in a process of its own; converts it, and loads that in another. Of the host's memory it
tells the most that the loading process held of its own beyond what it began with (on a CPU beyond
the parameters, too, which lie there), and the most pages of mapped files, which the system takes
back when it wants them.

    python benchmarks/loading.py --num-layers 4 --cold
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.config import SUPPORTED_DTYPES, resolve_dtype
from paged.models.loading import resolve_model
from paged.models.registry import get_family, model_config

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "benchmarks" / "models" / "llama-3.1-8b" / "config.json"
_SAMPLING_INTERVAL = 0.002
_NOISE_BYTES = 2**26
_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Load:
    """What one load came to.

    Attributes:
        seconds: until the last parameter is on the device.
        param_bytes: of the parameters.
        host_bytes: most memory of its own that the process held beyond what it began with, and on
            a CPU beyond the parameters.
        mapped_bytes: most pages of files in its memory at one time.
    """

    seconds: float
    param_bytes: int
    host_bytes: int
    mapped_bytes: int

    def __str__(self) -> str:
        size = self.param_bytes / 1e9
        return (
            f"{self.seconds:.2f} s, {size / self.seconds:.2f} GB/s; host memory "
            f"{self.host_bytes / 1e9:.2f} GB of its own, {self.mapped_bytes / 1e9:.2f} GB mapped"
        )


class MemoryWatch:
    """Samples what this process holds, in a thread, for as long as it is entered.

    Attributes:
        own, mapped: most bytes seen, of the process's own and of mapped files.
    """

    def __init__(self) -> None:
        self.own = self.mapped = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_SAMPLING_INTERVAL):
            own, mapped = resident()
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: its own, and of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    held = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if "Rss" in line}
    return held["RssAnon"] + held["RssShmem"], held["RssFile"]


def write_checkpoint(folder: Path, config: Mapping[str, Any], shard_bytes: int) -> int:
    """Write a checkpoint of random weights; returns the bytes of its largest tensor."""
    described = model_config(config)
    specs = get_family(described.architecture).specs(described)
    shapes = {part.name: part.shape for spec in jax.tree.leaves(specs) for part in spec.parts}
    dtype = np.dtype(SUPPORTED_DTYPES[described.dtype])
    noise = np.random.default_rng(0).normal(0, 0.02, _NOISE_BYTES // dtype.itemsize).astype(dtype)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards(shapes, shard_bytes // dtype.itemsize)):
        file = f"model-{number + 1:05}.safetensors"
        write_shard(folder / file, shard, noise)
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return max(map(prod, shapes.values())) * dtype.itemsize


def shards(shapes: Shapes, most: int) -> Iterator[Shapes]:
    """Tensors by the file that they go into, of `most` elements unless one has more."""
    shard: Shapes = {}
    for name, shape in shapes.items():
        if shard and sum(map(prod, shard.values())) + prod(shape) > most:
            yield shard
            shard = {}
        shard[name] = shape
    yield shard


def write_shard(path: Path, shapes: Shapes, noise: np.ndarray) -> None:
    """Write one safetensors file, whose tensors repeat `noise`."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * noise.itemsize
        kind = _SAFETENSORS_NAMES[noise.dtype.name]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    raw = memoryview(noise.view(np.uint8))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, end, len(raw)):
            file.write(raw[: end - at])


def load(folder: Path, dtype_name: str) -> Load:
    """Load a model in this process."""
    device = jax.devices()[0]
    jax.block_until_ready(jnp.zeros(1) + 1)  # what JAX itself needs is no part of it
    source = resolve_model(folder)
    dtype = resolve_dtype(dtype_name, source.config, device.platform)
    own, mapped = resident()
    with MemoryWatch() as watch:
        started = time.perf_counter()
        params = jax.block_until_ready(source.load(dtype, progress=False))
        seconds = time.perf_counter() - started
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    own += size if device.platform == "cpu" else 0
    return Load(seconds, size, watch.own - own, watch.mapped - mapped)


def load_apart(folder: Path, args: argparse.Namespace) -> Load:
    """Load a model in a process of its own."""
    if args.cold:
        forget(folder)
    argv = [sys.executable, __file__, "--load", str(folder), "--dtype", args.dtype]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    return Load(**json.loads(done.stdout.splitlines()[-1]))


def forget(folder: Path) -> None:
    """Drop a folder's files from the system's memory: the next reader waits for the disk."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def convert(folder: Path, out: Path) -> float:
    """Convert a model in a process of its own; returns the seconds that it took."""
    argv = [sys.executable, "-m", "paged.http", "convert", str(folder), str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.perf_counter()
    subprocess.run(argv, env=environment, check=True)
    return time.perf_counter() - started


def measure(args: argparse.Namespace) -> None:
    """Make a checkpoint, load it, convert it and load that."""
    config = json.loads(args.config.read_text())
    if args.num_layers is not None:
        config["num_hidden_layers"] = args.num_layers
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        folder, out = Path(scratch) / "model", Path(scratch) / "converted"
        folder.mkdir()
        largest = write_checkpoint(folder, config, int(args.shard_gb * 1e9))
        num_files = len(list(folder.glob("*.safetensors")))
        print(f"{num_files} files, largest tensor {largest / 1e9:.2f} GB", flush=True)
        for _ in range(args.repeat):
            print("safetensors:", load_apart(folder, args), flush=True)
        if not args.convert:
            return
        print(f"converting: {convert(folder, out):.1f} s", flush=True)
        for _ in range(args.repeat):
            print("converted:", load_apart(out, args), flush=True)


def main() -> None:
    """Read the flags, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=CONFIG, help="shape of the model")
    parser.add_argument("--num-layers", type=int, help="in place of those in the config.json")
    parser.add_argument("--shard-gb", type=float, default=2, help="GB of a file, about")
    parser.add_argument("--dtype", default="bfloat16", help="to load in")
    parser.add_argument("--dir", type=Path, help="where to write; default the system's /tmp")
    parser.add_argument("--repeat", type=int, default=2, help="how often to load each")
    parser.add_argument("--cold", action="store_true", help="read from the disk each time")
    parser.add_argument("--convert", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--load", type=Path, help=argparse.SUPPRESS
    )  # what a process of its own does
    args = parser.parse_args()
    if args.load:
        print(json.dumps(asdict(load(args.load, args.dtype))))
    else:
        measure(args)


if __name__ == "__main__":
    main()
