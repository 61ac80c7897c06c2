"""`paged plan`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import jax

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.planning.gpus import GPUS, find_gpu
from paged.runtime.planning.levers import levers, remedies
from paged.runtime.planning.options import PlanOptions
from paged.runtime.planning.picture import svg
from paged.runtime.planning.planner import Workload, plan_for
from paged.runtime.planning.report import as_json, lever_table, report
from paged.runtime.planning.traps import warnings


def run(args: argparse.Namespace) -> int:
    """Print a plan; returns the exit status: 2 if the model does not fit, with what would help.

    Raises:
        ConfigError: the flags do not go together.
    """
    jax.config.update("jax_platforms", "cpu")  # a GPU that is here keeps its memory
    config, options = read_flags(EngineConfig, args), read_flags(PlanOptions, args)
    if options.gpu is None:
        raise ConfigError(f"--gpu names the GPU to plan for, one of {', '.join(GPUS)}")
    gpu = find_gpu(options.gpu)
    workload = Workload(options.input_len, options.output_len, options.concurrency)
    try:
        plan = plan_for(config, gpu, workload)
    except ConfigError:
        if fitting := remedies(config, gpu, workload):
            sys.stderr.write(f"What would fit on {gpu.name}:\n{lever_table(fitting)}\n\n")
        raise
    others, said = levers(config, gpu, workload), warnings(plan)
    if options.svg is not None:
        _write(Path(options.svg), svg(plan, others))
    in_json = options.json and json.dumps(as_json(plan, others, said), indent=2)
    sys.stdout.write(f"{in_json or report(plan, others, said)}\n")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg {path} cannot be written: {error.strerror}") from error
