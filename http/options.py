"""Flags of the commands, beside the engine's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from paged.http.api.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from paged.runtime.config import LONGEST_TIMEOUT, EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import json_object, option, port, same_option

# Flags of vLLM for what is always there: the next step enqueued before the last is read, cached
# tokens in the usage, X-Request-Id, /load, a prompt that waits until all its pages fit.
ALWAYS_ON = (
    *("--async-scheduling", "--enable-prompt-tokens-details", "--enable-request-id-headers"),
    *("--enable-server-load-tracking", "--scheduler-reserve-full-isl"),
)
_LONGEST_TIME = 24 * 60 * 60
_MOST_RESTARTS = 1000


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `paged serve` is told about the door rather than its models."""

    host: str = option("0.0.0.0", "Address to listen on; 127.0.0.1 for this machine only.")
    port: int = option(8000, "Port to listen on; 0 for any free one.", type=port, metavar="PORT")
    uds: str | None = option(None, "Unix socket to listen on, in place of a host and port.")
    root_path: str = option(
        "", "Path under which a proxy offers this server, and which it takes off: /models."
    )
    ssl_keyfile: str | None = option(None, "Private key for HTTPS, unless --ssl-certfile holds it.")
    ssl_certfile: str | None = option(None, "Certificates for HTTPS; without, HTTP is spoken.")
    ssl_ca_certs: str | None = option(
        None, "Authorities, one of which must vouch for each client's certificate."
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, any of which a request must bring; default that in PAGED_API_KEY (or VLLM_API_KEY), "
        "without which everyone is admitted.",
        begins="access",
    )
    admin_api_key: tuple[str, ...] = option(
        (), "Keys, any of which /debug/state must be asked with; without, it is not there."
    )
    api_keys_file: str | None = option(
        None,
        "File of more keys, as JSON lines or YAML, each with its name and limits; `paged hash-key` "
        "makes an entry. It is read again when it changes, and on SIGHUP.",
        metavar="FILE",
    )
    metrics_need_key: bool = option(False, "Ask for a key at /metrics, too.")
    enable_tokenizer_info_endpoint: bool = option(
        False, "Tell special tokens and chat template at /tokenizer_info."
    )
    allowed_origins: tuple[str, ...] = option(
        ("*",), "Sites whose pages may call this server from a browser; * for all."
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP verbs that such pages may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "HTTP headers that such pages may send.")
    allow_credentials: bool = option(False, "Let such pages send cookies.")
    engine_process: bool = option(
        True,
        "Run device and scheduler in a process of their own, which streams do not slow.",
        begins="processes",
    )
    headless: bool = option(
        False, "Answer no HTTP, and compute with rank 0 of --nnodes: for every other --node-rank."
    )
    api_server_count: int = option(
        1,
        "Processes that speak HTTP and share the engine: one streams to some 200 clients without "
        "delay, and each needs a core.",
    )
    max_body_size: int = option(32 * 2**20, "Bytes of a request body at most.", begins="limits")
    default_timeout: float | None = option(
        None,
        "Seconds that a request may take which names no timeout itself. Default no limit.",
        metavar="SECONDS",
    )
    timeout_keep_alive: int = option(
        75,
        "Seconds that a connection may be idle: longer than clients and proxies keep theirs, for "
        "the one who closes first must not be the server.",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get to finish when the server is stopped."
    )
    step_timeout: float = option(
        120.0,
        "Seconds that a step may take, five times as many for the first ones: then the engine "
        "process is ended and another one started. /health says so after a quarter of them.",
    )
    max_engine_restarts: int = option(
        3,
        "How many times in ten minutes an engine process that died is replaced; after that, or "
        "with 0 at the first death, the server leaves with exit status 1.",
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = option(
        "info", "Least level that is logged.", begins="logging"
    )
    log_format: Literal["text", "json"] = option(
        "text", "How log lines look: text, or a JSON object each."
    )
    enable_log_requests: bool = option(
        False, "Log a line for each request: its ids, lengths, times and why it ended."
    )
    enable_log_outputs: bool = option(
        False, "Show in that line what the model wrote; needs --enable-log-requests."
    )
    max_log_len: int | None = option(
        None,
        "Characters of prompts, and of outputs if they are logged, that the line shows; without, "
        "no prompt is shown.",
    )
    otlp_traces_endpoint: str | None = option(
        None, "Collector that gets a span of each request: http://host:4317. Needs the extra otel."
    )
    disable_log_stats: bool = option(False, "Do not log statistics every 10 seconds.")
    disable_uvicorn_access_log: bool = option(False, "Do not log each HTTP request.")
    disable_access_log_for_endpoints: str | None = option(
        None, "Paths that the log of HTTP requests leaves out, as /health,/metrics."
    )

    def __post_init__(self) -> None:
        _check_times(self)
        if not 0 <= self.max_engine_restarts <= _MOST_RESTARTS:
            raise ConfigError(
                f"--max-engine-restarts must be between 0 and {_MOST_RESTARTS}, "
                f"got {self.max_engine_restarts}"
            )
        if self.api_server_count < 1:
            raise ConfigError(f"--api-server-count must be at least 1, got {self.api_server_count}")
        if self.api_server_count > 1 and not self.engine_process:
            raise ConfigError(
                f"--api-server-count {self.api_server_count} needs an engine process that they can "
                "share: leave out --no-engine-process"
            )
        if self.enable_log_outputs and not self.enable_log_requests:
            raise ConfigError("--enable-log-outputs needs --enable-log-requests")
        if self.max_log_len is not None and self.max_log_len < 0:
            raise ConfigError(f"--max-log-len must be at least 0, got {self.max_log_len}")
        if self.max_body_size < 1:
            raise ConfigError(f"--max-body-size must be at least 1, got {self.max_body_size}")
        if self.root_path and not re.fullmatch(r"(/[^/?#\s]+)+", self.root_path):
            raise ConfigError(f"--root-path must be like /models, got {self.root_path!r}")
        if not self.ssl_certfile and (self.ssl_keyfile or self.ssl_ca_certs):
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        _check_none_empty("--api-key", self.api_key)
        _check_none_empty("--admin-api-key", self.admin_api_key)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What `paged serve` is told about a model's names and answers."""

    served_model_name: tuple[str, ...] = option(
        (), "Names that requests may use, replies carrying the first; default the model's."
    )
    chat_template: str | None = option(
        None, "Chat template in place of the model's: a file, or the template itself."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own, a program that this server runs."
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        "Names that the chat template reads, as JSON; a request's own go before them.",
        type=json_object,
        metavar="JSON",
    )
    response_role: str = option("assistant", "Role that chat replies carry.")
    return_tokens_as_token_ids: bool = option(
        False, "Write token_id:7 beside log-probabilities unless a request wants text."
    )
    enable_force_include_usage: bool = option(
        False, "End each stream with its usage, asked for or not."
    )
    enable_auto_tool_choice: bool = option(
        False, "Let the model call the tools of a request; needs --tool-call-parser."
    )
    tool_call_parser: str | None = option(
        None, f"How the model writes tool calls: {', '.join(TOOL_PARSERS)}."
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False, 'Do not tell the model of tools where tool_choice is "none".'
    )
    reasoning_parser: str | None = option(
        None,
        "How the model marks its reasoning, which is kept out of the answer's content: "
        f"{', '.join(REASONING_PARSERS)}.",
    )

    def __post_init__(self) -> None:
        _check_none_empty("--served-model-name", self.served_model_name)
        self._check_parsers()

    def _check_parsers(self) -> None:
        if self.enable_auto_tool_choice and self.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice requires --tool-call-parser, one of "
                + ", ".join(TOOL_PARSERS)
            )
        known = {"tool_call_parser": TOOL_PARSERS, "reasoning_parser": REASONING_PARSERS}
        for name, parsers in known.items():
            if (given := getattr(self, name)) not in (None, *parsers):
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be one of {', '.join(parsers)}, got {given!r}")


