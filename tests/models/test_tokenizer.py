"""Tokenizers built from Hugging Face folders and from GGUF metadata, and chat templates."""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from paged.models.chat_template import ChatTemplateError
from paged.models.gguf_tokenizer import tokenizer_from_gguf
from paged.models.tokenizer import Tokenizer, TokenizerError, tokenizer_from_folder

TEXTS = [
    "",
    "Hello, world!",
    "naïve café 日本語 🙂👩‍👩‍👧",
    "  two  spaces\n\n\tand tabs ",
    "x=2024;y=1e-5",
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no bad roles') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if tools %}[{{ tools | length }} tools]{% endif %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "hi", "name": None}]


def byte_level_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    backend.train_from_iterator(["hello hello world the there"] * 20, trainer)
    return backend


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = byte_level_backend()
    backend.enable_truncation(3)
    backend.save(str(tmp_path / "tokenizer.json"))
    write_settings(tmp_path)
    return tmp_path


def write_settings(folder: Path, **changes: Any) -> None:
    settings = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))


@pytest.mark.parametrize("text", TEXTS)
def test_folder_round_trip(folder, text):
    tokenizer = tokenizer_from_folder(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize(
    "work",
    [
        lambda tokenizer: tokenizer.encode("hello world " * 100_000),
        lambda tokenizer: tokenizer.decode([9, 10, 11] * 500_000),
    ],
    ids=["encode", "decode"],
)
def test_other_threads_run_meanwhile(folder, work):
    tokenizer = tokenizer_from_folder(folder)
    thread = threading.Thread(target=work, args=[tokenizer])
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5


def test_folder_special_tokens(folder):
    tokenizer = tokenizer_from_folder(folder, [9])
    assert tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_ids == {1, 9}
    assert tokenizer.special_ids == {0, 1}
    ids = tokenizer.encode("hello</s>")
    assert ids[-1] == 1
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hello</s>"
    assert tokenizer.token_bytes(1) == b"</s>"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.vocab_size == tokenizer.backend.get_vocab_size()


def test_half_a_character_is_shown_as_such(folder):
    tokenizer = tokenizer_from_folder(folder)
    first = tokenizer.encode("é")[0]
    assert tokenizer.token_bytes(first) == b"\xc3"
    assert tokenizer.token_text(first) == "\ufffd"


@pytest.mark.parametrize(
    ("settings", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([0], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([0], [1])),
        ({"add_bos_token": False}, ([], [])),
    ],
)
def test_settings_decide_what_stands_around_a_text(folder, settings, around):
    write_settings(folder, **settings)
    tokenizer = tokenizer_from_folder(folder)
    inner = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == around[0] + inner + around[1]


def test_special_token_that_is_not_in_the_vocabulary(folder):
    write_settings(folder, bos_token="<none>", add_bos_token=True)
    with pytest.raises(TokenizerError, match="'<none>'"):
        tokenizer_from_folder(folder)


def test_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(TokenizerError) as caught:
        tokenizer_from_folder(tmp_path)
    assert str(caught.value) == (
        f"no tokenizer.json in {tmp_path}; use --tokenizer for a folder that has one, or "
        "--skip-tokenizer-init to do without"
    )


def test_folder_without_a_tokenizer_that_can_be_read(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=re.escape(str(tmp_path))):
        tokenizer_from_folder(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        "text",
        {"bos_token": 5},
        {"eos_token": ["</s>"]},
        {"unk_token": {"content": 5}},
        {"chat_template": 5},
        {"chat_template": {"default": "x"}},
        {"chat_template": ["x"]},
        {"chat_template": [{"name": "default"}]},
    ],
)
def test_settings_of_another_kind(folder, settings):
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        tokenizer_from_folder(folder)


def test_templates_that_are_no_text(folder):
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        tokenizer_from_folder(folder)


