"""The folder of --kv-offloading-dir: whether it can be used, and the pages that are kept there."""

from __future__ import annotations

import logging
from pathlib import Path
from tempfile import NamedTemporaryFile

import jax
import jax.numpy as jnp

from paged.cache import read_pages
from paged.pool import PagePool
from paged.runtime.config import EngineConfig
from paged.runtime.disk_pages import DiskPages
from paged.runtime.disk_tier import DiskTier
from paged.runtime.errors import ConfigError
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig

logger = logging.getLogger(__name__)

_GIB = 2**30


def check_page_folder(folder: str | None) -> None:
    """Minutes later is late to hear that pages cannot be kept there. Raises ConfigError."""
    if folder is None:
        return
    try:
        path = Path(folder).expanduser()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with NamedTemporaryFile(dir=path):
            pass
    except (OSError, RuntimeError) as error:  # the latter of a user who has no home
        raise _unusable(error) from error


def _unusable(error: Exception) -> ConfigError:
    return ConfigError(f"--kv-offloading-dir cannot be used: {error}")


def open_disk_tier(
    config: EngineConfig, runner: StepRunner, pool: PagePool, scheduling: SchedulerConfig
) -> DiskTier | None:
    """The pages on disk, if they are asked for.

    Raises:
        ConfigError: their folder cannot be used.
    """
    if config.kv_offloading_dir is None:
        return None
    cache = runner.shapes.placement.cache_shapes(runner.shapes.cache)
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    [stack] = jax.eval_shape(read_pages, cache, one)
    page = [jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in stack]
    folder = Path(config.kv_offloading_dir).expanduser() / runner.fingerprint()
    size = int(config.kv_offloading_dir_size * _GIB)
    try:
        files = DiskPages(folder, size, page)
    except OSError as error:
        raise _unusable(error) from error
    logger.info(
        "%d pages in %s, which reads %.2f GB/s",
        *(len(files), folder, runner.shapes.cache.bytes_per_page / files.seconds_per_page / 1e9),
    )
    return DiskTier(files, pool, runner, scheduling.windows, scheduling.load_costs)
