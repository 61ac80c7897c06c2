"""Which family runs which architecture, and what a family must offer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import jax

from paged.attention import AttentionMetadata
from paged.cache import PagedKVCache
from paged.errors import ConfigError
from paged.models import (
    bert,
    chatglm,
    cohere,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    gemma,
    gemma2,
    gemma3,
    glm,
    glm4,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    roberta,
    smollm3,
    starcoder2,
)
from paged.models.config import ModelConfig, architecture_of, parse_config
from paged.models.encoder import EncoderParams
from paged.models.layers import DecoderParams, logits
from paged.models.quantized import quantized
from paged.models.scaled_experts import quantized_experts

Forward = Callable[
    [DecoderParams, ModelConfig, jax.Array, PagedKVCache, AttentionMetadata],
    tuple[jax.Array, PagedKVCache],
]


@dataclass(frozen=True)
class Family:
    """The functions of a model family.

    Attributes:
        defaults: what a config.json that is silent about a key means by it.
        describe: config to the description of the parameters (a pytree of `ParamSpec`) in full
            precision.
        forward: (params, config, tokens [T] int32, cache, meta) to (hidden [T, D] after the final
            norm, cache).
        logits: (params, config, hidden [R, D]) to [R, V] float32.
        configure: config.json, its gaps filled by `defaults`, to the configuration.
    """

    defaults: Mapping[str, Any]
    describe: Callable[[ModelConfig], DecoderParams]
    forward: Forward
    logits: Callable[[DecoderParams, ModelConfig, jax.Array], jax.Array]
    configure: Callable[[Mapping[str, Any]], ModelConfig] = parse_config

    def __reduce__(self) -> tuple[Callable[[str], Family], tuple[str]]:
        """For pickle: a family goes by name to another process, which has its functions."""
        names = [name for name, family in FAMILIES.items() if family is self]
        if not names:
            raise PicklingError("this model family is not in the registry")
        return get_family, (names[0],)

    def specs(self, config: ModelConfig) -> DecoderParams:
        """Description of the parameters, quantised as `config` says."""
        described = quantized_experts(self.describe(config), config.quantization)
        return quantized(described, config.quantization)


_CHATGLM = Family(chatglm.DEFAULTS, chatglm.specs, chatglm.forward, logits, chatglm.configure)

FAMILIES: dict[str, Family] = {
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "ChatGLMModel": _CHATGLM,
    "CohereForCausalLM": Family(
        cohere.DEFAULTS, cohere.specs, cohere.forward, cohere.scaled_logits, cohere.configure
    ),
    "Cohere2ForCausalLM": Family(
        cohere2.DEFAULTS, cohere2.specs, cohere2.forward, cohere2.scaled_logits, cohere2.configure
    ),
    "DeepseekV2ForCausalLM": Family(
        deepseek_v2.DEFAULTS, deepseek_v2.specs, deepseek_v2.forward, logits, deepseek_v2.configure
    ),
    "DeepseekV3ForCausalLM": Family(
        deepseek_v3.DEFAULTS, deepseek_v3.specs, deepseek_v3.forward, logits, deepseek_v3.configure
    ),
    "GemmaForCausalLM": Family(gemma.DEFAULTS, gemma.specs, gemma.forward, logits, gemma.configure),
    "Gemma2ForCausalLM": Family(
        gemma2.DEFAULTS, gemma2.specs, gemma2.forward, gemma2.capped_logits, gemma2.configure
    ),
    "Gemma3ForCausalLM": Family(
        gemma3.DEFAULTS, gemma3.specs, gemma3.forward, gemma2.capped_logits, gemma3.configure
    ),
    "GlmForCausalLM": Family(glm.DEFAULTS, glm.specs, glm.forward, logits),
    "Glm4ForCausalLM": Family(glm4.DEFAULTS, glm4.specs, glm4.forward, logits),
    "GptOssForCausalLM": Family(
        gpt_oss.DEFAULTS, gpt_oss.specs, gpt_oss.forward, logits, gpt_oss.configure
    ),
    "GraniteForCausalLM": Family(
        granite.DEFAULTS, granite.specs, granite.forward, granite.scaled_logits, granite.configure
    ),
    "LlamaForCausalLM": Family(llama.DEFAULTS, llama.specs, llama.forward, logits),
    "MinistralForCausalLM": Family(mistral.DEFAULTS, mistral.specs, mistral.forward, logits),
    "MistralForCausalLM": Family(mistral.DEFAULTS, mistral.specs, mistral.forward, logits),
    "MixtralForCausalLM": Family(
        mixtral.DEFAULTS, mixtral.specs, mixtral.forward, logits, mixtral.configure
    ),
    "Olmo2ForCausalLM": Family(olmo2.DEFAULTS, olmo2.specs, olmo2.forward, logits, olmo2.configure),
    "PhiForCausalLM": Family(phi.DEFAULTS, phi.specs, phi.forward, logits, phi.configure),
    "Phi3ForCausalLM": Family(phi3.DEFAULTS, phi3.specs, phi3.forward, logits),
    "Qwen2ForCausalLM": Family(qwen2.DEFAULTS, qwen2.specs, qwen2.forward, logits),
    "Qwen2MoeForCausalLM": Family(
        qwen2_moe.DEFAULTS, qwen2_moe.specs, qwen2_moe.forward, logits, qwen2_moe.configure
    ),
    "Qwen3ForCausalLM": Family(qwen3.DEFAULTS, qwen3.specs, qwen3.forward, logits),
    "Qwen3MoeForCausalLM": Family(
        qwen3_moe.DEFAULTS, qwen3_moe.specs, qwen3_moe.forward, logits, qwen3_moe.configure
    ),
    "SmolLM3ForCausalLM": Family(
        smollm3.DEFAULTS, smollm3.specs, smollm3.forward, logits, smollm3.configure
    ),
    "Starcoder2ForCausalLM": Family(
        starcoder2.DEFAULTS, starcoder2.specs, starcoder2.forward, logits, starcoder2.configure
    ),
}


@dataclass(frozen=True)
class Encoder:
    """The functions of a family of encoders, which `paged.models.encoder.encode` runs.

    Attributes:
        prefix: what the names of the body begin with where a checkpoint has more than the body.
        defaults, describe, configure: see `Family`.
    """

    prefix: str
    defaults: Mapping[str, Any]
    describe: Callable[[ModelConfig], EncoderParams]
    configure: Callable[[Mapping[str, Any]], ModelConfig]

    def specs(self, config: ModelConfig) -> EncoderParams:
        """Description of the parameters, quantised as `config` says."""
        return quantized(self.describe(config), config.quantization)


_BERT = Encoder(bert.PREFIX, bert.DEFAULTS, bert.specs, bert.configure)
_ROBERTA = Encoder(roberta.PREFIX, roberta.DEFAULTS, roberta.specs, roberta.configure)

ENCODERS: dict[str, Encoder] = {
    "BertModel": _BERT,
    "BertForSequenceClassification": _BERT,
    "RobertaModel": _ROBERTA,
    "RobertaForSequenceClassification": _ROBERTA,
    "XLMRobertaModel": _ROBERTA,
    "XLMRobertaForSequenceClassification": _ROBERTA,
}


def is_headless(architecture: str) -> bool:
    """Whether it is the body of a decoder, as models that give vectors are often stored."""
    return architecture not in FAMILIES and _headed(architecture) in FAMILIES


def _headed(architecture: str) -> str:
    return architecture.removesuffix("Model") + "ForCausalLM"


def get_family(architecture: str) -> Family:
    """The family of a decoder's architecture, or of that of its body.

    Raises:
        ConfigError: no family runs it.
    """
    if architecture in ENCODERS:
        raise ConfigError(f"{architecture} is an encoder, and this takes decoders alone")
    family = FAMILIES.get(architecture) or FAMILIES.get(_headed(architecture))
    if family is None:
        raise ConfigError(
            f"architecture {architecture!r} is not supported; supported: "
            f"{', '.join((*FAMILIES, *ENCODERS))}"
        )
    return family


def model_config(data: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a model from its config.json."""
    architecture = architecture_of(data)
    family = ENCODERS.get(architecture) or get_family(architecture)
    return family.configure({**family.defaults, **data})
