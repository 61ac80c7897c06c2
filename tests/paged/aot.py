"""Compile for a GPU on a machine without one, to see what its compiler says of a program.

Needs JAX's CUDA plugin and NVIDIA's compiler (`pip install 'jax[cuda13]'`), but no driver. The
whole XLA pipeline runs but for its autotuning, down to machine code, Pallas kernels included.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


@dataclass(frozen=True)
class Gpu:
    """What XLA asks a GPU about itself, where GPUs differ.

    Attributes:
        name: one of those that Pallas knows; the L40S, say, it asks itself for what it can do.
        capability: compute capability, major and minor.
        extension: of the instruction set that is asked for, in XLA's words.
        cores: multiprocessors.
        fpus, threads: of a multiprocessor; threads are those that it holds at a time.
        clock: GHz.
        shared: KiB of shared memory of a multiprocessor; a block may have all but one of them.
        bandwidth: of the memory, bytes per second.
        cache: bytes of the second-level cache.
        memory: bytes.
    """

    name: str
    capability: tuple[int, int]
    extension: str
    cores: int
    fpus: int
    threads: int
    clock: float
    shared: int
    bandwidth: int
    cache: int
    memory: int

    @property
    def device(self) -> Any:
        """What the code asks of a device to choose by."""
        capability = ".".join(map(str, self.capability))
        return SimpleNamespace(
            platform="gpu", compute_capability=capability, device_kind=f"NVIDIA {self.name}"
        )

    @property
    def description(self) -> str:
        """For XLA, as a text protocol buffer."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared * 1024}
  shared_memory_per_block_optin: {(self.shared - 1) * 1024} threads_per_core_limit: {self.threads}
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.cache} device_memory_size: {self.memory}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {self.extension} }}
  device_vendor: "NVIDIA Corporation" name: "NVIDIA {self.name}"
  platform_version: "Compute Capability {major}.{minor}"
  device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 patch: 0 }}
device_description_str: "NVIDIA {self.name}"
"""


H200 = Gpu(
    name="H200",
    capability=(9, 0),
    extension="ACCELERATED_FEATURES",
    cores=132,
    fpus=128,
    threads=2048,
    clock=1.98,
    shared=228,
    bandwidth=4800 * 10**9,
    cache=50 * 2**20,
    memory=141 * 2**30,
)
A100 = Gpu(
    name="A100-SXM4-80GB",
    capability=(8, 0),
    extension="NONE",
    cores=108,
    fpus=64,
    threads=2048,
    clock=1.41,
    shared=164,
    bandwidth=2039 * 10**9,
    cache=40 * 2**20,
    memory=79 * 2**30,
)
L40 = Gpu(
    name="L40",
    capability=(8, 9),
    extension="NONE",
    cores=142,
    fpus=128,
    threads=1536,
    clock=2.52,
    shared=100,
    bandwidth=864 * 10**9,
    cache=96 * 2**20,
    memory=44 * 2**30,
)


def available() -> bool:
    """Whether the packages that this needs are installed."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def mesh_of(gpu: Gpu, devices: int, axis: str) -> Mesh:
    """So many GPUs of a machine, in a mesh of one axis."""
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name=gpu.name,
        topology=f"1x1x{devices}",
        target_config=gpu.description,
    )
    found = topologies.make_mesh(topology, (devices,), (axis,))
    return Mesh(found.devices, (axis,), axis_types=(AxisType.Auto,))


def compile_for(
    gpu: Gpu,
    function: Callable[..., Any],
    *shapes: Any,
    donate: tuple[int, ...] = (),
    may_spill: bool = False,
) -> jax.stages.Compiled:
    """Compile `function` for arguments of these `jax.ShapeDtypeStruct` trees.

    Fails where a kernel wants more shared memory than there is and, unless it may, where one that
    XLA itself compiles, the Triton ones included, would spill registers.
    """
    mesh = mesh_of(gpu, 1, "x")
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas what it lowers for
        lowered = jax.jit(
            function, in_shardings=sharding, out_shardings=sharding, donate_argnums=donate
        ).lower(*shapes)
    return lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": not may_spill})


def nothing_spilled(said: str) -> bool:
    """Whether ptxas, by what it says of one kernel or more, kept all of them in registers."""
    spilled = re.findall(r"(\d+) bytes spill stores", said)
    assert spilled, f"nothing is said of registers: {said!r}"
    return set(spilled) == {"0"}


compile_for_h200 = functools.partial(compile_for, H200)
