from contextlib import suppress
from functools import cache
from itertools import groupby

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paged.models.loading import resolve_model
from paged.models.tokenizer import Tokenizer
from paged.runtime.detokenizer import Detokenizer
from tests.runtime.fakes import byte_tokenizer

untimed = settings(deadline=None)  # the first example builds a tokenizer
CORPUS = [
    "hello world, the quick brown fox don't jump over 1234 lazy dogs.",
    "привет мир, 你好世界。今天天气很好。 こんにちは",
    "emoji 😀 👨‍👩‍👧 🇨🇭 e\u0301 naïve café",
] * 3
TEXTS = st.text(
    st.one_of(
        st.sampled_from("abehlo wrd.,'!\n\t"),
        st.sampled_from("你好世界привет😀👨\u200d👩🇨🇭é\u0301\ufffd"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=30,
)


def wrap(backend: Backend) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<tool>")])
    return Tokenizer(backend, special_tokens={}, chat_templates={})


@cache
def byte_level() -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend)


@cache
def byte_fallback() -> Tokenizer:
    """As SentencePiece models of the Llama 2 kind: a space belongs to the word after it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abehlowrd", "▁h", "el", "▁hel", "lo", "▁w", "你", "\ufffd"]
    merges = [("▁", "h"), ("e", "l"), ("▁h", "el"), ("l", "o"), ("▁", "w")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return wrap(backend)


@cache
def word_piece() -> Tokenizer:
    pieces = ["[UNK]", "hello", "wor", "##ld", "##s", "don", "'", "t", ".", ",", "你", "好", "a"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    backend = Backend(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return wrap(backend)


@cache
def smollm() -> Tokenizer:
    return resolve_model(None).tokenizer()


TOKENIZERS = [byte_level, byte_fallback, word_piece, smollm]


def streamed(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True
) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(token) for token in output), detokenizer.finish()]


def in_context(
    tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True
) -> str:
    """The oracle: the output's share of the text of everything."""
    before = tokenizer.decode(prompt, skip)
    text = tokenizer.decode([*prompt, *output], skip)
    if not text.startswith(before):
        before = before.rstrip("\ufffd")
    return text.removeprefix(before)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@untimed
@given(prompt=TEXTS, text=TEXTS)
@example(prompt="", text="hello world")
@example(prompt="hello", text=" world")
@example(prompt="你", text="好 你😀好")
def test_text_streams_as_it_decodes(tokenizer, prompt, text):
    encode = tokenizer().encode
    prompt_ids, output = encode(prompt), encode(text)
    pieces = streamed(tokenizer(), prompt_ids, output)
    assert "".join(pieces) == in_context(tokenizer(), prompt_ids, output)


@pytest.mark.parametrize("tokenizer", [byte_level, word_piece, smollm])
@untimed
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(tokenizer, data):
    size = tokenizer().vocab_size
    ids = st.lists(st.integers(0, size + 5), max_size=40)
    prompt, output = data.draw(ids), data.draw(ids)
    skip = data.draw(st.booleans())
    pieces = streamed(tokenizer(), prompt, output, skip)
    assert "".join(pieces) == in_context(tokenizer(), prompt, output, skip)


@given(prompt=st.binary(max_size=20), output=st.binary(max_size=60))
@example(prompt=b"", output=b"\xff" * 40)
@example(prompt=b"\xe4", output=b"\xbd\xa0")
@example(prompt=b"", output=b"\xff" * 15 + "😀".encode() * 2)
@example(prompt=b"", output=("😀".encode() * 9)[1:])
def test_any_bytes_stream_as_they_decode(prompt, output):
    pieces = streamed(byte_tokenizer(), list(prompt), list(output))
    assert "".join(pieces) == in_context(byte_tokenizer(), list(prompt), list(output))


def is_byte(token: int) -> bool:
    return 1 <= token <= 256


def without_taking_back(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The oracle for byte fallback: characters count as soon as their bytes are there."""
    anchor, text = tokenizer.encode("a"), ""
    for run_is_bytes, group in groupby(ids, is_byte):
        run, held = list(group), b""
        if not run_is_bytes:
            text += tokenizer.decode([*anchor, *run]).removeprefix("a")
            continue
        for token in run:
            held += bytes([token - 1])
            with suppress(UnicodeDecodeError):
                text, held = text + held.decode(), b""
        text += "\ufffd" * len(held)
    return text


@untimed
@given(
    runs=st.lists(
        st.one_of(
            TEXTS.map(lambda text: byte_fallback().encode(text)),
            # Not the space, whose byte token is never used.
            st.lists(st.integers(1, 256).filter(lambda token: token != 0x21), max_size=12),
        ),
        max_size=5,
    )
)
def test_byte_fallback_keeps_what_it_gave(runs):
    """Broken bytes cost themselves, never the characters before them."""
    tokenizer = byte_fallback()
    output = [*tokenizer.encode("a"), *(token for run in runs for token in run)]
    assume(all(len(list(run)) < 16 for bytes_, run in groupby(output, is_byte) if bytes_))
    text = "".join(streamed(tokenizer, [], output))
    assert text == without_taking_back(tokenizer, output)


def test_broken_bytes_after_a_character_end_neither():
    encode = byte_fallback().encode
    half = encode("😀")[:2]
    output = [*encode("好"), *half, *encode("a")]
    assert "".join(streamed(byte_fallback(), [], output)) == "好\ufffd\ufffda"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@untimed
@given(text=TEXTS)
def test_no_piece_holds_half_a_character(tokenizer, text):
    ids = tokenizer().encode(text)
    assume("\ufffd" not in tokenizer().decode(ids))
    assert all("\ufffd" not in piece for piece in streamed(tokenizer(), [], ids))


def test_a_character_comes_with_its_last_token():
    pieces = streamed(byte_tokenizer(), [], list("a😀b".encode()))
    assert pieces == ["a", "", "", "", "😀", "b", ""]


def test_an_unfinished_character_is_flushed():
    pieces = streamed(byte_tokenizer(), [], list("a😀".encode())[:-1])
    assert pieces == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize("prompt", ["hello", "<s>hello<s><s>", "hello" * 50])
def test_the_first_word_keeps_its_space_behind_a_prompt(prompt):
    tokenizer = byte_fallback()
    assert (
        "".join(streamed(tokenizer, tokenizer.encode(prompt), tokenizer.encode(" hello")))[0] == " "
    )
    assert "".join(streamed(tokenizer, [], tokenizer.encode(" hello"))) == "hello"


def test_special_tokens_are_shown_on_demand():
    tokenizer = byte_tokenizer()
    assert "".join(streamed(tokenizer, [], [97, 256, 98], skip=False)) == "a<eos>b"
    assert "".join(streamed(tokenizer, [], [97, 256, 98])) == "ab"


def test_garbage_is_not_held_back_for_ever():
    detokenizer = Detokenizer(byte_tokenizer(), [])
    text = ""
    for count in range(1, 200):
        text += detokenizer.push(0xFF)
        assert count - len(text) < 20
    assert text + detokenizer.finish() == "\ufffd" * 199
