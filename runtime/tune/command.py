"""`paged tune`: from the command line to a folder with flags and the evidence for them."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged.runtime.bench.load import arrival_times
from paged.runtime.bench.offline import config_of, without_weights
from paged.runtime.bench.options import ArrivalOptions
from paged.runtime.bench.publish import check_writable, write_text
from paged.runtime.bench.workload_file import read_workload
from paged.runtime.bench.workloads import BenchRequest, IdRange
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.tune.journal import Journal, Task, kept_alone
from paged.runtime.tune.levers import LEVERS
from paged.runtime.tune.options import TuneOptions
from paged.runtime.tune.page import evidence
from paged.runtime.tune.report import CONFIG, PAGE, Findings, as_yaml, line_of, summary, told_flags
from paged.runtime.tune.search import Search
from paged.runtime.tune.workbench import Load, Workbench


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if the engine does not serve the workload with the flags given.

    Raises:
        ConfigError: it cannot be tuned as asked.
    """
    # An engine tells of its start at length, and here dozens start.
    logging.getLogger("paged").setLevel(logging.WARNING)
    findings = tune(config_of(args), read_flags(TuneOptions, args))
    if findings.best is None:
        [baseline] = findings.verdicts
        sys.stderr.write(f"paged: error: the baseline fails: {baseline.trial.error}\n")
        return 1
    return 0


def tune(config: EngineConfig, options: TuneOptions) -> Findings:
    """Search, telling each trial on standard output, and leave what was found in the folder.

    Raises:
        ConfigError, EngineDead: the baseline does not start, or the folder is of another task, or
            another tune is at work there.
    """
    load = _load(config, options)
    folder = Path(options.output_dir).expanduser()
    with kept_alone(folder):
        return _tune_in(folder, config, options, load)


def _tune_in(folder: Path, config: EngineConfig, options: TuneOptions, load: Load) -> Findings:
    journal = Journal(folder, _task(config, load))
    check_writable(folder / CONFIG, folder / PAGE)
    workbench = Workbench(config, load, journal)
    try:
        start = workbench.start()
        levers = [each for each in LEVERS if not (options.keep_precision and each.costs_precision)]
        search = Search(workbench.measure, levers, start.facts, options.margin, options.max_runs)
        for verdict in search.run(start.values):
            sys.stdout.write(line_of(verdict, start.values) + "\n")
            sys.stdout.flush()
    finally:
        workbench.close()
    findings = Findings(
        config=config,
        model=config.model,
        device=start.device,
        goals=load.goals,
        baseline=start.values,
        verdicts=tuple(search.verdicts),
        is_cut_short=search.is_cut_short,
    )
    if findings.best is not None:
        write_text(folder / CONFIG, as_yaml(findings))
        write_text(folder / PAGE, evidence(findings, options.output_dir))
        sys.stdout.writelines(f"{line}\n" for line in summary(findings, options.output_dir))
    return findings


def _load(config: EngineConfig, options: TuneOptions) -> Load:
    requests = _requests(config, options)
    times = [each.arrival for each in requests]
    if options.request_rate is not None:
        rate = ArrivalOptions(request_rate=options.request_rate)
        times = arrival_times(len(requests), rate, config.seed).tolist()
    return Load(
        requests,
        times,
        dict(options.goodput),
        options.max_concurrency,
        progress=not options.disable_tqdm,
    )


def _requests(config: EngineConfig, options: TuneOptions) -> list[BenchRequest]:
    if options.workload is None:
        raise ConfigError(
            "paged tune needs --workload FILE: JSON lines such as "
            '{"input_tokens": 300, "output_tokens": 128, "arrival": 0.5}'
        )
    source = without_weights(config)
    encode = None if config.skip_tokenizer_init else source.tokenizer().encode
    ids = IdRange.below(source.config.vocab_size)
    path = Path(options.workload).expanduser()
    return read_workload(path, encode=encode, ids=ids, seed=config.seed)


def _task(config: EngineConfig, load: Load) -> Task:
    return Task(
        model=config.model,
        flags=json.loads(json.dumps(told_flags(config))),  # tuples as a file has them
        workload=_digest(load.requests, load.times),
        goals=load.goals,
        max_concurrency=load.max_concurrency,
    )


def _digest(requests: Sequence[BenchRequest], times: Sequence[float]) -> str:
    whole: list[Any] = [
        (each.prompt, each.num_output_tokens, each.priority, at)
        for each, at in zip(requests, times, strict=True)
    ]
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:16]
