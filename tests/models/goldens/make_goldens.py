"""Make the goldens: what Hugging Face transformers computes for tiny models of each family.

Needs Python 3.11 or later, torch and transformers 5 (a CPU does). Run it from the root folder:

    python -m tests.models.goldens.make_goldens [name ...]

Each file holds a model's config.json, the names and shapes of its tensors (their values come from
`tiny_weights.py`), a prompt, the log-probability of each of its tokens given those before, the
greedy continuation with its log-probabilities, and how far transformers' own log-probabilities of
all these tokens are off (mean and maximum) if it computes in bfloat16.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from tests.models.goldens.tiny_weights import tiny_weight

PROMPT_LENGTH = 57
NEW_TOKENS = 16
PROMPTS = 20  # tried
# Greedy choices closer than this could differ for rounding alone.
SMALLEST_LEAD = 1e-3

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Sizes that divide each other as little as they may.
ODD: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 20,
}
COHERE = {"layer_norm_eps": 1e-3, "logit_scale": 0.3}
# Mixtures of experts, as Qwen's files tell of them. Rounding may change who is chosen last: of
# many, that is who counts least.
MOE = {"num_experts": 9, "num_experts_per_tok": 6, "moe_intermediate_size": 40}
HALF = {"partial_rotary_factor": 0.5}
# Sizes that the kernels for Hopper take: heads of 64 elements, and weights worth their while.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}


def llama(**changes: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


def mistral(**changes: Any) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SIZES | {"sliding_window": None} | changes))


def mixtral(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | ODD | {"num_local_experts": 7, "num_experts_per_tok": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes | changes))


def qwen2(**changes: Any) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | changes))


def qwen3(**changes: Any) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES | {"head_dim": 32} | changes))


def qwen2_moe(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | MOE | {"shared_expert_intermediate_size": 88}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**sizes | changes))


def qwen3_moe(**changes: Any) -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | ODD | MOE | changes))


def gemma(**changes: Any) -> PreTrainedModel:
    return GemmaForCausalLM(GemmaConfig(**SIZES | ODD | changes))


def gemma2(**changes: Any) -> PreTrainedModel:
    capped = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 15.0}
    sizes = SIZES | ODD | {"query_pre_attn_scalar": 7, "sliding_window": 8} | capped
    return Gemma2ForCausalLM(Gemma2Config(**sizes | changes))


def gemma3(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | ODD | {"query_pre_attn_scalar": 7, "sliding_window": 8}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes | changes))


def phi(**changes: Any) -> PreTrainedModel:
    odd = {key: value for key, value in ODD.items() if key != "head_dim"}
    turning = {"rope_parameters": rope("default", **HALF)}
    return PhiForCausalLM(PhiConfig(**SIZES | odd | {"layer_norm_eps": 1e-3} | turning | changes))


def phi3(**changes: Any) -> PreTrainedModel:
    odd = {key: value for key, value in ODD.items() if key != "head_dim"}
    return Phi3ForCausalLM(Phi3Config(**SIZES | odd | {"pad_token_id": 0} | changes))


def longrope(original: int) -> dict[str, Any]:
    """Settings of Phi-3 for a context of 256 tokens, of which `original` were trained first."""
    factors = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 2.5, 4.0]}
    scaling = rope("longrope", partial_rotary_factor=0.5, **factors)
    return {"rope_parameters": scaling, "original_max_position_embeddings": original}


def olmo2(**changes: Any) -> PreTrainedModel:
    return Olmo2ForCausalLM(Olmo2Config(**SIZES | ODD | {"pad_token_id": 0} | changes))


def gpt_oss(**changes: Any) -> PreTrainedModel:
    mixture = {"num_local_experts": 7, "num_experts_per_tok": 5, "swiglu_limit": 1.5}
    sizes = SIZES | ODD | mixture | {"sliding_window": 8}
    return GptOssForCausalLM(GptOssConfig(**sizes | changes))


def granite(**changes: Any) -> PreTrainedModel:
    factors = {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
        "logits_scaling": 2.0,
    }
    return GraniteForCausalLM(GraniteConfig(**SIZES | ODD | factors | changes))


def cohere(**changes: Any) -> PreTrainedModel:
    return CohereForCausalLM(CohereConfig(**SIZES | ODD | COHERE | changes))


def cohere2(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | ODD | COHERE | {"sliding_window": 8}
    return Cohere2ForCausalLM(Cohere2Config(**sizes | changes))


def starcoder2(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | ODD | {"norm_epsilon": 1e-3}
    return Starcoder2ForCausalLM(Starcoder2Config(**sizes | changes))


def smollm3(**changes: Any) -> PreTrainedModel:
    return SmolLM3ForCausalLM(SmolLM3Config(**SIZES | ODD | {"pad_token_id": 0} | changes))


def glm(**changes: Any) -> PreTrainedModel:
    return GlmForCausalLM(GlmConfig(**SIZES | ODD | {"pad_token_id": 0} | changes))


class ChatGLMModel(GlmForCausalLM):
    """GLM-4-9B as first released, whose own code is not in transformers.

    It computes what GlmForCausalLM does. What differs are the names of settings and tensors, and
    that queries, keys and values are one tensor (see `chatglm_tensors`, `chatglm_config`).
    """


def chatglm(**changes: Any) -> PreTrainedModel:
    sizes = SIZES | ODD | {"pad_token_id": 0, "rope_parameters": rope("default", **HALF)}
    return ChatGLMModel(GlmConfig(**sizes | changes))


def glm4(**changes: Any) -> PreTrainedModel:
    return Glm4ForCausalLM(Glm4Config(**SIZES | ODD | {"pad_token_id": 0} | changes))


def ministral(**changes: Any) -> PreTrainedModel:
    return MinistralForCausalLM(MinistralConfig(**SIZES | ODD | changes))


def rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


def models() -> dict[str, PreTrainedModel]:
    llama3 = rope(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=128,
    )
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=64)
    mscale = yarn | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16, "truncate": False}
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    return {
        "llama": llama(),
        "llama_wide": llama(**WIDE),
        "llama_bias": llama(attention_bias=True, mlp_bias=True),
        "llama_tied": llama(tie_word_embeddings=True),
        "llama_rope_dynamic": llama(rope_parameters=rope("dynamic", factor=2.0)),
        "llama_rope_linear": llama(rope_parameters=rope("linear", factor=4.0)),
        "llama_rope_llama3": llama(rope_parameters=llama3),
        "llama_rope_yarn": llama(rope_parameters=yarn),
        "llama_rope_yarn_mscale": llama(rope_parameters=mscale),
        "mistral": mistral(head_dim=32),
        "mistral_window": mistral(sliding_window=8),
        "mixtral": mixtral(),
        "mixtral_window_tied": mixtral(sliding_window=8, tie_word_embeddings=True),
        "qwen2": qwen2(),
        "qwen2_window": qwen2(**window),
        "qwen3": qwen3(),
        "qwen3_bias_tied": qwen3(attention_bias=True, tie_word_embeddings=True),
        "qwen2_moe": qwen2_moe(),
        "qwen2_moe_normed_plain_layer": qwen2_moe(
            norm_topk_prob=True, mlp_only_layers=[0], qkv_bias=False
        ),
        "qwen3_moe": qwen3_moe(norm_topk_prob=True),
        "qwen3_moe_sparse_step_bias_tied": qwen3_moe(
            decoder_sparse_step=2, attention_bias=True, tie_word_embeddings=True
        ),
        "gemma": gemma(),
        "gemma_bias_untied": gemma(attention_bias=True, tie_word_embeddings=False),
        "gemma2": gemma2(),
        "gemma2_uncapped_bias": gemma2(
            attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True
        ),
        "gemma3": gemma3(num_hidden_layers=6),
        "gemma3_scaled_bias": gemma3(
            rope_parameters={
                "full_attention": rope("linear", factor=4.0),
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            layer_types=["full_attention", "sliding_attention"],
            final_logit_softcapping=15.0,
            attention_bias=True,
            tie_word_embeddings=False,
        ),
        "phi": phi(),
        "phi3": phi3(sliding_window=8),
        "phi3_longrope_short_tied": phi3(**longrope(128), tie_word_embeddings=True),
        "phi3_longrope_long": phi3(**longrope(32)),
        "olmo2": olmo2(),
        "olmo2_bias_tied": olmo2(attention_bias=True, tie_word_embeddings=True),
        "gpt_oss": gpt_oss(),
        "gpt_oss_plain_rope_tied": gpt_oss(
            rope_parameters=rope("default"), attention_bias=False, tie_word_embeddings=True
        ),
        "granite": granite(),
        "granite_bias_tied": granite(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
        "cohere": cohere(),
        "cohere_qk_norm_bias_untied": cohere(
            use_qk_norm=True, attention_bias=True, tie_word_embeddings=False
        ),
        "cohere2": cohere2(sliding_window_pattern=2),
        "starcoder2": starcoder2(sliding_window=8),
        "starcoder2_plain_untied": starcoder2(use_bias=False, tie_word_embeddings=False),
        "smollm3": smollm3(no_rope_layer_interval=2),
        "smollm3_window_bias_untied": smollm3(
            no_rope_layers=[0, 1],
            use_sliding_window=True,
            sliding_window=8,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=False,
        ),
        "glm": glm(),
        "glm_plain_tied": glm(attention_bias=False, tie_word_embeddings=True),
        "chatglm": chatglm(),
        "chatglm_plain_long": chatglm(
            attention_bias=False,
            rope_parameters=rope("default", **HALF) | {"rope_theta": 500000.0},
        ),
        "glm4": glm4(),
        "ministral": ministral(
            sliding_window=8, layer_types=["full_attention", "sliding_attention"]
        ),
    }


@torch.no_grad()
def set_weights(model: PreTrainedModel) -> dict[str, list[int]]:
    """Give every parameter its drawn values; returns names and shapes."""
    shapes = {}
    for name, tensor in stored_tensors(model).items():
        tensor.copy_(torch.from_numpy(tiny_weight(name, tuple(tensor.shape))))
        shapes[name] = list(tensor.shape)
    return shapes


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """What a checkpoint stores, as views of the parameters."""
    if isinstance(model, ChatGLMModel):
        return chatglm_tensors(model)
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors |= stored(name, parameter, model.config.model_type)
    return tensors


CHATGLM_NAMES = {
    "model.embed_tokens": "transformer.embedding.word_embeddings",
    "model.layers": "transformer.encoder.layers",
    "model.norm": "transformer.encoder.final_layernorm",
    "lm_head": "transformer.output_layer",
    "self_attn.o_proj": "self_attention.dense",
    "mlp.gate_up_proj": "mlp.dense_h_to_4h",
    "mlp.down_proj": "mlp.dense_4h_to_h",
}


def chatglm_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """As `stored_tensors`; queries, keys and values are made views of what is stored for all."""
    tensors = {}
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        for kind in ("weight", "bias") if attention.q_proj.bias is not None else ("weight",):
            parts = [getattr(each, kind) for each in projections]
            joined = torch.cat([part.data for part in parts])
            for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
                part.data = view
            prefix = f"transformer.encoder.layers.{index}.self_attention"
            tensors[f"{prefix}.query_key_value.{kind}"] = joined
    for name, parameter in model.named_parameters():
        if not any(f".{part}_proj." in name for part in "qkv"):
            for ours, theirs in CHATGLM_NAMES.items():
                name = name.replace(ours, theirs)
            tensors[name] = parameter
    return tensors


def chatglm_config(config: Any) -> dict[str, Any]:
    return {
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "apply_residual_connection_post_layernorm": False,
        "eos_token_id": config.eos_token_id,
        "ffn_hidden_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "multi_query_attention": True,
        "multi_query_group_num": config.num_key_value_heads,
        "num_attention_heads": config.num_attention_heads,
        "num_layers": config.num_hidden_layers,
        "original_rope": True,
        "padded_vocab_size": config.vocab_size,
        "post_layer_norm": True,
        "rmsnorm": True,
        "rope_ratio": config.rope_parameters["rope_theta"] / 10000,
        "seq_length": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }


def stored(name: str, parameter: torch.Tensor, model_type: str) -> dict[str, torch.Tensor]:
    """What a checkpoint stores of a parameter, as views: a tensor for each part of each expert."""
    gate, up, down = ("gate_proj", "up_proj", "down_proj")
    if model_type == "mixtral":
        gate, up, down = ("w1", "w3", "w2")
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if model_type == "gpt_oss":  # whose checkpoints have all experts in one
        return {name: parameter}
    prefix, _, kind = name.rpartition(".experts.")
    views: dict[str, torch.Tensor] = {}
    for expert, weight in enumerate(parameter if prefix else ()):
        names = {"gate_up_proj": (gate, up), "down_proj": (down,)}[kind]
        parts = zip(names, weight.chunk(len(names)), strict=True)
        views |= {f"{prefix}.experts.{expert}.{part}.weight": view for part, view in parts}
    return views or {name: parameter}


@torch.no_grad()
def round_weights(model: PreTrainedModel) -> None:
    """Let the model compute in bfloat16. Its rotary frequencies stay as precise as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.float(), dim=-1).numpy()


