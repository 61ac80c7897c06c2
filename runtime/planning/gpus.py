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

_GIB = 2**30
_TERA = 10**12
_NVLINK4, _NVLINK5, _NVLINK3 = 0.9, 1.8, 0.6
_PCIE4, _PCIE5, _PCIE3 = 0.064, 0.128, 0.032


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
        flops16, flops8, ints8: bfloat16, fp8 and int8 FLOP/s; None where it has none of them.
        capability: compute capability.
        sheet: where the figures stand.
    """

    name: str
    kind: str
    memory: int
    usable: int
    bandwidth: float
    link: float
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


def _gpu(
    name: str,
    kind: str,
    gigabytes: int,
    usable: float,
    bandwidth: float,
    link: float,
    flops: tuple[float, float | None, float | None],
    capability: str,
    sheet: str,
) -> Gpu:
    """From GB, GiB, TB/s, TB/s, and TFLOP/s in bfloat16, fp8 and int8."""
    bf16, fp8, int8 = (None if each is None else each * _TERA for each in flops)
    assert bf16 is not None
    return Gpu(
        name=name,
        kind=f"NVIDIA {kind}",
        memory=gigabytes * 10**9,
        usable=int(usable * _GIB),
        bandwidth=bandwidth * _TERA,
        link=link * _TERA,
        flops16=bf16,
        flops8=fp8,
        ints8=int8,
        capability=capability,
        sheet=sheet,
    )


_HOPPER = (989.0, 1979.0, 1979.0)
_KINDS = (
    _gpu("B200", "B200", 180, 178.35, 7.7, _NVLINK5, (2250, 4500, 4500), "10.0", "HGX B200"),
    _gpu("H200", "H200", 141, 139.8, 4.8, _NVLINK4, _HOPPER, "9.0", "H200"),
    _gpu("H200-NVL", "H200 NVL", 141, 139.8, 4.8, _NVLINK4, (835, 1671, 1671), "9.0", "H200"),
    _gpu("GH200", "GH200 480GB", 96, 94.5, 4.0, _NVLINK4, _HOPPER, "9.0", "GH200"),
    _gpu("H100", "H100 80GB HBM3", 80, 79.1, 3.35, _NVLINK4, _HOPPER, "9.0", "H100"),
    _gpu("H100-NVL", "H100 NVL", 94, 93.1, 3.9, _NVLINK3, (835, 1671, 1671), "9.0", "H100"),
    _gpu("H100-PCIe", "H100 PCIe", 80, 79.1, 2.0, _PCIE5, (756, 1513, 1513), "9.0", "H100 PCIe"),
    _gpu("A100", "A100-SXM4-80GB", 80, 79.15, 2.039, _NVLINK3, (312, None, 624), "8.0", "A100"),
    _gpu("A100-40GB", "A100-SXM4-40GB", 40, 39.4, 1.555, _NVLINK3, (312, None, 624), "8.0", "A100"),
    _gpu("A100-PCIe", "A100 80GB PCIe", 80, 79.15, 1.935, _PCIE4, (312, None, 624), "8.0", "A100"),
    _gpu("L40S", "L40S", 48, 44.39, 0.864, _PCIE4, (362, 733, 733), "8.9", "L40S"),
    _gpu("L40", "L40", 48, 44.39, 0.864, _PCIE4, (181, 362, 362), "8.9", "L40"),
    _gpu("L4", "L4", 24, 22.03, 0.3, _PCIE4, (121, 242, 242), "8.9", "L4"),
    _gpu("A10", "A10", 24, 22.05, 0.6, _PCIE4, (125, None, 250), "8.6", "A10"),
    _gpu("RTX-6000-Ada", "RTX 6000 Ada Generation", 48, 47.4, 0.96, _PCIE4, (364, 728, 728), "8.9",
         "RTX 6000 Ada"),
    _gpu("RTX-A6000", "RTX A6000", 48, 47.5, 0.768, _PCIE4, (155, None, 310), "8.6", "RTX A6000"),
    _gpu("RTX-5090", "GeForce RTX 5090", 32, 31.36, 1.792, _PCIE5, (209.5, 419, 838), "12.0",
         "RTX Blackwell"),
    _gpu("RTX-4090", "GeForce RTX 4090", 24, 23.64, 1.008, _PCIE4, (165.2, 330.3, 660.6), "8.9",
         "Ada"),
    _gpu("RTX-3090", "GeForce RTX 3090", 24, 23.6, 0.936, _PCIE4, (71, None, 284), "8.6", "Ampere"),
    _gpu("T4", "Tesla T4", 16, 14.56, 0.32, _PCIE3, (65, None, 130), "7.5", "T4"),
)  # fmt: skip

GPUS = {gpu.name: gpu for gpu in _KINDS}
"""All of them, by name."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, however it is written: h200, NVIDIA H200, RTX 4090.

    Raises:
        ConfigError: there is none; with those that there are.
    """
    wanted = _plain(name)
    names = {_plain(gpu.name): gpu for gpu in _KINDS} | {_plain(gpu.kind): gpu for gpu in _KINDS}
    if wanted in names:
        return names[wanted]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"Did you mean {names[close[0]].name}? " if close else ""
    raise ConfigError(f"--gpu {name!r} is not known. {hint}There are {', '.join(GPUS)}.")


def _plain(name: str) -> str:
    words = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"nvidia|geforce|tesla", "", words)