def test_settings_that_are_not_json(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not JSON"):
        tokenizer_from_folder(folder)


def test_folder_of_an_older_format(folder, tmp_path_factory):
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    old = tmp_path_factory.mktemp("old")
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (old / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    write_settings(old, tokenizer_class="GPT2Tokenizer", eos_token="</s>")
    tokenizer, expected = tokenizer_from_folder(old), tokenizer_from_folder(folder)
    assert tokenizer.encode("hello there world") == expected.encode("hello there world")


@pytest.fixture
def chat(folder: Path) -> Tokenizer:
    return tokenizer_from_folder(folder)


def test_template_sees_messages_tokens_tools_and_variables(chat):
    render = chat.apply_chat_template
    assert render(MESSAGES) == "<user>hi</s><assistant>"
    assert render(MESSAGES, add_generation_prompt=False, mood="!") == "<user>hi</s>!"
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    assert render(MESSAGES, tools=[tool]) == "<user>hi</s>[1 tools]<assistant>"
    assert render(MESSAGES, chat_template="{{ messages[0].content }}") == "hi"


def test_final_message_can_be_continued(chat):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    text = chat.apply_chat_template(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<user>hi</s><assistant>Well"
    with pytest.raises(ChatTemplateError, match="exclude each other"):
        chat.apply_chat_template(messages, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "template", "words"),
    [
        ([{"role": "bad", "content": ""}], None, "no bad roles"),
        (MESSAGES, "{{ messages[0].content.x.y }}", "chat template failed"),
        (MESSAGES, "{% if %}", "chat template failed"),
        (MESSAGES, "{{ 1 // 0 }}", "chat template failed"),
    ],
)
def test_template_errors_carry_the_reason(chat, messages, template, words):
    with pytest.raises(ChatTemplateError, match=words):
        chat.apply_chat_template(messages, chat_template=template)


def test_model_without_a_template(folder):
    write_settings(folder, chat_template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer_from_folder(folder).apply_chat_template(MESSAGES)


def test_templates_by_name_and_in_files(folder):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    write_settings(folder, chat_template=named)
    render = tokenizer_from_folder(folder).apply_chat_template
    assert render(MESSAGES) == "plain"
    assert render(MESSAGES, tools=[{"type": "function"}]) == "tools"

    (folder / "chat_template.jinja").write_text("from a file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    render = tokenizer_from_folder(folder).apply_chat_template
    assert render(MESSAGES) == "from a file"
    assert render(MESSAGES, tools=[{"type": "function"}]) == "tools from a file"


def byte_level_metadata(pre: str, **changes: Any) -> dict[str, Any]:
    """Metadata of a GGUF file as converted from `byte_level_backend`."""
    state = json.loads(byte_level_backend().to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    fields = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": [" ".join(pair) for pair in state["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (fields | changes).items()}


@pytest.mark.parametrize("pre", ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", TEXTS)
def test_gguf_byte_level_round_trip(pre, text):
    tokenizer = tokenizer_from_gguf(byte_level_metadata(pre))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["It", "'s", "Ġ12345", "Ġx", "ĊĊ"]),
        ("smollm", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġx", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "123", "45", "Ġx", "ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "1", "2", "3", "4", "5", "Ġx", "ĊĊ"]),
    ],
)
def test_gguf_cuts_text_as_its_model_does(pre, pieces):
    backend = tokenizer_from_gguf(byte_level_metadata(pre)).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("It's 12345 x\n\n")
    assert [piece for piece, _ in cut] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("llama-bpe", ["camelCase", "'s", "Ġ", "123", "45", "ĠNASA", "'S", "Ġ//Ċ", "/"]),
        ("dbrx", ["camelCase", "'s", "Ġ", "123", "45", "ĠNASA", "'S", "Ġ//Ċ", "/"]),
        ("gpt-4o", ["camel", "Case's", "Ġ", "123", "45", "ĠNASA'S", "Ġ//Ċ/"]),
        ("tekken", ["camel", "Case", "'s", "Ġ", "1", "2", "3", "4", "5", "ĠNASA", "'S", "Ġ//Ċ/"]),
    ],
)
def test_gguf_cuts_words_where_its_model_does(pre, pieces):
    backend = tokenizer_from_gguf(byte_level_metadata(pre)).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("camelCase's 12345 NASA'S //\n/")
    assert [piece for piece, _ in cut] == pieces


def test_gguf_token_that_is_no_spelling_of_bytes():
    metadata = byte_level_metadata("gpt-2")
    metadata["tokenizer.ggml.tokens"].append("a 日")
    metadata["tokenizer.ggml.token_type"].append(1)
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == "a 日".encode()


def test_gguf_special_tokens_and_template():
    metadata = byte_level_metadata("llama-bpe", eot_token_id=7)
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.chat_template": TEMPLATE})
    assert tokenizer.encode("the") == [0, *tokenizer.encode("the", add_special_tokens=False)]
    assert tokenizer.eos_token_ids == {1, 7}
    assert tokenizer.decode(tokenizer.encode("the</s>")) == "the"
    assert tokenizer.apply_chat_template(MESSAGES) == "<user>hi</s><assistant>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"model": "bert"}, "'bert'.*gpt2, llama"), ({"pre": "jais"}, "'jais'.*smollm")],
)
def test_gguf_tokenizer_of_another_kind(changes, words):
    with pytest.raises(TokenizerError, match=words):
        tokenizer_from_gguf(
            byte_level_metadata("gpt-2")
            | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        )


