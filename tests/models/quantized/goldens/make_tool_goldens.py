"""Make the goldens of quantised checkpoints: tiny models that the formats' own tools have written.

Needs Python 3.11 or later, torch, transformers 5, accelerate, bitsandbytes and compressed-tensors;
a CPU does. Run it from the root folder:

    python -m tests.models.quantized.goldens.make_tool_goldens

Each folder holds a checkpoint and, in expected.json, a prompt and the log-probability of each of
its tokens given those before, as transformers computes them with the same weights in float32.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch  # type: ignore[import-not-found]
from compressed_tensors.compressors import ModelCompressor  # type: ignore[import-not-found]
from compressed_tensors.quantization import (  # type: ignore[import-not-found]
    QuantizationConfig,
    apply_quantization_config,
    fake_quantize,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-not-found]
    calculate_qparams,
)
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

FOLDER = Path(__file__).parent
PROMPT = [3, 90, 41, 7, 7, 65, 12, 88, 30, 5, 71, 19]
CONFIG: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
PACKED = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 32,
    "symmetric": False,
}
EIGHT = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
BY_TOKEN = {"num_bits": 8, "dynamic": True, "strategy": "token", "symmetric": True}


def plain() -> Any:
    """The model in full precision, of larger weights than usual for its answers to differ."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


def answers(model: Any) -> list[float]:
    """The log-probability of each token of the prompt but the first."""
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        logprobs = model(tokens).logits.float().log_softmax(-1)[0]
    return [round(float(logprobs[i, token]), 6) for i, token in enumerate(PROMPT[1:])]


def write(name: str, save: Callable[[Path], Any], model: Any) -> None:
    """A folder, with what a model of the same weights answers."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    save(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    expected = {"prompt": PROMPT, "logprobs": answers(model)}
    (folder / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")


def by_bitsandbytes(name: str, **settings: Any) -> None:
    """Quantised as it is loaded, then expanded by the tool itself for the reference."""
    start = FOLDER / "unquantized"
    plain().save_pretrained(start)
    config = BitsAndBytesConfig(**settings)
    load = AutoModelForCausalLM.from_pretrained
    quantized = load(start, quantization_config=config, dtype=torch.float32)
    again = load(start, quantization_config=config, dtype=torch.float32)
    write(name, quantized.save_pretrained, again.dequantize())
    shutil.rmtree(start)


def by_compressed_tensors(
    name: str, kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None
) -> None:
    """Scales from the least and largest weights; activations are in full precision here."""
    model, reference = plain(), plain()
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"], format=kind)
    apply_quantization_config(model, config)
    names = dict(reference.named_modules())
    for place, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        scheme = module.quantization_scheme.weights
        size = scheme.group_size or module.weight.shape[1]
        rows = module.weight.detach().reshape(len(module.weight), -1, size)
        scale, zero = calculate_qparams(rows.amin(-1), rows.amax(-1), scheme)
        module.weight_scale.data.copy_(scale)
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data.copy_(zero)
        kept = fake_quantize(module.weight, module.weight_scale, zero, scheme)
        names[place].weight.data.copy_(kept)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        compressor.update_config(folder)

    write(name, save, reference)


def main() -> None:
    """Write them all."""
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    by_bitsandbytes("nf4", **four)
    by_bitsandbytes("nf4_double", **four, bnb_4bit_use_double_quant=True)
    by_bitsandbytes("llm_int8", load_in_8bit=True)
    by_compressed_tensors("packed", "pack-quantized", PACKED)
    by_compressed_tensors("integers", "int-quantized", EIGHT, BY_TOKEN)
    by_compressed_tensors("floats", "float-quantized", FLOATS, BY_TOKEN)


if __name__ == "__main__":
    main()
