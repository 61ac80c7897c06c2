"""From what the command line asks for to the requests themselves."""

from __future__ import annotations

from pathlib import Path

from paged.runtime.bench.datasets import Encode, sharegpt_requests
from paged.runtime.bench.options import FROM_FILES, WorkloadOptions
from paged.runtime.bench.workload_file import read_log, read_workload
from paged.runtime.bench.workloads import (
    BenchRequest,
    IdRange,
    baseline_requests,
    lognormal_requests,
    prefix_repetition_requests,
    prefix_tree_requests,
    random_requests,
)
from paged.runtime.errors import ConfigError

_DEFAULT_NUM_PROMPTS = 1000
# Flags that were passed over in silence would measure something else than what was asked for.
_MEANT_FOR = {
    "dataset_path": FROM_FILES,
    "workload": ("baseline",),
    "input_len": ("random",),
    "output_len": ("random", "prefix_repetition", "prefix_tree", "sharegpt", "custom"),
}


def select_requests(
    options: WorkloadOptions, *, seed: int | None, vocab_size: int | None, encode: Encode | None
) -> list[BenchRequest]:
    """The requests of a run.

    Args:
        seed: None for 0, or for a baseline workload's own.
        vocab_size: ids are drawn below it; None if it is unknown.
        encode: None if there is no tokenizer.

    Raises:
        ConfigError: the workload cannot be made from what was given.
    """
    _check_meant(options)
    ids = IdRange.below(vocab_size)
    if options.dataset_name == "baseline":
        if options.workload is None:
            raise ConfigError("--dataset-name baseline needs --workload")
        return baseline_requests(options.workload, options.num_prompts, seed=seed, ids=ids)
    if options.generated:
        generate = _GENERATORS[options.dataset_name]
        return generate(options, options.num_prompts or _DEFAULT_NUM_PROMPTS, seed or 0, ids)
    return _from_file(options, seed or 0, ids, encode)


def _check_meant(options: WorkloadOptions) -> None:
    """Raises ConfigError for a flag that says nothing of the chosen dataset."""
    for name, datasets in _MEANT_FOR.items():
        if getattr(options, name) is not None and options.dataset_name not in datasets:
            raise ConfigError(
                f"--{name.replace('_', '-')} says nothing of --dataset-name "
                f"{options.dataset_name}, only of {', '.join(datasets)}: leave it out, or name one "
                "of these"
            )


def _random(
    options: WorkloadOptions, num_requests: int, seed: int, ids: IdRange
) -> list[BenchRequest]:
    return random_requests(
        num_requests,
        options.input_len or options.random_input_len,
        options.output_len or options.random_output_len,
        seed=seed,
        ids=ids,
        range_ratio=options.random_range_ratio,
        prefix_len=options.random_prefix_len,
    )


def _lognormal(
    options: WorkloadOptions, num_requests: int, seed: int, ids: IdRange
) -> list[BenchRequest]:
    return lognormal_requests(
        num_requests,
        seed=seed,
        ids=ids,
        input_mean=options.lognormal_input_mean,
        output_mean=options.lognormal_output_mean,
        sigma=options.lognormal_sigma,
        max_len=options.lognormal_max_len,
    )


def _prefix_repetition(
    options: WorkloadOptions, num_requests: int, seed: int, ids: IdRange
) -> list[BenchRequest]:
    return prefix_repetition_requests(
        num_requests,
        seed=seed,
        ids=ids,
        num_prefixes=options.prefix_repetition_num_prefixes,
        prefix_len=options.prefix_repetition_prefix_len,
        suffix_len=options.prefix_repetition_suffix_len,
        output_len=options.output_len or options.prefix_repetition_output_len,
    )


def _prefix_tree(
    options: WorkloadOptions, num_requests: int, seed: int, ids: IdRange
) -> list[BenchRequest]:
    return prefix_tree_requests(
        num_requests,
        seed=seed,
        ids=ids,
        depth=options.prefix_tree_depth,
        branching=options.prefix_tree_branching,
        level_len=options.prefix_tree_level_len,
        suffix_len=options.prefix_tree_suffix_len,
        output_len=options.output_len or options.prefix_tree_output_len,
    )


_GENERATORS = {
    "random": _random,
    "lognormal": _lognormal,
    "prefix_repetition": _prefix_repetition,
    "prefix_tree": _prefix_tree,
}


def _from_file(
    options: WorkloadOptions, seed: int, ids: IdRange, encode: Encode | None
) -> list[BenchRequest]:
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    path, wanted = Path(options.dataset_path).expanduser(), options.num_prompts
    if options.dataset_name == "log":
        return read_log(path, wanted, ids=ids, seed=seed)
    if options.dataset_name == "custom":
        return read_workload(
            path, wanted, encode=encode, ids=ids, seed=seed, output_len=options.output_len
        )
    num_requests = wanted or _DEFAULT_NUM_PROMPTS
    return sharegpt_requests(
        path, num_requests, seed=seed, encode=encode, output_len=options.output_len
    )
