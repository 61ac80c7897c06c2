"""What the benchmarks can be told: each flag declared once, with its default and its help."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from paged.runtime.bench.baselines import BASELINES
from paged.runtime.flags import json_object, number, option, port, same_option, size

GENERATED = ("random", "lognormal", "prefix_repetition", "prefix_tree", "baseline")
FROM_FILES = ("sharegpt", "custom", "log")
METRICS = ("ttft", "tpot", "itl", "e2el")
SchedulingPolicy = Literal["fcfs", "priority", "lanes"]
POLICIES: tuple[SchedulingPolicy, ...] = get_args(SchedulingPolicy)
BACKENDS = ("openai", "vllm", "openai-chat")
# Of anything that is counted, tokens of a step and a prompt among them. More is a slip of the
# finger, which would take all memory.
MOST = 2**24
_LARGEST = 1e9  # of what is not counted; its products stay finite
_GOAL = re.compile(r"(?P<name>ttft|tpot|e2el)[:=](?P<number>\d*\.?\d+)(?P<unit>ms|s|)")
_AS_GOALS = "as ttft:200 tpot:50 (milliseconds) or ttft=200ms,e2el=5s"


def count(text: str) -> int:
    """A number of things, from 1 to `MOST`."""
    value = size(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return _not_too_many(value)


def whole(text: str) -> int:
    """A number of things, perhaps none."""
    value = size(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return _not_too_many(value)


def _not_too_many(value: int) -> int:
    if value > MOST:
        raise argparse.ArgumentTypeError(f"must be at most {MOST:,}, got {value:,}")
    return value


def seed(text: str) -> int:
    """Of a random generator: 64 bits, not below 0."""
    value = size(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {value}")
    return value


def positive(text: str) -> float:
    """A number above 0; `inf` is one."""
    value = math.inf if text == "inf" else number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def at_least_0(text: str) -> float:
    """A number that can be reckoned with, perhaps 0."""
    value = number(text)
    if not 0 <= value <= _LARGEST:
        raise argparse.ArgumentTypeError(f"must be at least 0 and at most {_LARGEST:g}, got {text}")
    return value


def finite(text: str) -> float:
    """A number above 0 that can be reckoned with: a rate, seconds, a factor."""
    value = positive(text)
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {_LARGEST:g}, got {text}")
    return value


def percentiles(text: str) -> tuple[float, ...]:
    """Comma-separated numbers from 0 to 100."""
    values = tuple(number(part) for part in text.split(","))
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


def goals(text: str) -> tuple[tuple[str, float], ...]:
    """Limits of a request's times in milliseconds: `ttft:500`, or `ttft=500ms,e2el=5s`."""
    return tuple(map(_goal, text.split(",")))


def _goal(text: str) -> tuple[str, float]:
    match = _GOAL.fullmatch(text.strip())
    limit = float(match["number"]) * (1000 if match["unit"] == "s" else 1) if match else 0.0
    if not match or not 0 < limit <= _LARGEST:
        raise argparse.ArgumentTypeError(
            f"must be limits above 0 and at most {_LARGEST:g} ms of ttft, tpot or e2el such as "
            f"ttft:500 (milliseconds) or ttft=500ms,e2el=5s, got {text!r}"
        )
    return match["name"], limit


class KeepGoals(argparse.Action):
    """The goals of all arguments as one tuple of pairs."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        pairs = dict(pair for argument in values for pair in argument)
        setattr(namespace, self.dest, tuple(pairs.items()))


def goals_option(help: str, *, also: tuple[str, ...] = ()) -> Any:
    """A field for the goals of each request: pairs of a time's name and milliseconds."""
    return option(
        (),
        f"Goals of each request, {_AS_GOALS}: {help}",
        also=also,
        type=goals,
        action=KeepGoals,
        nargs="+",
        metavar="GOAL",
    )


