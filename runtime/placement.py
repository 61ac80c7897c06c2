"""Which devices a model runs on, and what each has of the arrays that steps take.

Programs are written for one device. Several run the same program, each with its shares of weights
and pages and with a copy of all else, and give as many copies of what is no page: so the host talks
to all of them as to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from paged.cache import CacheSpec, PagedKVCache
from paged.models.mesh import TENSOR
from paged.runtime.errors import ConfigError
from paged.runtime.lowering import Job

COPIED = PartitionSpec()
"""Of arrays that every device has."""


@dataclass(frozen=True)
class Placement:
    """Where a model runs.

    Attributes:
        mesh: the devices that share it, in one axis; None for the default device.
        latents: its pages hold latents, which all heads share.
    """

    mesh: Mesh | None = None
    latents: bool = False

    @classmethod
    def on(
        cls, devices: Sequence[jax.Device], *, latents: bool = False, pinned: bool = False
    ) -> Placement:
        """Of a model on these devices.

        Args:
            pinned: a single one is not just the default device.
        """
        if len(devices) == 1 and not pinned:
            return cls()
        mesh = Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,))
        return cls(mesh, latents)

    @property
    def num_devices(self) -> int:
        """How many devices there are."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def pages(self) -> PartitionSpec:
        """Of pages: heads are shared out, latents copied."""
        return COPIED if self.latents else PartitionSpec(None, None, TENSOR)

    @property
    def stacks(self) -> PartitionSpec:
        """Of what is read from pages, which has an axis more."""
        return COPIED if self.latents else PartitionSpec(None, *self.pages)

    @property
    def spread_stacks(self) -> Sharding | None:
        """How it lies on all devices; None for one."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.stacks)

    def job(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        donated: tuple[int, ...] = (),
        out: Any = COPIED,
    ) -> Job:
        """A program for the devices, from one that is written for each of them.

        Args:
            args: abstract ones, of all devices; what has no sharding is copied.
            out: what each device has of the results, as a prefix of their tree.
        """
        if self.mesh is None:
            return Job(function, args, donated)
        args = jax.tree.map(self._placed, args)
        takes = jax.tree.map(lambda each: each.sharding.spec, args)
        spread = jax.shard_map(
            function, mesh=self.mesh, in_specs=takes, out_specs=out, check_vma=False
        )
        return Job(spread, args, donated)

    def shaped(self, tree: Any, spec: PartitionSpec) -> Any:
        """The same shapes, for arrays that lie on the devices as `spec` says."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, spec)
        return jax.tree.map(
            lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding), tree
        )

    def cache_shapes(self, spec: CacheSpec) -> PagedKVCache:
        """The shapes of all devices' pages, of which `spec` tells what one has."""
        shapes = PagedKVCache.shapes(spec)
        if self.mesh is None:
            return shapes
        times = 1 if self.latents else self.mesh.size

        def together(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            pages, size, heads, *rest = each.shape
            return jax.ShapeDtypeStruct((pages, size, heads * times, *rest), each.dtype)

        whole: PagedKVCache = self.shaped(jax.tree.map(together, shapes), self.pages)
        return whole

    def zeros(self, spec: CacheSpec) -> PagedKVCache:
        """Allocate every page on every device, zeroed; see `cache_shapes`."""
        if self.mesh is None:
            return PagedKVCache.zeros(spec)
        sharding = NamedSharding(self.mesh, self.pages)
        shapes = self.cache_shapes(spec)
        cache: PagedKVCache = jax.tree.map(
            lambda each: jnp.zeros(each.shape, each.dtype, device=sharding), shapes
        )
        return cache

    def copied[T](self, tree: T) -> T:
        """Arrays as every device has them."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self.mesh, COPIED))

    def copied_to(self, memory: str) -> Sharding | None:
        """How all devices have copies in a kind of memory; None for one device."""
        if self.mesh is None:
            return None
        return NamedSharding(self.mesh, COPIED, memory_kind=memory)

    def _placed(self, each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return each if each.sharding is not None else self.shaped(each, COPIED)


ONE_DEVICE = Placement()
"""All on the default device."""


def choose_devices(number: int, num_stages: int = 1) -> tuple[jax.Device, ...]:
    """The first devices of this process, or of each of those that share the model.

    Args:
        number: of each stage.

    Raises:
        ConfigError: there are fewer.
    """
    local = jax.local_devices()
    each = number * num_stages // jax.process_count()
    if each > len(local):
        stages = f" --pipeline-parallel-size {num_stages}" if num_stages > 1 else ""
        wanted = "as many devices" if each == number else f"{each} devices in each process"
        raise ConfigError(
            f"--tensor-parallel-size {number}{stages} needs {wanted}, and JAX finds "
            f"{len(local)} here. Use at most that."
        )
    of_process: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, []).append(device)
    return tuple(device for devices in of_process.values() for device in devices[:each])


def own_devices(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those of them that are this process's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def least_of_all(number: int) -> int:
    """The least of what the processes that share a model say; all of them must ask."""
    if jax.process_count() == 1:
        return number
    return int(np.min(multihost_utils.process_allgather(np.int64(number))))
