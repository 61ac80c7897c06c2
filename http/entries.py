"""The models of a server as flags and files describe them, before any is loaded."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from paged.http.api.answers import AnswerFormat
from paged.http.api.defaults import RequestDefaults
from paged.http.options import ModelOptions
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags

DEMO_MODEL_NAME = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Entry:
    """A model to serve.

    Attributes:
        config: for its engine.
        names: that requests may use; the first is what it is called everywhere else.
        chat_template: the text of one, in place of the model's own.
        trust_request_chat_template: whether requests may bring one.
        answers: how they are read.
        defaults: what requests leave open.
        role: that chat replies carry.
        share: of the device's memory as it was stated; None where it was not.
    """

    config: EngineConfig
    names: tuple[str, ...]
    chat_template: str | None
    trust_request_chat_template: bool
    answers: AnswerFormat
    defaults: RequestDefaults
    role: str
    share: float | None

    @property
    def name(self) -> str:
        return self.names[0]


def read_entries(args: argparse.Namespace) -> list[Entry]:
    """The models that a command line names: one, or those of a list in its file.

    Raises:
        ConfigError: a value out of its range, or a name that is that of two models.
    """
    entries = [_read_entry(each) for each in args.models or [args]]
    counts = Counter(name for entry in entries for name in set(entry.names))
    for name, count in counts.items():
        if count > 1:
            raise ConfigError(
                f"{count} models are called {name!r}: give each a served-model-name of its own"
            )
    return entries


def _read_entry(args: argparse.Namespace) -> Entry:
    options = read_flags(ModelOptions, args)
    share: float | None = args.gpu_memory_utilization
    if share is None:
        default = EngineConfig.gpu_memory_utilization
        args = argparse.Namespace(**vars(args) | {"gpu_memory_utilization": default})
    config = read_flags(EngineConfig, args)
    return Entry(
        config=config,
        names=options.served_model_name or (config.model or DEMO_MODEL_NAME,),
        chat_template=chat_template(options),
        trust_request_chat_template=options.trust_request_chat_template,
        answers=_answer_format(options),
        defaults=_defaults(options),
        role=options.response_role,
        share=share,
    )


def chat_template(options: ModelOptions) -> str | None:
    """The template's text, given itself or as the name of a file."""
    given = options.chat_template
    if given is None or "{" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {given}: neither a file that can be read "
            f"({getattr(error, 'strerror', error)}) nor a template, which would have a {{ in it"
        ) from error


def _answer_format(options: ModelOptions) -> AnswerFormat:
    return AnswerFormat(
        tool_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        auto=options.enable_auto_tool_choice,
        hides_tools=options.exclude_tools_when_tool_choice_none,
    )


def _defaults(options: ModelOptions) -> RequestDefaults:
    return RequestDefaults(
        tokens_as_ids=options.return_tokens_as_token_ids,
        include_usage=options.enable_force_include_usage,
        chat_template_kwargs=options.default_chat_template_kwargs or {},
    )
