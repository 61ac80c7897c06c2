"""`paged convert`: a model in the engine's own layout, which loads without conversion."""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from paged.http.logs import configure_logging
from paged.http.options import ConvertOptions
from paged.models.config import SUPPORTED_DTYPES
from paged.models.loading import resolve_model
from paged.runtime.flags import read_flags
from paged.runtime.quantization import quantized_source

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Convert a model; returns the exit status."""
    options = read_flags(ConvertOptions, args)
    configure_logging("info")
    # Not before: what Orbax imports sets up logging of its own where there is none.
    from paged.models.loading.convert import convert

    # Orbax warns of what is meant to be, and shows where threads were when they are interrupted.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    # Nothing here needs a GPU, and one that is there may be serving.
    jax.config.update("jax_platforms", "cpu")
    source = resolve_model(args.model, revision=options.revision, download_dir=options.download_dir)
    if options.quantization is not None:
        source = quantized_source(source, options.quantization, options.quantization_exclude)
    dtype = jnp.dtype(
        SUPPORTED_DTYPES[source.config.dtype if options.dtype == "auto" else options.dtype]
    )
    started = time.perf_counter()
    size = convert(source, Path(args.out).expanduser(), dtype)
    seconds = time.perf_counter() - started
    logger.info("Wrote %s: %.2f GB in %s, %.1f s", args.out, size / 1e9, dtype.name, seconds)
    return 0