def _check_times(options: ServeOptions) -> None:
    if not 0 <= options.shutdown_timeout <= _LONGEST_TIME:
        raise ConfigError(
            f"--shutdown-timeout must be between 0 and {_LONGEST_TIME} seconds, "
            f"got {options.shutdown_timeout}"
        )
    if not 1 <= options.timeout_keep_alive <= _LONGEST_TIME:
        raise ConfigError(
            f"--timeout-keep-alive must be between 1 and {_LONGEST_TIME} seconds, "
            f"got {options.timeout_keep_alive}"
        )
    if not 0 < options.step_timeout <= _LONGEST_TIME:
        raise ConfigError(
            f"--step-timeout must be above 0 and at most {_LONGEST_TIME} seconds, "
            f"got {options.step_timeout}"
        )
    if options.default_timeout is not None and not 0 < options.default_timeout <= LONGEST_TIMEOUT:
        raise ConfigError(
            f"--default-timeout must be above 0 and at most {LONGEST_TIMEOUT} seconds, "
            f"got {options.default_timeout}"
        )


def _check_none_empty(flag: str, values: tuple[str, ...]) -> None:
    if "" in values:
        raise ConfigError(f"{flag} must not be empty")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How `paged generate` and `paged chat` choose tokens; the default is what the model says."""

    max_tokens: int | None = option(None, "Tokens to generate at most.")
    temperature: float | None = option(None, "0 for the most likely token every time.")
    top_p: float | None = option(None, "Keep the likeliest tokens up to this probability.")
    top_k: int | None = option(None, "Keep this many of the likeliest tokens.")
    min_p: float | None = option(None, "Drop tokens below this share of the likeliest one.")
    repetition_penalty: float | None = option(None, "Above 1 to repeat less.")
    stop: tuple[str, ...] = option((), "Texts that end the answer.")


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How `paged convert` finds the model and writes it."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "Element type of the weights in the folder; auto is the checkpoint's."
    )
    quantization: Literal["fp8", "int8", "int4", "gguf"] | None = same_option(
        EngineConfig, "quantization"
    )
    quantization_exclude: tuple[str, ...] = same_option(EngineConfig, "quantization_exclude")
    revision: str | None = same_option(EngineConfig, "revision")
    download_dir: str | None = same_option(EngineConfig, "download_dir")


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """How `paged doctor` tells what it found."""

    json: bool = option(False, "Print what was found as JSON.")


@dataclass(frozen=True, kw_only=True)
class HashKeyOptions:
    """What `paged hash-key` writes into an entry of `--api-keys-file`."""

    name: str = option("", "Of whoever has the key; limits are counted by it.", required=True)
    max_concurrent: int | None = option(None, "Requests that may run at once.")
    tokens_per_minute: int | None = option(None, "Tokens of prompts and outputs, by the minute.")
    admin: bool = option(False, "Whether the key is good for what is for admins, too.")
    stdin: bool = option(False, "Read the key from standard input instead of making one.")
