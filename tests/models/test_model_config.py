"""config.json in, one record out; what cannot be honoured is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest

from paged.errors import ConfigError
from paged.models.config import ModelConfig, RopeScaling, resolve_dtype
from paged.models.registry import FAMILIES, get_family, model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def parse(**changes: Any) -> ModelConfig:
    return model_config(LLAMA | changes)


def test_gaps_have_the_usual_meaning():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.group_size) == (4, 16, 1)
    assert (config.rope_theta, config.rope_scaling) == (10000.0, None)
    assert (config.norm_eps, config.dtype) == (1e-6, "float32")
    assert config.windows == (None, None, None)
    assert not config.tie_word_embeddings
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(("eos", "ids"), [(2, (2,)), ([2, 7], (2, 7)), (None, ())])
def test_end_tokens_are_one_or_several(eos, ids):
    assert parse(eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_scaling": YARN | {"type": "yarn"}},
            {"rope_parameters": YARN | {"rope_theta": 10000.0}},
        ),
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
    ],
)
def test_old_and_new_spellings_agree(old, new):
    assert parse(**old) == parse(**new)


def test_scaling_falls_back_on_the_trained_context():
    scaling = parse(rope_scaling={"type": "yarn", "factor": 4.0}).rope_scaling
    assert scaling == RopeScaling("yarn", factor=4.0, original_max_position=256)


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        (None, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "dynamic", "factor": 4.0}, 256),
        (YARN | {"original_max_position_embeddings": 256}, 1024),
        (YARN, 256),
    ],
)
def test_context_length_follows_the_scaling(rope, length):
    assert parse(rope_scaling=rope).context_length == length


WINDOW = {"sliding_window": 8, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 8}, (8, 8, 8)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None, None)),
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096, 4096)),
        ({"architectures": ["Qwen2ForCausalLM"], **WINDOW}, (None, None, None)),
        (
            {"architectures": ["Qwen2ForCausalLM"], **WINDOW, "use_sliding_window": True},
            (None, None, 8),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                **WINDOW,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            },
            (8, None, None),
        ),
        ({"sliding_window": 8}, (None, None, None)),
    ],
)
def test_windows_follow_the_family(changes, windows):
    config = parse(**changes)
    assert config.windows == windows
    assert config.windows == windows


def test_qwen3_has_heads_of_128_unless_told():
    assert parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "relu2"}, ["'relu2'", "silu", "gelu_pytorch_tanh"]),
        ({"rope_scaling": {"type": "spiral"}}, ["'spiral'", "yarn", "llama3"]),
        ({"rope_scaling": {"type": "longrope"}}, ["longrope", "long_factor", "short_factor"]),
        ({"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ({"rope_scaling": YARN, "rope_theta": 1}, ["'yarn'", "rope_theta above 1", "found 1"]),
        ({"partial_rotary_factor": 0.2}, ["3", "16"]),
        ({"partial_rotary_factor": 1.5}, ["24", "16"]),
        ({"torch_dtype": "int8"}, ["'int8'", "bfloat16"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["'awq'"]),
        ({"architectures": ["GPT2LMHeadModel"]}, ["'GPT2LMHeadModel'", "LlamaForCausalLM"]),
        ({"architectures": []}, ["architectures"]),
        ({"hidden_size": None}, ["'hidden_size'"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"num_key_value_heads": 0}, ["'num_key_value_heads'", "above 0, found 0"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["'sliding_window'", "found 0"]),
        ({"rope_theta": 0}, ["'rope_theta'", "found 0"]),
        ({"partial_rotary_factor": 0}, ["'partial_rotary_factor'", "found 0"]),
        ({"layer_types": "full_attention"}, ["layer_types", "3 layers", "'full_attention'"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types", "3 layers", "2 types"]),
        ({"layer_types": [*["full_attention"] * 2, "linear_attention"]}, ["'linear_attention'"]),
        ({"head_dim": 15}, ["15"]),
    ],
)
def test_refusals_name_the_value_and_what_is_supported(changes, words):
    with pytest.raises(ConfigError) as error:
        parse(**changes)
    assert all(word in str(error.value) for word in words)


COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
)
NO_COUNT = ["64", 0, -1, 1.5, 1e300, 10**30, float("nan"), True, [64], {"a": 1}]
NO_NUMBER = ["0.1", 0, -1, float("nan"), float("inf"), True, [1.0]]
NO_FLAG = ["false", 1, 0.0, [True]]
NO_TOKEN = ["2", -1, 1.5, 2**40, True, [[2]], ["2"], {"a": 2}]
NO_ROPE = ["linear", 4, True, [["type", "linear"]], {"type": ["linear"]}, {"type": 5}]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, value) for key in COUNTS for value in NO_COUNT),
        *((key, value) for key in ("rope_theta", "rms_norm_eps") for value in NO_NUMBER),
        *(
            (key, value)
            for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")
            for value in NO_FLAG
        ),
        *((key, value) for key in ("eos_token_id", "bos_token_id") for value in NO_TOKEN),
        *((key, value) for key in ("rope_scaling", "rope_parameters") for value in NO_ROPE),
        *(("architectures", value) for value in ("LlamaForCausalLM", 5, True, {"a": 1})),
        *(("quantization_config", value) for value in ("awq", 5, [1])),
        ("hidden_act", ["silu"]),
        ("dtype", 5),
    ],
)
def test_a_value_of_another_kind_is_a_refusal(key, value):
    with pytest.raises(ConfigError):
        parse(**{key: value})


@pytest.mark.parametrize(
    "changes",
    [
        {"factor": 0},
        {"factor": -2.0},
        {"factor": "2"},
        {"beta_fast": 0},
        {"mscale": [1]},
        {"truncate": "yes"},
        {"original_max_position_embeddings": "64"},
    ],
)
def test_scaling_by_what_is_no_number_is_a_refusal(changes):
    with pytest.raises(ConfigError):
        parse(rope_scaling=YARN | changes)


def test_scaling_has_no_keys_but_its_own():
    """Names of our record are not names of the file."""
    given = parse(rope_scaling=YARN | {"kind": "linear", "original_max_position": 5})
    assert given == parse(rope_scaling=YARN)


def test_llama3_scaling_needs_a_band():
    band = {"low_freq_factor": 4.0, "high_freq_factor": 4.0}
    with pytest.raises(ConfigError, match="high_freq_factor"):
        parse(rope_scaling={"rope_type": "llama3", "factor": 8.0, **band})


@pytest.mark.parametrize("divisors", [[1.0] * 7, [0.0] * 8, 5])
def test_divisors_are_one_for_each_frequency(divisors):
    with pytest.raises(ConfigError, match="divisors"):
        parse(rope_scaling={"rope_type": "factors", "divisors": divisors})


LONGROPE = {"type": "su", "long_factor": [4.0] * 8, "short_factor": [1.0] * 8}


def test_longrope_depends_on_the_longest_sequence():
    config = parse(rope_scaling=LONGROPE, original_max_position_embeddings=64)
    short, long = config.for_length(64).rope_scaling, config.for_length(65).rope_scaling
    assert short is not None
    assert long is not None
    assert (short.divisors, long.divisors) == ((1.0,) * 8, (4.0,) * 8)
    assert (short.factor, short.original_max_position) == (4.0, 64)
    assert parse().for_length(1) == parse()


def test_longrope_needs_a_context_to_start_from():
    with pytest.raises(ConfigError, match="original context"):
        parse(rope_scaling=LONGROPE, original_max_position_embeddings=1)


@pytest.mark.parametrize("key", ["long_factor", "short_factor"])
@pytest.mark.parametrize("divisors", [[1.0] * 7, [0.0] * 8, 5])
def test_longrope_has_a_divisor_for_each_frequency(key, divisors):
    with pytest.raises(ConfigError, match=r"divisors|factor"):
        parse(rope_scaling=LONGROPE | {key: divisors})


def test_windows_must_match_the_layers():
    with pytest.raises(ConfigError, match="3 attention windows for 2 layers"):
        replace(parse(), num_layers=2)


def test_every_family_declares_all_its_functions():
    for architecture, family in FAMILIES.items():
        assert get_family(architecture) is family
        config = parse(architectures=[architecture], num_key_value_heads=4)
        assert len(family.specs(config).layers) == config.num_layers


@pytest.mark.parametrize(
    ("name", "declared", "platform", "dtype"),
    [
        ("auto", "bfloat16", "cpu", jnp.float32),
        ("auto", "bfloat16", "gpu", jnp.bfloat16),
        ("auto", "float32", "gpu", jnp.float16),
        ("auto", "float16", "gpu", jnp.float16),
        ("half", "bfloat16", "gpu", jnp.float16),
        ("float", "bfloat16", "cpu", jnp.float32),
    ],
)
def test_dtype_is_resolved_for_the_platform(name, declared, platform, dtype):
    assert resolve_dtype(name, parse(dtype=declared), platform) == dtype


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="'fp8'"):
        resolve_dtype("fp8", parse(), "cpu")
