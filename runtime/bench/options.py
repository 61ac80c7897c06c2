"""What the benchmarks can be told: each flag declared once, with its default and its help."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Any, Self

from paged.runtime.bench.baselines import BASELINES

GENERATED = ("random", "lognormal", "prefix_repetition", "baseline")
FROM_FILES = ("sharegpt", "custom")
METRICS = ("ttft", "tpot", "itl", "e2el")
BACKENDS = ("openai", "vllm", "openai-chat")


def _option(default: Any, help: str, **how: Any) -> Any:
    """A field with its help and whatever else `add_argument` should know."""
    return field(default=default, metadata={"help": help, **how})


def add_options(parser: argparse.ArgumentParser, options: type[Any], title: str) -> None:
    """One flag for each field, in a group of its own."""
    group = parser.add_argument_group(title)
    for each in fields(options):
        how: dict[str, Any] = {"default": each.default, **each.metadata, "help": _help(each)}
        if isinstance(each.default, bool):
            how["action"] = "store_true"
        group.add_argument(f"--{each.name.replace('_', '-')}", **how)


def _help(each: Field[Any]) -> str:
    text: str = each.metadata["help"]
    silent = each.default in (None, False) or isinstance(each.default, tuple)
    return text if silent else f"{text} (default: {each.default})"


class FromArguments:
    """Dataclasses that are read back from parsed flags."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        names = [each.name for each in fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: getattr(args, name) for name in names})


