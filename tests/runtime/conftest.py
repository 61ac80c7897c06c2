"""What several tests of the runtime start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from paged.runtime import buckets
from paged.runtime.compiles import use_compile_cache

CONFIGURED = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where programs are kept, by this project and by JAX's own cache."""
    before = {name: jax.config.values[name] for name in CONFIGURED}
    use_compile_cache(str(tmp_path))
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_few(patch: pytest.MonkeyPatch) -> None:
    """Have engines compile steps of their most rows alone, where nothing depends on the number.

    Sampling in each of its modes, for each number of rows, is most of what a start compiles.
    """
    for ladder in ("_DECODE", "_SAMPLING"):
        patch.setattr(buckets, ladder, (1024,))


@pytest.fixture(scope="module")
def few_programs() -> Iterator[None]:
    """For engines of a whole module: see `compile_few`."""
    with pytest.MonkeyPatch.context() as patch:
        compile_few(patch)
        yield
