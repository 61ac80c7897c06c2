"""GPUs that a plan can be for, as their makers describe them.

Bandwidth and FLOP/s are those of NVIDIA's data sheets (for GeForce its architecture whitepapers):
of dense products, where a sheet counts zeros in pairs half of what it says, and in 16 bits with
float32 sums. `usable` is no data sheet's: it is what CUDA calls a card's total memory (less than
`nvidia-smi` says), which JAX takes a share of. It differs between drivers and machines by up to
0.3 %; with error correction off it is more.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from paged.runtime.errors import ConfigError

_TERA = 10**12


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: by which plans call it.
        kind: by which JAX calls it.
        memory: bytes, as it is sold.
        usable: bytes, as CUDA counts them.
        bandwidth: of the memory, bytes per second.
        link: between two of a machine, both directions together, bytes per second.
        bus: to the host, in the same way.
        flops16, flops8, ints8: bfloat16, fp8 and int8 FLOP/s; None where it has none of them.
        capability: compute capability.
        sheet: of NVIDIA, where the figures stand.
    """

    name: str
    kind: str
    memory: int
    usable: int
    bandwidth: float
    link: float
    bus: float
    flops16: float
    flops8: float | None
    ints8: float | None
    capability: str
    sheet: str

    @property
    def device(self) -> Any:
        """What the engine asks of a device in order to choose by."""
        return SimpleNamespace(
            platform="gpu", compute_capability=self.capability, device_kind=self.kind
        )

    @property
    def is_hopper(self) -> bool:
        """Whether the engine has kernels for it that others do without."""
        return self.capability == "9.0"


# GB sold, GiB usable; TB/s of memory, of a link, of the bus; TFLOP/s in bf16, fp8, int8.
_TABLE = """
name        |JAX's name             | GB|usable| TB/s|link|  bus| bf16|  fp8| int8| cap|sheet
B200        |B200                   |180|178.35|  8.0| 1.8|0.128| 2250| 4500| 4500|10.0|DGX B200
H200        |H200                   |141|139.80|  4.8| 0.9|0.128|  989| 1979| 1979| 9.0|H200
H200-NVL    |H200 NVL               |141|139.80|  4.8| 0.9|0.128|  835| 1671| 1671| 9.0|H200
GH200       |GH200 480GB            | 96| 94.50|  4.0| 0.9|0.900|  989| 1979| 1979| 9.0|GH200
H100        |H100 80GB HBM3         | 80| 79.10| 3.35| 0.9|0.128|  989| 1979| 1979| 9.0|H100
H100-NVL    |H100 NVL               | 94| 93.10|  3.9| 0.6|0.128|  835| 1671| 1671| 9.0|H100
H100-PCIe   |H100 PCIe              | 80| 79.10|  2.0|.128|0.128|  756| 1513| 1513| 9.0|H100 PCIe
A100        |A100-SXM4-80GB         | 80| 79.15|2.039| 0.6|0.064|  312|    -|  624| 8.0|A100
A100-40GB   |A100-SXM4-40GB         | 40| 39.40|1.555| 0.6|0.064|  312|    -|  624| 8.0|A100
A100-PCIe   |A100 80GB PCIe         | 80| 79.15|1.935|.064|0.064|  312|    -|  624| 8.0|A100
L40S        |L40S                   | 48| 44.39|0.864|.064|0.064|  362|  733|  733| 8.9|L40S
L40         |L40                    | 48| 44.39|0.864|.064|0.064|  181|  362|  362| 8.9|L40
L4          |L4                     | 24| 22.03|  0.3|.064|0.064|  121|  242|  242| 8.9|L4
A10         |A10                    | 24| 22.05|  0.6|.064|0.064|  125|    -|  250| 8.6|A10
RTX-6000-Ada|RTX 6000 Ada Generation| 48| 47.40| 0.96|.064|0.064|  364|  728|  728| 8.9|RTX 6000 Ada
RTX-A6000   |RTX A6000              | 48| 47.50|0.768|.064|0.064|  155|    -|  310| 8.6|RTX A6000
RTX-5090    |GeForce RTX 5090       | 32| 31.36|1.792|.128|0.128|209.5|  419|  838|12.0|Blackwell
RTX-4090    |GeForce RTX 4090       | 24| 23.64|1.008|.064|0.064|165.2|330.3|660.6| 8.9|Ada
RTX-3090    |GeForce RTX 3090       | 24| 23.60|0.936|.064|0.064|   71|    -|  284| 8.6|Ampere
T4          |Tesla T4               | 16| 14.56| 0.32|.032|0.032|   65|    -|  130| 7.5|T4
"""


def _gpu(row: str) -> Gpu:
    name, kind, *numbers, capability, sheet = (cell.strip() for cell in row.split("|"))
    values = [None if number == "-" else float(number) for number in numbers]
    sold, usable, memory, link, bus, bf16 = (number or 0.0 for number in values[:-2])
    fp8, int8 = values[-2:]
    return Gpu(
        name=name,
        kind=f"NVIDIA {kind}".replace("NVIDIA Tesla", "Tesla"),
        memory=int(sold * 10**9),
        usable=int(usable * 2**30),
        bandwidth=memory * _TERA,
        link=link * _TERA,
        bus=bus * _TERA,
        flops16=bf16 * _TERA,
        flops8=fp8 and fp8 * _TERA,
        ints8=int8 and int8 * _TERA,
        capability=capability,
        sheet=sheet,
    )


GPUS = {gpu.name: gpu for gpu in map(_gpu, _TABLE.strip().splitlines()[1:])}
"""All of them, by name."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, however it is written: h200, NVIDIA H200, RTX 4090.

    Raises:
        ConfigError: there is none; with those that there are.
    """
    wanted = _plain(name)
    names = {_plain(text): gpu for gpu in GPUS.values() for text in (gpu.kind, gpu.name)}
    if wanted in names:
        return names[wanted]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"Did you mean {names[close[0]].name}? " if close else ""
    raise ConfigError(f"--gpu {name!r} is not known. {hint}There are {', '.join(GPUS)}.")


def _plain(name: str) -> str:
    """What is left of a name without the maker, and without what the usual kind has anyway."""
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    kept = re.sub(r"nvidia|geforce|tesla|generation|sxm\d?|hbm3e?|80gb|141gb", "", words)
    return f"rtx{kept}" if kept.isdecimal() else kept