@pytest.mark.parametrize("key", ["tokens", "merges", "token_type", "bos_token_id", "pre"])
@pytest.mark.parametrize("value", [None, 5, 10**6, "x", [5], [["x"]]])
def test_gguf_tokenizer_that_is_damaged(key, value):
    """Of the values that fit one key, each fits no other."""
    metadata = byte_level_metadata("gpt-2")
    if (key, value) != ("bos_token_id", 5):
        with pytest.raises(TokenizerError):
            tokenizer_from_gguf(metadata | {f"tokenizer.ggml.{key}": value})


def sentencepiece_metadata() -> dict[str, Any]:
    pieces = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "▁hell", "hello", "▁hello", "lo"]
    scores = [-20.0, -21.0, -22.0, -23.0, -24.0, -2.0, -1.0, -3.0, -5.0, -6.0, -4.0, -1.5]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_gguf_sentencepiece_merges_by_score():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode("hello")]
    assert pieces == ["<s>", "▁hello"]
    assert tokenizer.special_ids == {0, 1, 2}


def write_glm4(folder: Path, **changes: Any) -> Path:
    """A tiktoken file of all bytes and of what `byte_level_backend` has learnt."""
    pairs = [b"he", b"ll", b"hell", b"hello", b" hello", b"lo"]
    tokens = [*(bytes([byte]) for byte in range(256)), *pairs]
    lines = [b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)]
    (folder / "tokenizer.model").write_bytes(b"".join(lines))
    names = ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>")
    added = {
        str(262 + index): {"content": name, "special": True} for index, name in enumerate(names)
    }
    settings = {
        "tokenizer_class": "ChatGLM4Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_chatglm.ChatGLM4Tokenizer", None]},
        "added_tokens_decoder": added,
        "eos_token": "<|endoftext|>",
        "chat_template": "[gMASK]<sop>{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | changes))
    return folder


def test_glm4_is_read_from_its_tiktoken_file(tmp_path):
    tokenizer = tokenizer_from_folder(write_glm4(tmp_path), [265])
    ids = tokenizer.encode("hello hello lo<|user|>")
    assert ids == [263, 264, 259, 260, ord(" "), 261, 265]
    assert tokenizer.decode(ids) == "hello hello lo"
    assert tokenizer.eos_token_ids == {262, 265}
    assert tokenizer.apply_chat_template(MESSAGES) == "[gMASK]<sop>hi"


@pytest.mark.parametrize("text", TEXTS)
def test_glm4_spells_all_else_as_bytes(text, tmp_path):
    tokenizer = tokenizer_from_folder(write_glm4(tmp_path))
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize(
    ("file", "changes", "words"),
    [
        (
            None,
            {"tokenizer_class": "ChatGLMTokenizer"},
            "ChatGLMTokenizer.*not run.*tokenizer.json",
        ),
        (None, {"added_tokens_decoder": None}, "added_tokens_decoder"),
        (None, {"added_tokens_decoder": {"262": {"content": "<sop>"}}}, r"lacks.*\[gMASK\]"),
        (None, {"added_tokens_decoder": {"9": {"content": "x"}}}, r"'x' should have id 9.*120"),
        (b"aGU= 1\n", {}, "0 to 0"),
        (b"\x0a\x0e\x0a\x05<unk>", {}, "no tiktoken file"),
    ],
)
def test_glm4_files_that_are_something_else(file, changes, words, tmp_path):
    write_glm4(tmp_path, **changes)
    if file is not None:
        (tmp_path / "tokenizer.model").write_bytes(file)
    with pytest.raises(TokenizerError, match=words):
        tokenizer_from_folder(tmp_path)


def gemma_metadata() -> dict[str, Any]:
    """No space before the text, and tokens that are found whole: runs of spaces, ends of turns."""
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    found_whole = {"  ": 4, "    ": 4, "\n\n": 4, "<start_of_turn>": 3, "<end_of_turn>": 3}
    metadata["tokenizer.ggml.tokens"] += list(found_whole)
    metadata["tokenizer.ggml.token_type"] += list(found_whole.values())
    metadata["tokenizer.ggml.scores"] += [0.0] * len(found_whole)
    return metadata


def test_gguf_sentencepiece_with_the_settings_of_gemma():
    tokenizer = tokenizer_from_gguf(gemma_metadata())
    ids = tokenizer.encode("hello     hello\n\nlo<end_of_turn>")
    pieces = [tokenizer.backend.id_to_token(i) for i in ids]
    assert pieces == ["<s>", "hello", "    ", "▁hello", "\n\n", "lo", "<end_of_turn>"]
    assert tokenizer.decode(ids) == "hello     hello\n\nlo"
    assert tokenizer.eos_token_ids == {2, ids[-1]}


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_sentencepiece_of_gemma_adds_no_space(text):
    tokenizer = tokenizer_from_gguf(gemma_metadata())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_sentencepiece_spells_the_unknown_as_bytes(text):
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    joined = b"".join(tokenizer.token_bytes(i) for i in ids)
    assert joined == (b" " + text.encode() if text else b"")
