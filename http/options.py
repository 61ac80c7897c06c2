"""Flags of the commands, beside the engine's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paged.http.api.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import option, port, same_option

_LONGEST_SHUTDOWN = 24 * 60 * 60


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What `paged serve` is told about the door rather than the engine."""

    host: str = option("0.0.0.0", "Address to listen on; 127.0.0.1 for this machine only.")
    port: int = option(8000, "Port to listen on; 0 for any free one.", type=port, metavar="PORT")
    served_model_name: tuple[str, ...] = option(
        (), "Names that requests may use, replies carrying the first; default the model's."
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, any of which a request must bring; default that in PAGED_API_KEY, "
        "without which everyone is admitted.",
    )
    chat_template: str | None = option(
        None, "Chat template in place of the model's: a file, or the template itself."
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own, a program that this server runs."
    )
    allowed_origins: tuple[str, ...] = option(
        ("*",), "Sites whose pages may call this server from a browser; * for all."
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP verbs that such pages may use.")
    allowed_headers: tuple[str, ...] = option(("*",), "HTTP headers that such pages may send.")
    allow_credentials: bool = option(False, "Let such pages send cookies.")
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
    engine_process: bool = option(
        True, "Run device and scheduler in a process of their own, which streams do not slow."
    )
    api_server_count: int = option(
        1,
        "Processes that speak HTTP and share the engine: one streams to some 200 clients without "
        "delay, and each needs a core.",
    )
    max_body_size: int = option(32 * 2**20, "Bytes of a request body at most.")
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get to finish when the server is stopped."
    )
    uvicorn_log_level: Literal["critical", "error", "warning", "info", "debug"] = option(
        "info", "Least level that is logged."
    )
    enable_log_requests: bool = option(False, "Log each request's parameters, never its prompt.")
    disable_log_stats: bool = option(False, "Do not log statistics every 10 seconds.")
    disable_uvicorn_access_log: bool = option(False, "Do not log each HTTP request.")
    disable_access_log_for_endpoints: str | None = option(
        None, "Paths that the log of HTTP requests leaves out, as /health,/metrics."
    )

    def __post_init__(self) -> None:
        self._check_parsers()
        if not 0 <= self.shutdown_timeout <= _LONGEST_SHUTDOWN:
            raise ConfigError(
                f"--shutdown-timeout must be between 0 and {_LONGEST_SHUTDOWN} seconds, "
                f"got {self.shutdown_timeout}"
            )
        if self.api_server_count < 1:
            raise ConfigError(f"--api-server-count must be at least 1, got {self.api_server_count}")
        if self.api_server_count > 1 and not self.engine_process:
            raise ConfigError(
                f"--api-server-count {self.api_server_count} needs an engine process that they can "
                "share: leave out --no-engine-process"
            )
        if self.max_body_size < 1:
            raise ConfigError(f"--max-body-size must be at least 1, got {self.max_body_size}")
        for name in ("served_model_name", "api_key"):
            if "" in getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} must not be empty")

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
    revision: str | None = same_option(EngineConfig, "revision")
    download_dir: str | None = same_option(EngineConfig, "download_dir")