def count(text: str) -> int:
    """A number of things, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive(text: str) -> float:
    """A number above 0; `inf` is one."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def finite(text: str) -> float:
    """A finite number above 0."""
    value = positive(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError("must be finite")
    return value


def percentiles(text: str) -> tuple[float, ...]:
    """Comma-separated numbers from 0 to 100."""
    values = tuple(float(part) for part in text.split(","))
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be from 0 to 100, got {text}")
    return values


def metric_names(text: str) -> tuple[str, ...]:
    """Comma-separated names out of ttft, tpot, itl and e2el."""
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        raise argparse.ArgumentTypeError(f"knows {', '.join(METRICS)}, got {', '.join(unknown)}")
    return names


def key_value(text: str) -> tuple[str, str]:
    """`KEY=VALUE`."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key.strip(), value.strip()


def goal(text: str) -> tuple[str, float]:
    """`METRIC:MILLISECONDS`."""
    name, _, limit = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"must be ttft, tpot or e2el and a limit, got {text!r}")
    return name, finite(limit)


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return value


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions(FromArguments):
    """Which requests are sent."""

    dataset_name: str = _option(
        "random",
        "Where prompts come from: random token ids of fixed lengths, of chat-like (lognormal) "
        "lengths, with repeated prefixes, or a named baseline; or a ShareGPT or JSON lines file.",
        choices=(*GENERATED, *FROM_FILES),
    )
    dataset_path: str | None = _option(None, "File of the sharegpt or custom dataset.")
    workload: str | None = _option(
        None, "Name of the baseline workload.", choices=tuple(sorted(BASELINES))
    )
    num_prompts: int | None = _option(
        None, "Requests; default 1000, or all of a baseline workload.", type=count
    )
    input_len: int | None = _option(
        None, "Prompt tokens of random requests; same as --random-input-len.", type=count
    )
    output_len: int | None = _option(
        None, "Tokens to generate, of random requests or for every prompt of a file.", type=count
    )
    random_input_len: int = _option(1024, "Prompt tokens of random requests.", type=count)
    random_output_len: int = _option(128, "Tokens to generate of random requests.", type=count)
    random_range_ratio: float = _option(
        0.0, "Draw random lengths from (1 - ratio) to (1 + ratio) times the given.", type=float
    )
    random_prefix_len: int = _option(
        0, "Tokens that all random prompts share, on top of their length.", type=int
    )
    lognormal_input_mean: float = _option(220.0, "Mean prompt tokens.", type=finite)
    lognormal_output_mean: float = _option(200.0, "Mean tokens to generate.", type=finite)
    lognormal_sigma: float = _option(1.0, "Standard deviation of log lengths.", type=float)
    lognormal_max_len: int = _option(1024, "Longest prompt and output.", type=count)
    prefix_repetition_num_prefixes: int = _option(10, "Different prefixes.", type=count)
    prefix_repetition_prefix_len: int = _option(256, "Tokens of a prefix.", type=count)
    prefix_repetition_suffix_len: int = _option(256, "Tokens after the prefix.", type=count)
    prefix_repetition_output_len: int = _option(128, "Tokens to generate.", type=count)

    @property
    def generated(self) -> bool:
        """Prompts are random ids, so that an end-of-sequence token means nothing."""
        return self.dataset_name in GENERATED


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(FromArguments):
    """How an offline run goes."""

    n: int = _option(
        1, "Sequences of each prompt; sampled at temperature 1 if above 1.", type=count
    )
    async_engine: bool = _option(False, "Send everything through AsyncEngine instead of LLM.")
    disable_detokenize: bool = _option(False, "Leave the output as token ids.")
    output_json: str | None = _option(None, "Write the results to this file.")
    disable_tqdm: bool = _option(False, "No progress bar.")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(FromArguments):
    """One batch, over and over."""

    input_len: int = _option(32, "Tokens of each prompt.", type=count)
    output_len: int = _option(128, "Tokens to generate for each.", type=count)
    batch_size: int = _option(8, "Prompts in the batch.", type=count)
    n: int = _option(
        1, "Sequences of each prompt; sampled at temperature 1 if above 1.", type=count
    )
    num_iters_warmup: int = _option(10, "Runs that are not counted.", type=int)
    num_iters: int = _option(30, "Runs that are.", type=count)
    disable_detokenize: bool = _option(False, "Leave the output as token ids.")
    output_json: str | None = _option(None, "Write the results to this file.")
    disable_tqdm: bool = _option(False, "No progress bar.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(FromArguments):
    """Which server, and how it is spoken to."""

    backend: str = _option("openai", "API: completions, or chat completions.", choices=BACKENDS)
    base_url: str | None = _option(None, "Server, as http://host:port; overrides host and port.")
    host: str = _option("127.0.0.1", "Server's name or address.")
    port: int = _option(8000, "Server's port.", type=int)
    endpoint: str | None = _option(
        None, "Path; default /v1/completions, for openai-chat /v1/chat/completions."
    )
    model: str | None = _option(None, "Model to ask for; default the server's first.")
    served_model_name: str | None = _option(
        None, "Name to ask for, where the server calls the model differently."
    )
    tokenizer: str | None = _option(
        None,
        "Folder, GGUF file or hub id of the tokenizer, for texts and the vocabulary's size; "
        "default --model if that is a local path.",
    )
    skip_tokenizer_init: bool = _option(
        False,
        "The server streams token ids, not text; take only the vocabulary's size from there.",
    )
    header: Sequence[tuple[str, str]] = _option(
        (), "Headers to send, as KEY=VALUE.", type=key_value, nargs="*", metavar="KEY=VALUE"
    )
    extra_body: Mapping[str, Any] | None = _option(
        None, "JSON object that is added to every request.", type=json_object, metavar="JSON"
    )
    insecure: bool = _option(False, "Do not check the server's certificate.")
    ready_check_timeout_sec: float = _option(
        600.0, "Wait so long for a first answer; 0 does not try.", type=float
    )
    request_timeout_sec: float = _option(
        1800.0, "Count a request as failed after so long.", type=finite
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions(FromArguments):
    """What each request asks for; what is not given is left to the server."""

    temperature: float = _option(0.0, "0 is greedy.", type=float)
    top_p: float | None = _option(None, "Nucleus sampling.", type=float)
    top_k: int | None = _option(None, "Top-k sampling.", type=int)
    min_p: float | None = _option(None, "Least share of the likeliest token.", type=float)
    presence_penalty: float | None = _option(None, "See the API.", type=float)
    frequency_penalty: float | None = _option(None, "See the API.", type=float)
    repetition_penalty: float | None = _option(None, "See the API.", type=float)
    logprobs: int | None = _option(None, "Log-probabilities per token.", type=int)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(FromArguments):
    """When requests are sent."""

    seed: int | None = _option(
        None, "Of prompts and arrivals; default 0, or a baseline workload's own.", type=int
    )
    ignore_eos: bool = _option(
        False, "Generate all tokens whatever the model says; implied for random prompts."
    )
    request_rate: float = _option(
        math.inf, "Requests per second; inf sends all at once.", type=positive
    )
    burstiness: float = _option(
        1.0, "Shape of the gamma-distributed gaps: 1 is Poisson, more is steadier.", type=finite
    )
    max_concurrency: int | None = _option(None, "Requests in flight at most.", type=count)
    ramp_up_strategy: str | None = _option(
        None, "Grow the request rate over the run.", choices=("linear", "exponential")
    )
    ramp_up_start_rps: float | None = _option(None, "Rate at the start.", type=finite)
    ramp_up_end_rps: float | None = _option(None, "Rate at the end.", type=finite)
    num_warmups: int = _option(0, "Requests sent before, and not counted.", type=int)


@dataclass(frozen=True, kw_only=True)
class ReportOptions(FromArguments):
    """What is reported, and where."""

    goodput: Sequence[tuple[str, float]] = _option(
        (),
        "Goals in milliseconds, as ttft:200 tpot:50 e2el:5000; counts requests that meet all.",
        type=goal,
        nargs="+",
        metavar="METRIC:MS",
    )
    percentile_metrics: tuple[str, ...] = _option(
        METRICS, "Metrics to report, out of ttft,tpot,itl,e2el; default all.", type=metric_names
    )
    metric_percentiles: tuple[float, ...] = _option(
        (50.0, 90.0, 99.0), "Percentiles to report; default 50,90,99.", type=percentiles
    )
    save_result: bool = _option(False, "Write the results as JSON.")
    save_detailed: bool = _option(False, "Write each request's numbers and text too.")
    append_result: bool = _option(False, "Append a line to the file instead of replacing it.")
    result_dir: str = _option(".", "Folder of the result file.")
    result_filename: str | None = _option(
        None, "Its name; default made of label, rate, concurrency, model and date."
    )
    metadata: Sequence[tuple[str, str]] = _option(
        (), "Entries to add to the JSON.", type=key_value, nargs="*", metavar="KEY=VALUE"
    )
    label: str | None = _option(None, "Name of the run; default the backend.")
    disable_tqdm: bool = _option(False, "No progress bar.")
