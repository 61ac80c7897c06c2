"""What config.json means to each family: its own settings, its defaults, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from paged.errors import ConfigError
from paged.models.registry import ENCODERS, FAMILIES, get_family, is_headless
from tests.models.test_model_config import NO_FLAG, NO_NUMBER, YARN, parse

LINEAR = {"rope_type": "linear", "factor": 8.0}


def parse_as(family: str, **changes: Any) -> Any:
    suffix = "ForConditionalGeneration" if family == "ChatGLM" else "ForCausalLM"
    return parse(architectures=[f"{family}{suffix}"], **changes)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("Gemma2", {}, (4096, None, 4096)),
        ("Gemma3", {"sliding_window": 8}, (8, 8, 8)),
        ("Gemma3", {"sliding_window": 8, "sliding_window_pattern": 3}, (8, 8, None)),
        ("Cohere2", {"sliding_window": 8, "num_hidden_layers": 4}, (8, 8, 8, None)),
        ("Phi3", {"sliding_window": 8}, (8, 8, 8)),
        ("Starcoder2", {"sliding_window": 8}, (8, 8, 8)),
        ("SmolLM3", {"sliding_window": 8}, (None, None, None)),
        (
            "SmolLM3",
            {"sliding_window": 8, "use_sliding_window": True, "no_rope_layers": [1, 0, 1, 0]},
            (None, 8, None),
        ),
    ],
)
def test_windows_follow_the_family(family, changes, windows):
    assert parse_as(family, **changes).windows == windows


def test_gemma_means_one_activation_by_two_names():
    assert parse_as("Gemma", hidden_act="gelu") == parse_as("Gemma")
    assert parse_as("Gemma").hidden_act == "gelu_pytorch_tanh"
    assert parse_as("Gemma2", hidden_act="gelu") == parse_as("Gemma2")


def test_gemma3_says_the_same_in_old_and_new_files():
    old = parse_as(
        "Gemma3", rope_theta=5e5, rope_local_base_freq=100.0, rope_scaling=LINEAR, sliding_window=8
    )
    new = parse_as(
        "Gemma3",
        rope_parameters={
            "full_attention": {"rope_theta": 5e5, **LINEAR},
            "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
        },
        layer_types=["sliding_attention"] * 3,
        sliding_window=8,
    )
    assert old == new
    assert (old.rope_theta, old.rope_scaling.factor, old.extras.local_theta) == (5e5, 8.0, 100.0)
    assert old.context_length == 256, "the length that scaling leads to"


def test_command_r_has_its_context_under_another_name():
    config = parse_as("Cohere", max_position_embeddings=8192, model_max_length=131072)
    assert config.context_length == 131072


def test_glm_rotates_half_of_a_head():
    config = parse_as("Glm")
    assert (config.head_dim, config.rotary_dim) == (128, 64)
    assert config.eos_token_ids == (151329, 151336, 151338)


def test_chatglm_has_other_names_for_the_same():
    config = parse_as("ChatGLM", rope_ratio=500, num_layers=4, multi_query_group_num=2)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    assert (config.head_dim, config.rotary_dim) == (128, 64)
    assert config.rope_theta == 5e6
    model = parse(architectures=["ChatGLMModel"])
    assert (model.max_position_embeddings, model.attention_bias) == (2048, False)


@pytest.mark.parametrize(
    ("interval", "rotated"), [(2, (True, False, True)), (4, (True, True, True))]
)
def test_smollm3_counts_the_layers_that_do_not_rotate(interval, rotated):
    assert parse_as("SmolLM3", no_rope_layer_interval=interval).extras.rotated == rotated


def test_deepseek_keeps_a_row_of_a_latent_and_a_rotated_key():
    config = parse_as("DeepseekV2")
    assert (config.num_heads, config.num_kv_heads) == (4, 1)
    assert (config.head_dim, config.latent_rank, config.rotary_dim) == (576, 512, 64)
    assert config.extras.attention.query_rank == 1536
    assert parse_as("DeepseekV2", q_lora_rank=None).extras.attention.query_rank is None
    odd = parse_as("DeepseekV3", kv_lora_rank=19, qk_rope_head_dim=6)
    assert (odd.head_dim, odd.latent_rank, odd.rotary_dim) == (25, 19, 6)


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 1.0),
        ({"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}, 1.2608),
        ({"factor": 40, "mscale": 1.0}, 1.0),
        ({"factor": 0.5, "mscale_all_dim": 1.0}, 1.0),
    ],
)
def test_deepseek_sharpens_attention_as_yarn_asks(changes, scale):
    config = parse_as("DeepseekV3", rope_scaling=YARN | changes)
    found = config.extras.attention.scale(config.rope_scaling) * 192**0.5
    assert found == pytest.approx(scale**2, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "sparse"),
    [
        ({}, (False, False, False, True, True)),
        ({"first_k_dense_replace": 0}, (True,) * 5),
        ({"first_k_dense_replace": None, "moe_layer_freq": 2}, (True, False, True, False, True)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (False, False, True, False, True)),
    ],
)
def test_deepseek_has_mixtures_after_its_first_layers(changes, sparse):
    assert parse_as("DeepseekV3", num_hidden_layers=5, **changes).extras.sparse == sparse


def test_deepseek_v2_chooses_by_groups_only_when_told():
    lite = parse_as("DeepseekV2", n_group=8, topk_group=3).extras.routing
    assert (lite.num_groups, lite.chosen_groups) == (1, 1)
    grouped = {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    whole = parse_as("DeepseekV2", **grouped).extras.routing
    assert (whole.num_groups, whole.chosen_groups) == (8, 3)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("DeepseekV2", {"norm_topk_prob": True}, ["norm_topk_prob", "True"]),
        ("DeepseekV2", {"scoring_func": "sigmoid"}, ["scoring_func", "'sigmoid'", "'softmax'"]),
        ("DeepseekV2", {"topk_method": "noaux_tc"}, ["topk_method", "'noaux_tc'", "'greedy'"]),
        ("DeepseekV2", {"topk_method": "group_limited_greedy"}, ["n_group"]),
        ("DeepseekV3", {"scoring_func": "softmax"}, ["scoring_func", "'softmax'", "'sigmoid'"]),
        ("DeepseekV3", {"topk_method": "greedy"}, ["topk_method", "'greedy'", "'noaux_tc'"]),
        ("DeepseekV3", {"attention_bias": True}, ["attention_bias", "True"]),
        ("DeepseekV3", {"num_key_value_heads": 2}, ["num_key_value_heads", "2", "4"]),
        ("DeepseekV3", {"n_group": 7}, ["256 experts", "n_group 7"]),
        ("DeepseekV3", {"n_group": 256, "topk_group": 16}, ["n_group 256", "2 or more"]),
        ("DeepseekV3", {"topk_group": 9}, ["topk_group 9", "n_group 8"]),
        ("DeepseekV3", {"num_experts_per_tok": 129}, ["129", "topk_group 4 groups of 32"]),
        ("DeepseekV3", {"n_shared_experts": None}, ["n_shared_experts"]),
        ("DeepseekV3", {"quantization_config": {"quant_method": "hqq"}}, ["quantized", "'hqq'"]),
        ("Gemma", {"hidden_act": "silu"}, ["hidden_act", "'silu'", "'gelu'"]),
        *(
            (family, {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"])
            for family in ("Gemma", "Gemma2", "Gemma3")
        ),
        ("Gemma2", {"hidden_activation": "relu"}, ["'relu'", "gelu_pytorch_tanh"]),
        ("Gemma3", {"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping", "50.0"]),
        (
            "Gemma3",
            {"rope_parameters": {"sliding_attention": LINEAR}},
            ["rope_type", "'linear'", "'default'"],
        ),
        ("Gemma3", {"rope_parameters": [1]}, ["rope settings", "[1]"]),
        ("Gemma3", {"rope_parameters": {"full_attention": 5}}, ["rope settings", "5"]),
        ("Llama", {"rope_parameters": {"full_attention": LINEAR}}, ["full_attention"]),
        ("Olmo2", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ("Cohere2", {"use_qk_norm": True}, ["use_qk_norm", "True"]),
        ("ChatGLM", {"add_bias_linear": True}, ["add_bias_linear", "True"]),
        ("ChatGLM", {"multi_query_attention": False}, ["multi_query_attention", "False"]),
        ("ChatGLM", {"quantization_bit": 4}, ["quantization_bit", "4"]),
        ("Phi", {"hidden_act": "relu"}, ["hidden_act", "'relu'", "'gelu_new'"]),
        ("Phi", {"qk_layernorm": True}, ["qk_layernorm", "True"]),
        ("Phi", {"tie_word_embeddings": True}, ["tie_word_embeddings", "True"]),
        ("SmolLM3", {"no_rope_layers": [1, 1]}, ["no_rope_layers", "3 layers", "[1, 1]"]),
        ("SmolLM3", {"no_rope_layers": [1, 2, 0]}, ["no_rope_layers", "[1, 2, 0]"]),
        ("SmolLM3", {"no_rope_layers": 4}, ["no_rope_layers", "4"]),
        (
            "Ministral",
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
            ["layer_types", "3 layers", "4 types"],
        ),
        (
            "Ministral",
            {"layer_types": ["chunked_attention"] * 3},
            ["layer_types", "'chunked_attention'", "sliding_attention"],
        ),
    ],
)
def test_refusals_name_the_setting_and_its_value(family, changes, words):
    with pytest.raises(ConfigError) as error:
        parse_as(family, **changes)
    assert all(word in str(error.value) for word in words)


NUMBERS = [
    *(("Gemma2", key) for key in ("query_pre_attn_scalar", "attn_logit_softcapping")),
    *(("Gemma3", key) for key in ("final_logit_softcapping", "rope_local_base_freq")),
    *(("Granite", key) for key in ("embedding_multiplier", "attention_multiplier")),
    *(("Granite", key) for key in ("residual_multiplier", "logits_scaling")),
    *(("Cohere", key) for key in ("logit_scale", "layer_norm_eps")),
    *(("DeepseekV3", key) for key in ("routed_scaling_factor", "kv_lora_rank", "moe_layer_freq")),
    *(("Starcoder2", "norm_epsilon"), ("Phi3", "partial_rotary_factor")),
    ("ChatGLM", "rope_ratio"),
    ("Phi", "layer_norm_eps"),
]
FLAGS = [("Cohere", "use_qk_norm"), ("Starcoder2", "use_bias")]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        *((*where, value) for where in NUMBERS for value in NO_NUMBER),
        *((*where, value) for where in FLAGS for value in NO_FLAG),
    ],
)
def test_a_value_of_another_kind_is_a_refusal(family, key, value):
    with pytest.raises(ConfigError):
        parse_as(family, **{key: value})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_a_configuration_is_hashable(architecture):
    """It decides what a layer is compiled for."""
    config = parse(architectures=[architecture], num_key_value_heads=4)
    assert len({config, parse(architectures=[architecture], num_key_value_heads=4)}) == 1


@pytest.mark.parametrize("architecture", ENCODERS)
def test_encoders_have_settings_of_their_own(architecture):
    config = parse(architectures=[architecture], head_dim=None)
    assert len({config, parse(architectures=[architecture])}) == 1
    roberta = "Roberta" in architecture
    assert (config.context_length, config.extras.first_position) == (
        (254, 2) if roberta else (256, 0)
    )
    assert (config.hidden_act, config.extras.num_types) == ("gelu", 2)
    with pytest.raises(ConfigError, match=f"{architecture} is an encoder"):
        get_family(architecture)


def test_a_decoder_may_be_stored_without_its_head():
    config = parse(architectures=["Qwen3Model"], num_key_value_heads=2)
    assert get_family(config.architecture) is FAMILIES["Qwen3ForCausalLM"]
    assert is_headless("Qwen3Model")
    assert not is_headless("Qwen3ForCausalLM")
    assert not is_headless("T5Model")
