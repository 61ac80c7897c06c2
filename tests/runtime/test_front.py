from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from paged.models.tokenizer import Tokenizer
from paged.runtime.errors import InvalidRequest
from paged.runtime.front import Prepared, Prompt
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import EOS, MAX_MODEL_LEN, VOCAB_SIZE, byte_alphabet, front


def prepare(prompt: Any, params: SamplingParams | None = None, **settings: Any) -> Prepared:
    request_settings = {k: settings.pop(k) for k in ("priority", "cache_salt") if k in settings}
    return front(**settings).prepare("r", prompt, params, **request_settings)


def error(*arguments: Any, **settings: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        prepare(*arguments, **settings)
    return str(caught.value), caught.value.param


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("ab", "ab"),
        ({"prompt": "ab"}, "ab"),
        ([97, 98], None),
        ((97, 98), None),
        ({"prompt_token_ids": [97, 98]}, None),
        ({"prompt": "AB", "prompt_token_ids": [97, 98]}, "AB"),
    ],
)
def test_prompts_come_in_many_forms(prompt, text):
    request, prompt_text = prepare(prompt)
    assert request.prompt_token_ids == [97, 98]
    assert prompt_text == text
    assert request.request_id == "r"
    assert request.arrival_time > 0


def test_prompts_are_tokenised_together_and_stay_in_order():
    prompts: list[Prompt] = ["a", [98], {"prompt": "c"}, {"prompt_token_ids": [100]}, "e"]
    prepared = front().prepare_all([*"12345"], prompts, [None] * 5, [0] * 5)
    assert [each.request.prompt_token_ids for each in prepared] == [[token] for token in b"abcde"]
    assert [each.request.request_id for each in prepared] == [*"12345"]


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompts_are_refused(prompt):
    assert error(prompt) == ("the prompt is empty; it must hold at least one token", "prompt")


@pytest.mark.parametrize(
    "prompt",
    [5, None, [1.5], ["a"], b"ab", {}, {"text": "a"}, {"prompt": 3}, {"prompt": "a", "x": 1}],
)
def test_other_things_are_no_prompts(prompt):
    message, param = error(prompt)
    assert message.startswith("a prompt")
    assert param == "prompt"


def test_lone_surrogates_are_refused():
    assert error("secret\ud800") == ("the prompt holds lone surrogates", "prompt")


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 2**40])
def test_ids_outside_the_vocabulary_are_refused(token):
    assert error([1, token]) == (
        f"Token id {token} is out of vocabulary: prompt takes ids from 0 to {VOCAB_SIZE - 1}",
        "prompt",
    )
    assert error("a", SamplingParams(stop_token_ids=[token]))[1] == "stop_token_ids"
    assert error("a", SamplingParams(logit_bias={token: 1.0}))[1] == "logit_bias"
    assert error("a", SamplingParams(allowed_token_ids=[token]))[1] == "allowed_token_ids"
    assert error("a", SamplingParams(banned_token_ids=[token]))[1] == "banned_token_ids"


def test_ids_of_the_whole_vocabulary_are_taken():
    everything = [0, VOCAB_SIZE - 1]
    params = SamplingParams(stop_token_ids=everything, logit_bias=dict.fromkeys(everything, 1.0))
    assert prepare(everything, params).request.prompt_token_ids == everything


def test_max_tokens_is_resolved():
    def max_tokens(num_prompt_tokens: int, params: SamplingParams | None, **settings: Any) -> Any:
        prompt = [1] * num_prompt_tokens
        return prepare(prompt, params, **settings).request.params.max_tokens

    open_end = SamplingParams(max_tokens=None)
    assert max_tokens(10, open_end) == MAX_MODEL_LEN - 10
    assert max_tokens(MAX_MODEL_LEN - 1, open_end) == 1
    assert max_tokens(10, SamplingParams(max_tokens=7)) == 7
    assert max_tokens(10, SamplingParams(max_tokens=MAX_MODEL_LEN - 10)) == MAX_MODEL_LEN - 10
    # Defaults ask for nothing: they are cut to fit.
    assert max_tokens(10, None) == 16
    assert max_tokens(MAX_MODEL_LEN - 5, None) == 5
    assert max_tokens(10, None, default_params=open_end) == MAX_MODEL_LEN - 10


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "numbers"),
    [
        (190, 11, ("11", "190", "201")),
        (200, None, ("at least 1", "200", "at least 201")),
        (500, 16, ("16", "500", "516")),
    ],
)
def test_requests_that_outgrow_the_context_are_refused(num_prompt_tokens, max_tokens, numbers):
    output, prompt, total = numbers
    assert error([1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens)) == (
        f"This model's maximum context length is 200 tokens. However, you requested {output} "
        f"output tokens and your prompt contains {prompt} input tokens, for a total of {total} "
        "tokens. Please reduce the length of the input prompt or the number of requested output "
        "tokens: see docs/failures.md#prompt-too-long.",
        "input_tokens",
    )