def path(text: str) -> str:
    """The part of a URL after the host."""
    if not text.startswith("/") or not text.isprintable() or " " in text:
        raise argparse.ArgumentTypeError(f"must begin with / and have no spaces, got {text!r}")
    return text


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Where the results of any benchmark go, beside the terminal."""

    output_json: str | None = option(
        None, "Write the results to this file, which --compare reads, and scripts."
    )
    html: str | None = option(
        None, "Write a report with plots to this file: one page that needs nothing else."
    )
    label: str | None = option(None, "Name of the run, in reports and comparisons.")
    disable_tqdm: bool = option(False, "No progress bar.")


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """Which requests are sent."""

    dataset_name: str = option(
        "random",
        "Where prompts come from: random token ids of fixed lengths, of chat-like (lognormal) "
        "lengths, with repeated prefixes or a tree of them, or a named baseline; or a file of "
        "ShareGPT's, of JSON lines, or of a server's log.",
        choices=(*GENERATED, *FROM_FILES),
    )
    dataset_path: str | None = option(None, "File of the sharegpt, custom or log dataset.")
    workload: str | None = option(
        None, "Name of the baseline workload.", choices=tuple(sorted(BASELINES))
    )
    num_prompts: int | None = option(
        None,
        "Requests; default 1000, or all of a baseline workload or a custom or log file.",
        type=count,
    )
    input_len: int | None = option(
        None, "Prompt tokens of random requests; same as --random-input-len.", type=count
    )
    output_len: int | None = option(
        None, "Tokens to generate, of random requests or for every prompt of a file.", type=count
    )
    random_input_len: int = option(1024, "Prompt tokens of random requests.", type=count)
    random_output_len: int = option(128, "Tokens to generate of random requests.", type=count)
    random_range_ratio: float = option(
        0.0, "Draw random lengths from (1 - ratio) to (1 + ratio) times the given.", type=number
    )
    random_prefix_len: int = option(
        0, "Tokens that all random prompts share, on top of their length.", type=whole
    )
    lognormal_input_mean: float = option(220.0, "Mean prompt tokens.", type=finite)
    lognormal_output_mean: float = option(200.0, "Mean tokens to generate.", type=finite)
    lognormal_sigma: float = option(1.0, "Standard deviation of log lengths.", type=at_least_0)
    lognormal_max_len: int = option(1024, "Longest prompt and output.", type=count)
    prefix_repetition_num_prefixes: int = option(10, "Different prefixes.", type=count)
    prefix_repetition_prefix_len: int = option(256, "Tokens of a prefix.", type=count)
    prefix_repetition_suffix_len: int = option(256, "Tokens after the prefix.", type=count)
    prefix_repetition_output_len: int = option(128, "Tokens to generate.", type=count)
    prefix_tree_depth: int = option(
        3, "Levels of a tree of prefixes, such as instructions, a document, a talk.", type=count
    )
    prefix_tree_branching: int = option(3, "Ways that each of them goes on.", type=count)
    prefix_tree_level_len: int = option(128, "Tokens of a level.", type=count)
    prefix_tree_suffix_len: int = option(64, "Tokens after the last of them.", type=count)
    prefix_tree_output_len: int = option(64, "Tokens to generate.", type=count)

    @property
    def generated(self) -> bool:
        """Prompts are random ids, so that an end-of-sequence token means nothing."""
        return self.dataset_name in GENERATED


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(OutputOptions):
    """How an offline run goes."""

    n: int = option(1, "Sequences of each prompt; sampled at temperature 1 if above 1.", type=count)
    async_engine: bool = option(False, "Send everything through AsyncEngine instead of LLM.")
    disable_detokenize: bool = option(False, "Leave the output as token ids.")


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(OutputOptions):
    """One batch, over and over."""

    input_len: int = option(32, "Tokens of each prompt.", type=count)
    output_len: int = option(128, "Tokens to generate for each.", type=count)
    batch_size: int = option(8, "Prompts in the batch.", type=count)
    n: int = option(1, "Sequences of each prompt; sampled at temperature 1 if above 1.", type=count)
    num_iters_warmup: int = option(10, "Runs that are not counted.", type=whole)
    num_iters: int = option(30, "Runs that are.", type=count)
    disable_detokenize: bool = option(False, "Leave the output as token ids.")


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Some steps of a batch, kernel by kernel."""

    phase: Literal["decode", "prefill"] = option("decode", "Which steps are recorded.")
    batch_size: int = option(8, "Prompts in the batch.", type=count)
    input_len: int = option(128, "Tokens of each prompt.", type=count)
    num_steps: int = option(16, "Steps to record; a prefill takes as many as it needs.", type=count)
    top: int = option(25, "Kernels to print.", type=count)
    trace_dir: str | None = option(
        None, "Keep the trace in this folder, for Perfetto or XProf; default it is thrown away."
    )
    output_json: str | None = option(None, "Write the results to this file.")
    disable_tqdm: bool = same_option(OutputOptions, "disable_tqdm")


