"""The model: its folder, its files, its tokenizer and chat template, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from paged.models.chat_template import ChatTemplateError
from paged.models.loading import CheckpointError, ModelNotFoundError, ModelSource
from paged.models.tokenizer import Tokenizer, TokenizerError
from paged.runtime.config import EngineConfig
from paged.runtime.doctor.finding import Finding, ok, warning, wrong
from paged.runtime.doctor.gpus import Card
from paged.runtime.engine import find_model, load_tokenizer
from paged.runtime.errors import ConfigError
from paged.runtime.memory import check_length
from paged.runtime.planning.gpus import find_gpu
from paged.runtime.planning.planner import (
    NOT_FETCHED,
    Workload,
    local_model,
    plan_for,
    without_the_hub,
)
from paged.runtime.pooling.setup import runs_pooling

_WEIGHTS = "*.safetensors"
_TEMPLATES = "docs/failures.md#other-answers-than-transformers"


def check_model(
    config: EngineConfig, template: str | None, cards: Sequence[Card]
) -> Iterator[Finding]:
    """All about the model that a server would be started with; nothing is fetched.

    Args:
        template: for chats, in place of the model's own.
    """
    try:
        source = local_model(config)
    except ModelNotFoundError as error:
        yield _not_found(config, error)
        return
    except (CheckpointError, ConfigError) as error:
        remedy = "Fetch damaged files again; docs/models.md lists the families that are supported."
        yield wrong("model", str(error), remedy)
        return
    yield ok("model", f"{source.name}: {source.config.architecture}")
    makes_text = not runs_pooling(config, source)
    yield from _check_weights(config, source)
    if not config.skip_tokenizer_init:
        yield from _check_tokenizer(config, source, template, chats=makes_text)
    try:
        check_length(config.max_model_len or 0, source.config.context_length)
    except ConfigError as error:
        yield wrong("length", str(error), "Lower it, or take a model of longer texts.")
        return
    if makes_text:
        yield from _check_fit(config, cards)


def _not_found(config: EngineConfig, error: ModelNotFoundError) -> Finding:
    if NOT_FETCHED not in str(error):
        return wrong("model", str(error), "Name a folder with a config.json, or a hub id.")
    return warning(
        "model",
        f"{config.model} is not in the hub's cache, so that nothing of it could be looked at",
        _fetch(config),
    )


def _fetch(config: EngineConfig) -> str:
    return f"The first start fetches it; `hf download {config.model}` does so now."


def _check_weights(config: EngineConfig, source: ModelSource) -> Iterator[Finding]:
    if config.load_format == "dummy":
        yield ok("weights", "random ones, as --load-format dummy says")
        return
    try:
        with without_the_hub():
            find_model(config).open()
    except (CheckpointError, ConfigError, ModelNotFoundError) as error:
        if _is_to_be_fetched(config, source):
            yield warning("weights", "they are not in the hub's cache yet", _fetch(config))
            return
        yield wrong(
            "weights",
            str(error),
            "Fetch the files again; --load-format dummy does without them, for tests.",
        )
        return
    yield ok("weights", f"the files of {source.name} are all there")


def _is_to_be_fetched(config: EngineConfig, source: ModelSource) -> bool:
    """Whether a model is the hub's, of which only what describes it is here."""
    is_here = config.model is None or Path(config.model).expanduser().exists()
    return not is_here and source.folder is not None and not any(source.folder.glob(_WEIGHTS))


def _check_tokenizer(
    config: EngineConfig, source: ModelSource, template: str | None, *, chats: bool
) -> Iterator[Finding]:
    try:
        with without_the_hub():
            tokenizer = load_tokenizer(config, source)
    except (TokenizerError, ModelNotFoundError) as error:
        yield wrong(
            "tokenizer",
            str(error),
            "Fetch tokenizer.json, name another with --tokenizer, or take token ids alone with "
            "--skip-tokenizer-init.",
        )
        return
    yield ok("tokenizer", f"{tokenizer.vocab_size:,} tokens")
    if chats:
        yield from _check_chat(tokenizer, source, template)


def _check_chat(
    tokenizer: Tokenizer, source: ModelSource, template: str | None
) -> Iterator[Finding]:
    if not tokenizer.eos_token_ids | source.eos_token_ids:
        yield warning(
            "end of answers",
            "no token ends one: each goes on until max_tokens",
            "Add eos_token_id to generation_config.json, or send stop_token_ids.",
        )
    hello = [{"role": "user", "content": "Hello"}]
    try:
        text = tokenizer.apply_chat_template(hello, chat_template=template)
    except ChatTemplateError as error:
        yield warning(
            "chat template",
            str(error),
            f"Send plain prompts to /v1/completions, or give --chat-template. See {_TEMPLATES}.",
        )
        return
    yield ok("chat template", f"'Hello' becomes {text[-60:]!r}")


def _check_fit(config: EngineConfig, cards: Sequence[Card]) -> Iterator[Finding]:
    """What `paged plan` says, for a GPU that it knows."""
    if not cards:
        return
    try:
        gpu = find_gpu(cards[0].name)
    except ConfigError:
        yield ok("memory", f"{cards[0].name} is not among the GPUs that can be planned for")
        return
    try:
        plan = plan_for(replace(config, load_format="dummy"), gpu, Workload())
    except ConfigError as error:
        yield wrong("memory", str(error), "`paged plan` with the same flags tells what would fit.")
        return
    yield ok(
        "memory",
        f"about {plan.kv_cache_tokens:,} tokens fit in the pages, "
        f"{plan.memory.num_full_sequences:.1f} sequences of {plan.memory.max_model_len:,}",
    )