def test_long_prompts_are_refused_without_parameters_too():
    assert error("a" * MAX_MODEL_LEN)[1] == "input_tokens"


def test_min_tokens_must_fit_what_is_left():
    message, param = error([1] * 190, SamplingParams(max_tokens=None, min_tokens=11))
    assert message == "min_tokens must be between 0 and max_tokens (10), got 11"
    assert param == "min_tokens"


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_are_limited(name):
    def asking_for(number: int) -> SamplingParams:
        fields: dict[str, Any] = {name: number}
        return SamplingParams(**fields)

    prepare("a", asking_for(5))
    assert error("a", asking_for(6)) == (
        f"{name} must be at most 5 (--max-logprobs), got 6",
        name,
    )


def test_priorities_need_their_policy():
    assert prepare("a", priority=-3, has_priorities=True).request.priority == -3
    assert error("a", priority=1)[1] == "priority"


@pytest.mark.parametrize("priority", [2**63, -(10**400), 1.5, "1", None])
def test_priorities_are_64_bit_integers(priority):
    assert error("a", priority=priority, has_priorities=True)[1] == "priority"


@pytest.mark.parametrize("text", ["\ud800", b"bytes", 7])
def test_strings_that_the_engine_keeps_are_text(text):
    assert error("a", cache_salt=text)[1] == "cache_salt"
    with pytest.raises(InvalidRequest, match="request_id"):
        front().prepare(text, "a")


def test_cache_salt():
    assert prepare("a").request.cache_salt == ""
    assert prepare("a", cache_salt="x").request.cache_salt == "x"
    assert prepare({"prompt": "a", "cache_salt": "y"}, cache_salt="x").request.cache_salt == "y"
    assert error({"prompt": "a", "cache_salt": 7})[1] == "cache_salt"
    assert prepare("a", cache_salt="x" * 1024).request.cache_salt
    assert error("a", cache_salt="x" * 1025)[1] == "cache_salt"


def test_without_a_tokenizer():
    assert prepare([1, 2], tokenizer=None).request.prompt_token_ids == [1, 2]
    assert error("a", tokenizer=None)[1] == "prompt"
    assert error([1], SamplingParams(stop="a"), tokenizer=None)[1] == "stop"
    with pytest.raises(InvalidRequest, match="chat needs a tokenizer"):
        front(tokenizer=None).chat_prompts([[{"role": "user", "content": "a"}]])


def test_stop_strings_are_text():
    assert error("a", SamplingParams(stop=["b", "\udfff"]))[1] == "stop"


def test_errors_never_echo_the_prompt():
    for prompt in ("secret" * 100, {"prompt": "secret", "secret": "secret"}, ["secret"]):
        assert "secret" not in error(prompt)[0]


def test_chat_prompts():
    conversations = [[{"role": "user", "content": text}] for text in ("a", "b")]
    first, second = front().chat_prompts(conversations)
    assert first == {"prompt": "<user>a:", "prompt_token_ids": [257, 97, 58]}
    assert second["prompt_token_ids"] == [257, 98, 58]
    (bare,) = front().chat_prompts(conversations[:1], add_generation_prompt=False)
    assert bare.get("prompt") == "<user>a"


def test_templates_that_refuse_are_the_callers_mistake():
    with pytest.raises(InvalidRequest, match="no thanks") as caught:
        front().chat_prompts([[]], chat_template="{{ raise_exception('no thanks') }}")
    assert caught.value.param == "messages"


def words_tokenizer() -> Tokenizer:
    """ "b" is a token also behind a space; other bytes are not."""
    vocabulary = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocabulary["\u0120b"] = 256
    backend = Backend(models.BPE(vocabulary, [("\u0120", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return Tokenizer(backend, special_tokens={}, chat_templates={})


def test_bad_words_become_tokens() -> None:
    ours = front(tokenizer=words_tokenizer(), vocab_size=257)
    params = SamplingParams(bad_words=["b", "cd"], banned_token_ids=[9])
    request = ours.prepare("r", "a", params).request
    assert request.params.banned_token_ids == [9, ord("b"), 256]
    assert request.bad_words == [[*b" cd"], [*b"cd"]]
    for wrong in (["b" * 70], ["\ud800"]):
        with pytest.raises(InvalidRequest) as caught:
            ours.prepare("r", "a", SamplingParams(bad_words=wrong))
        assert caught.value.param == "bad_words"
    with pytest.raises(InvalidRequest, match="need a tokenizer"):
        front(tokenizer=None).prepare("r", [1], SamplingParams(bad_words=["b"]))


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1], "banned_token_ids": [1, 2]},
        {"allowed_token_ids": [EOS], "min_tokens": 1},
        {"allowed_token_ids": [5], "stop_token_ids": [5], "min_tokens": 1},
    ],
)
def test_something_must_be_left_to_choose(fields: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        front(eos_token_ids=frozenset({EOS})).prepare("r", "a", SamplingParams(**fields))
    assert caught.value.param == "allowed_token_ids"
