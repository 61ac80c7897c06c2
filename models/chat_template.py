"""Rendering conversations with the template that comes with a model.

Templates are Jinja programs written by strangers; transformers runs them in a sandbox that hands
them plain data only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Tool = dict[str, Any]


class ChatTemplateError(ValueError):
    """A conversation that the model's chat template refuses, or a template that cannot run."""


def select_template(templates: Mapping[str, str], tools: Sequence[Tool] | None) -> str:
    """The template for a conversation: the tool template when there is one and tools are given.

    Raises:
        ChatTemplateError: the model has no template.
    """
    name = "tool_use" if tools and "tool_use" in templates else "default"
    if name not in templates:
        raise ChatTemplateError(
            "the model has no chat template; send a plain prompt, or give a template of your own: "
            "see docs/failures.md#other-answers-than-transformers"
        )
    return templates[name]


def render_chat(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: Sequence[Tool] | None,
    variables: Mapping[str, Any],
) -> str:
    """The prompt for a conversation.

    Args:
        template: Jinja source.
        messages: dicts of role, content and whatever else the template reads.
        add_generation_prompt: end with the opening of an assistant message.
        continue_final_message: end inside the last message, so that the model continues it.
        tools: JSON schemas of functions.
        variables: further names the template may read, special tokens among them.

    Raises:
        ChatTemplateError: with the template's own words where it raised them.
    """
    if add_generation_prompt and continue_final_message:
        raise ChatTemplateError(
            "add_generation_prompt and continue_final_message exclude each other: the prompt "
            "either opens a new message or continues the last one"
        )
    silence_transformers()
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = [{key: value for key, value in m.items() if value is not None} for m in messages]
    try:
        # Returns the texts of all conversations, and the ranges of their answers.
        texts = render_jinja_template(
            [chat],
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except Exception as error:  # a foreign program: it may fail in any way
        raise ChatTemplateError(f"the chat template failed: {error}") from error
    return texts[0][0]


def silence_transformers() -> None:
    """Before its first import: no notice that PyTorch is absent, which is how it should be."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
