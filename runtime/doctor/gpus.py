"""GPUs by their driver's own tool, which takes none of their memory."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from paged.runtime.config import EngineConfig
from paged.runtime.doctor.finding import Finding, ok, warning, wrong
from paged.runtime.memory import size_text

Ask = Callable[[Sequence[str]], str | None]
"""Asks `nvidia-smi`; None where there is none, or where it fails."""

_MIB = 2**20
_SECONDS_TO_ANSWER = 30
_FIELDS = "index,name,driver_version,memory.total,memory.used,compute_cap"
# What the driver itself may have in use.
_OF_THE_DRIVER = 2**30
_OLDEST_CAPABILITY = 8.0
# Major versions of drivers that CUDA asks for, by the extra that brings it.
DRIVERS = {"cuda13": 580, "cuda12": 525}


@dataclass(frozen=True)
class Card:
    """A GPU as the driver describes it; sizes are bytes."""

    index: int
    name: str
    driver: str
    total: int
    used: int
    capability: str


def ask_nvidia_smi(arguments: Sequence[str]) -> str | None:
    """What it prints; see `Ask`."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS_TO_ANSWER,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def cards(ask: Ask) -> list[Card]:
    """The GPUs of this machine; none where there is no driver."""
    told = ask([f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (told or "").splitlines()]
    return [
        Card(int(index), name, driver, _bytes(total), _bytes(used), capability)
        for index, name, driver, total, used, capability in filter(_is_of_a_card, rows)
    ]


def _is_of_a_card(row: Sequence[str]) -> bool:
    """Others are remarks, as that there is none."""
    return len(row) == _FIELDS.count(",") + 1 and row[0].isdecimal()


def _bytes(mebibytes: str) -> int:
    """0 for what the driver does not tell, as of GPUs that share the host's memory."""
    return int(mebibytes) * _MIB if mebibytes.isdecimal() else 0


def cuda_devices() -> int:
    """How many GPUs CUDA sees. Raises OSError where it cannot be used."""
    cuda = ctypes.CDLL("libcuda.so.1")
    number = ctypes.c_int()
    for code in (cuda.cuInit(0), cuda.cuDeviceGetCount(ctypes.byref(number))):
        if code:
            raise OSError(f"CUDA's driver answers with error {code}")
    return number.value


def visible(found: Sequence[Card], environment: Mapping[str, str]) -> list[Card]:
    """Those that CUDA_VISIBLE_DEVICES leaves, which may also name them in a way of its own."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [*found]
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if not all(name.removeprefix("-").isdecimal() for name in names):
        return [*found]
    by_index = {str(card.index): card for card in found}
    # CUDA reads the list as far as the first number that no GPU has, which -1 makes use of.
    return [by_index[name] for name in takewhile(by_index.__contains__, names)]


def check_driver(
    found: Sequence[Card], devices: Path = Path("/dev/nvidiactl")
) -> Iterator[Finding]:
    """Whether there is a driver, and GPUs that the kernels run on."""
    if not found and devices.exists():
        yield wrong(
            "driver",
            f"{devices} is there, and nvidia-smi does not answer",
            "Run `nvidia-smi`: a driver that was updated wants a reboot, and a container wants "
            "`--gpus all` and NVIDIA's container toolkit.",
        )
    elif not found:
        yield warning(
            "driver",
            "no NVIDIA GPU: models run on the CPU, slowly",
            "To use a GPU, install its driver so that `nvidia-smi` lists it; in a container, start "
            "it with `--gpus all`.",
        )
    for card in found:
        said = f"GPU {card.index}: {card.name}, {size_text(card.total)}, driver {card.driver}"
        if float(card.capability) < _OLDEST_CAPABILITY:
            yield warning(
                "driver",
                f"{said}, compute capability {card.capability}",
                "Kernels need 8.0 (Ampere) or above: attention is left to XLA here, which is slow. "
                "Give --dtype float16.",
            )
        else:
            yield ok("driver", said)


def check_visibility(
    found: Sequence[Card], config: EngineConfig, environment: Mapping[str, str] = os.environ
) -> Iterator[Finding]:
    """Whether this process may see as many GPUs as it wants."""
    chosen, wanted = environment.get("CUDA_VISIBLE_DEVICES"), config.devices_here
    seen = visible(found, environment)
    if found and not seen:
        yield wrong(
            "visible GPUs",
            f"CUDA_VISIBLE_DEVICES={chosen!r} hides all of the {len(found)} here",
            f"Unset it, or name some of 0 to {len(found) - 1}.",
        )
    elif found and len(seen) < wanted:
        more = "" if chosen is None else f", or let CUDA_VISIBLE_DEVICES (now {chosen!r}) name more"
        yield wrong(
            "visible GPUs",
            f"the model is to be on {wanted} GPUs here, and {len(seen)} can be seen",
            f"Use at most {len(seen)}{more}.",
        )
    elif found:
        yield ok("visible GPUs", f"{len(seen)} of {len(found)}")
    elif wanted > 1:
        yield warning(
            "visible GPUs",
            f"--tensor-parallel-size {wanted} wants as many devices, and there is no GPU",
            "Leave it out. For tests XLA_FLAGS=--xla_force_host_platform_device_count="
            f"{wanted} makes as many of the CPU.",
        )


def check_memory(
    found: Sequence[Card],
    config: EngineConfig,
    ask: Ask,
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Finding]:
    """Whether something else has what the engine would take."""
    for card in visible(found, environment)[: config.devices_here]:
        wanted = int(config.gpu_memory_utilization * card.total)
        free = card.total - card.used
        if wanted <= free:
            yield ok("GPU memory", f"GPU {card.index}: {size_text(free)} are free")
            continue
        yield wrong(
            "GPU memory",
            f"GPU {card.index}: {size_text(card.used)} of {size_text(card.total)} are in use"
            f"{_by_whom(ask, card)}, and --gpu-memory-utilization "
            f"{config.gpu_memory_utilization:g} wants {size_text(wanted)}",
            f"End what uses it, or choose another GPU with CUDA_VISIBLE_DEVICES"
            f"{_smaller_share(free, card.total)}. See docs/failures.md#out-of-memory.",
        )


def _smaller_share(free: int, total: int) -> str:
    """What would fit beside others; "" if they leave nothing worth it."""
    hundredths = 100 * (free - _OF_THE_DRIVER) // total
    return f", or give --gpu-memory-utilization {hundredths / 100:g}" if hundredths > 0 else ""


def _by_whom(ask: Ask, card: Card) -> str:
    """The processes that use a GPU, as far as the driver tells: in a container it may not."""
    told = ask(
        [
            f"--id={card.index}",
            "--query-compute-apps=pid,process_name,used_memory",
            "--format=csv,noheader",
        ]
    )
    lines = [line.strip() for line in (told or "").splitlines() if line.strip()]
    return f" (process {'; '.join(lines)})" if lines else ""