def continue_greedily(model: PreTrainedModel, prompt: list[int]) -> list[int] | None:
    """The likeliest next tokens; None if two are ever too close to tell."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        last = log_probabilities(model, tokens)[-1]
        second, first = np.sort(last)[-2:]
        if first - second < SMALLEST_LEAD:
            return None
        tokens.append(int(last.argmax()))
    return tokens[len(prompt) :]


def clear_prompt(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    """The first of the random prompts that has a clear continuation, and that."""
    for seed in range(PROMPTS):
        draw = np.random.RandomState(seed).randint(3, model.config.vocab_size, PROMPT_LENGTH)
        prompt = draw.tolist()
        greedy = continue_greedily(model, prompt)
        if greedy is not None:
            return prompt, greedy
    raise AssertionError("two tokens are too close, whatever the prompt")


def config_json(config: PreTrainedConfig, model: PreTrainedModel) -> dict[str, Any]:
    data = json.loads(config.to_json_string())
    if isinstance(model, ChatGLMModel):
        data = chatglm_config(config)
    return data | {"architectures": [type(model).__name__], "dtype": "float32"}


def chosen(table: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Log-probability of each token after the first, from the rows [T, V] before it."""
    return table[np.arange(len(tokens) - 1), tokens[1:]]


def golden(model: PreTrainedModel) -> dict[str, Any]:
    model = model.float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    shapes = set_weights(model)
    prompt, greedy = clear_prompt(model)
    tokens = prompt + greedy
    exact = chosen(log_probabilities(model, tokens), tokens)
    logprobs = [round(float(value), 6) for value in exact]
    config = config_json(model.config, model)
    round_weights(model)
    error = np.abs(chosen(log_probabilities(model, tokens), tokens) - exact)
    return {
        "config": config,
        "tensors": shapes,
        "prompt": prompt,
        "prompt_logprobs": logprobs[: len(prompt) - 1],
        "greedy": greedy,
        "greedy_logprobs": logprobs[len(prompt) - 1 :],
        "bfloat16_error": {
            "mean": round(float(error.mean()), 6),
            "max": round(float(error.max()), 6),
        },
    }


def main() -> None:
    folder, known = Path(__file__).parent, models()
    for name in sys.argv[1:] or known:
        text = json.dumps(golden(known[name]), indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
