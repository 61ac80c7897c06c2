"""Text to tokens and back, and chat templates, whatever file the tokenizer came from.

The `tokenizers` library does the work, without the layers transformers puts on top of it: decoding
is three times faster so, and nothing heavy is imported to encode a prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from paged.models.byte_level import BYTES, glm4_backend
from paged.models.chat_template import (
    Message,
    Tool,
    render_chat,
    select_template,
    silence_transformers,
)
from paged.models.json_files import NotAnObject, read_object

# Entries of tokenizer_config.json that name one token each.
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# What a vocabulary may be in; transformers makes something of the older ones.
_TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken", "*.bpe", "tekken.json")
_SPACE_PIECE = "▁"


class TokenizerError(ValueError):
    """Tokenizer files that are missing or cannot be read."""


class Tokenizer:
    """A tokenizer with the chat templates and special tokens of its model.

    Attributes:
        backend: the `tokenizers` object, for streams that decode token by token.
        special_tokens: text of the named ones ("bos_token", "eos_token", …).
        bos_token_id: None when there is none.
        eos_token_ids: every token that ends an answer.
        chat_templates: Jinja sources by name; the usual one is "default".
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.chat_templates = dict(chat_templates)
        self.bos_token_id = self._named_id("bos_token")
        named_eos = self._named_id("eos_token")
        own = () if named_eos is None else (named_eos,)
        self.eos_token_ids = frozenset((*own, *eos_token_ids))

    @property
    def vocab_size(self) -> int:
        """Tokens it knows, added ones included; a model's logits may have more entries."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the model's BOS and the like unless told otherwise."""
        # Unlike `encode`, the call for batches lets other threads run meanwhile; so below.
        [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; bytes that are no UTF-8 become U+FFFD."""
        [text] = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation, to be encoded without special tokens (see `render_chat`).

        Raises:
            ChatTemplateError: no template, or one that refuses the conversation.
        """
        return render_chat(
            chat_template or select_template(self.chat_templates, tools),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=self.special_tokens | variables,
        )

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Every token that `decode` skips."""
        added = self._added_tokens
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to the text, as bytes: a token may be part of a character.

        Empty for ids that the tokenizer does not know.
        """
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_tokens:
            return token.encode()
        if self._is_byte_level:
            return b"".join(BYTES.get(character) or character.encode() for character in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace(_SPACE_PIECE, " ").encode()

    def token_text(self, token_id: int) -> str:
        """A token as text for logprobs; half characters become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    @cached_property
    def _added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _is_byte_level(self) -> bool:
        """Whether the vocabulary spells bytes as printable characters, as GPT-2's does."""
        decoder = self.backend.decoder
        return decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def tokenizer_from_folder(folder: Path, eos_token_ids: Iterable[int] = ()) -> Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Args:
        eos_token_ids: further ids that end an answer, as the model's configurations name them.

    Raises:
        TokenizerError: there are no tokenizer files that can be read.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    backend = _load_backend(folder, settings)
    special_tokens = {
        name: _token_text(settings[name]) for name in _NAMED_TOKENS if settings.get(name)
    }
    if "add_bos_token" in settings or "add_eos_token" in settings:
        wrap_sequences(
            backend,
            bos=special_tokens.get("bos_token") if settings.get("add_bos_token") else None,
            eos=special_tokens.get("eos_token") if settings.get("add_eos_token") else None,
        )
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        chat_templates=_chat_templates(folder, settings),
        eos_token_ids=eos_token_ids,
    )


def wrap_sequences(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Make `encode` put these tokens around a text."""
    around = [token for token in (bos, eos) if token is not None]
    for token in around:
        if backend.token_to_id(token) is None:
            raise TokenizerError(f"the special token {token!r} is not in the vocabulary")
    backend.post_processor = processors.TemplateProcessing(
        single=[piece for piece in (bos, "$A", eos) if piece is not None],
        special_tokens=[(token, backend.token_to_id(token)) for token in around],
    )


def _load_backend(folder: Path, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    path, kind = folder / "tokenizer.json", settings.get("tokenizer_class")
    if not any(file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)):
        raise TokenizerError(
            f"no tokenizer.json in {folder}; use --tokenizer for a folder that has one, or "
            "--skip-tokenizer-init to do without"
        )
    try:
        if path.exists():
            backend = tokenizers.Tokenizer.from_file(str(path))
        elif kind == "ChatGLM4Tokenizer":
            backend = glm4_backend(folder / "tokenizer.model", settings)
        elif settings.get("auto_map"):
            raise TokenizerError(
                f"{kind} is code of the model's own, which is not run; name a folder with a "
                "tokenizer.json for the tokenizer, as a copy converted for transformers has"
            )
        else:
            backend = _convert_backend(folder)
    except Exception as error:  # the libraries raise nothing narrower
        raise TokenizerError(f"no tokenizer can be read from {folder}: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _convert_backend(folder: Path) -> tokenizers.Tokenizer:
    """Let transformers make one of an older format (vocab.json and merges.txt, or the like)."""
    silence_transformers()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer


def _chat_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Templates in files of their own win over those in tokenizer_config.json."""
    value = settings.get("chat_template")
    templates: dict[Any, Any] = {"default": value} if value else {}
    if isinstance(value, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in value]
        templates = {entry.get("name"): entry.get("template") for entry in entries}
    if not all(isinstance(each, str) for pair in templates.items() for each in pair):
        raise TokenizerError("chat_template in tokenizer_config.json is no text")
    for path in (folder / "additional_chat_templates").glob("*.jinja"):
        templates[path.stem] = _read_text(path)
    main = folder / "chat_template.jinja"
    if main.exists():
        templates["default"] = _read_text(main)
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error


def _token_text(value: Any) -> str:
    """A token as tokenizer_config.json writes it: text, or a record with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise TokenizerError("a special token in tokenizer_config.json is no text")
    return text


def _read_json(path: Path) -> dict[str, Any]:
    """The file's content, {} when there is none: every entry of it has a default."""
    if not path.exists():
        return {}
    try:
        return read_object(path)
    except NotAnObject as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
