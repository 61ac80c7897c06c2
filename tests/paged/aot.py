"""Compile for an H200 on a machine without a GPU, to see what its compiler says of a program.

Needs JAX's CUDA plugin and NVIDIA's compiler (`pip install 'jax[cuda13]'`), but no driver. The
whole XLA pipeline runs but for its autotuning, down to machine code, Pallas kernels included.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies

# What XLA asks a GPU about itself, as an H200 answers.
_H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 151397597184
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation" name: "NVIDIA H200"
  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def available() -> bool:
    """Whether the packages that this needs are installed."""
    return importlib.util.find_spec("jax_cuda13_plugin") is not None


def compile_for_h200(
    function: Callable[..., Any], *shapes: Any, donate: tuple[int, ...] = ()
) -> jax.stages.Compiled:
    """Compile `function` for arguments of these `jax.ShapeDtypeStruct` trees.

    Fails where a kernel that XLA itself compiles, the Triton ones included, would spill registers.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=_H200
    )
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells Pallas what it lowers for
        lowered = jax.jit(
            function, in_shardings=sharding, out_shardings=sharding, donate_argnums=donate
        ).lower(*shapes)
    return lowered.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