@dataclass(frozen=True, kw_only=True)
class StepOptions(OutputOptions):
    """Every compiled step by itself."""

    contexts: Sequence[int] = option(
        (0, 128, 512, 2048, 8192),
        "Tokens before those of the step, in each of its rows; those that do not fit are left out "
        "(default: 0 128 512 2048 8192).",
        type=whole,
        nargs="+",
        metavar="TOKENS",
    )
    buckets: Sequence[str] = option(
        (), "Only these steps, such as decode_8 mixed_256.", type=str, nargs="+", metavar="NAME"
    )
    num_iters: int = option(10, "Runs of each step, of which the median counts.", type=count)
    seconds: float = option(
        2.0, "End the runs of a step early when they have taken so long.", type=finite
    )


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Which server, and how it is spoken to."""

    backend: str = option("openai", "API: completions, or chat completions.", choices=BACKENDS)
    base_url: str | None = option(None, "Server, as http://host:port; overrides host and port.")
    host: str = option("127.0.0.1", "Server's name or address.")
    port: int = option(8000, "Server's port.", type=port, metavar="PORT")
    endpoint: str | None = option(
        None,
        "Path; default /v1/completions, for openai-chat /v1/chat/completions.",
        type=path,
        metavar="PATH",
    )
    model: str | None = option(None, "Model to ask for; default the server's first.")
    served_model_name: str | None = option(
        None, "Name to ask for, where the server calls the model differently."
    )
    tokenizer: str | None = option(
        None,
        "Folder, GGUF file or hub id of the tokenizer, for texts and the vocabulary's size; "
        "default --model if that is a local path.",
    )
    skip_tokenizer_init: bool = option(
        False,
        "The server streams token ids, not text; take only the vocabulary's size from there.",
    )
    header: Sequence[tuple[str, str]] = option(
        (), "Headers to send, as KEY=VALUE.", type=key_value, nargs="*", metavar="KEY=VALUE"
    )
    extra_body: Mapping[str, Any] | None = option(
        None, "JSON object that is added to every request.", type=json_object, metavar="JSON"
    )
    insecure: bool = option(False, "Do not check the server's certificate.")
    ready_check_timeout_sec: float = option(
        600.0, "Wait so long for a first answer; 0 does not try.", type=at_least_0
    )
    request_timeout_sec: float = option(
        1800.0, "Count a request as failed after so long.", type=finite
    )


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """What each request asks for; what is not given is left to the server."""

    temperature: float = option(0.0, "0 is greedy.", type=number)
    top_p: float | None = option(None, "Nucleus sampling.", type=number)
    top_k: int | None = option(None, "Top-k sampling.", type=size)
    min_p: float | None = option(None, "Least share of the likeliest token.", type=number)
    presence_penalty: float | None = option(None, "See the API.", type=number)
    frequency_penalty: float | None = option(None, "See the API.", type=number)
    repetition_penalty: float | None = option(None, "See the API.", type=number)
    logprobs: int | None = option(None, "Log-probabilities per token.", type=size)


@dataclass(frozen=True, kw_only=True)
class ArrivalOptions:
    """When requests come."""

    request_rate: float = option(
        math.inf, "Requests per second; inf sends all at once.", type=positive
    )
    burstiness: float = option(
        1.0, "Shape of the gamma-distributed gaps: 1 is Poisson, more is steadier.", type=finite
    )
    max_concurrency: int | None = option(None, "Requests in flight at most.", type=count)
    ramp_up_strategy: str | None = option(
        None, "Grow the request rate over the run.", choices=("linear", "exponential")
    )
    ramp_up_start_rps: float | None = option(None, "Rate at the start.", type=finite)
    ramp_up_end_rps: float | None = option(None, "Rate at the end.", type=finite)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(ArrivalOptions):
    """When requests are sent to a server."""

    seed: int | None = option(
        None, "Of prompts and arrivals; default 0, or a baseline workload's own.", type=seed
    )
    ignore_eos: bool = option(
        False, "Generate all tokens whatever the model says; implied for random prompts."
    )
    concurrency_ramp: Sequence[int] = option(
        (),
        "Share the requests out among stages that keep so many in flight, one after the other, "
        "each reported by itself.",
        type=count,
        nargs="+",
        metavar="REQUESTS",
    )
    num_warmups: int = option(0, "Requests sent before, and not counted.", type=whole)


@dataclass(frozen=True, kw_only=True)
class GoalOptions:
    """What counts as well served."""

    goodput: Sequence[tuple[str, float]] = goals_option("those that meet all are counted.")


@dataclass(frozen=True, kw_only=True)
class EngineLoadOptions(OutputOptions, GoalOptions):
    """A load on an engine in this process."""

    num_warmups: int = option(4, "Requests sent before, and not counted.", type=whole)


@dataclass(frozen=True, kw_only=True)
class PrefixOptions(EngineLoadOptions, ArrivalOptions):
    """A workload that shares prefixes, without and with a prefix cache."""


@dataclass(frozen=True, kw_only=True)
class MixedOptions(EngineLoadOptions):
    """Short requests among long ones."""

    num_short: int = option(64, "Short requests.", type=count)
    num_long: int = option(8, "Long requests.", type=count)
    short_input_len: int = option(128, "Prompt tokens of short requests.", type=count)
    short_output_len: int = option(32, "Tokens to generate for short requests.", type=count)
    long_input_len: int = option(4000, "Prompt tokens of long requests.", type=count)
    long_output_len: int = option(32, "Tokens to generate for long requests.", type=count)
    arrival_seconds: float = option(
        10.0, "All come at random moments of so many seconds; 0 is all at once.", type=at_least_0
    )
    policies: Sequence[SchedulingPolicy] = option(
        POLICIES, "Scheduling policies to try.", choices=POLICIES, nargs="+", metavar="POLICY"
    )


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OutputOptions, GoalOptions):
    """What is reported, and where."""

    percentile_metrics: tuple[str, ...] = option(
        METRICS, "Metrics to report, out of ttft,tpot,itl,e2el; default all.", type=metric_names
    )
    metric_percentiles: tuple[float, ...] = option(
        (50.0, 90.0, 95.0, 99.0),
        "Percentiles to report; default 50,90,95,99.",
        type=percentiles,
    )
    save_result: bool = option(False, "Write the results as JSON.")
    save_detailed: bool = option(False, "Write each request's numbers and text too.")
    append_result: bool = option(False, "Append a line to the file instead of replacing it.")
    result_dir: str = option(".", "Folder of the result file.")
    result_filename: str | None = option(
        None, "Its name; default made of label, rate, concurrency, model and date."
    )
    metadata: Sequence[tuple[str, str]] = option(
        (), "Entries to add to the JSON.", type=key_value, nargs="*", metavar="KEY=VALUE"
    )
