"""Make the goldens of models for vectors and scores, with Hugging Face transformers in float32.

Needs what `make_goldens.py` needs. Run it from the root folder:

    python -m tests.models.goldens.make_embedder_goldens [name ...]

Each file in `embedders/` holds a model's config.json, the names and shapes of its tensors (their
values come from `tiny_weights.py`), some texts (token ids, and for pairs the type of each token),
and for each text the hidden states of its first and last token, the mean of all, and a classifier's
numbers if the model has one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from tests.models.goldens.make_goldens import ODD, SIZES, config_json, set_weights

LENGTHS = (1, 7, 30)

ENCODER: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
}
# Padding may have any id; positions begin behind it.
ROBERTA = ENCODER | {"type_vocab_size": 1, "pad_token_id": 1, "layer_norm_eps": 1e-5}


def models() -> dict[str, PreTrainedModel]:
    score: dict[str, Any] = {"num_labels": 1}
    return {
        "bert": BertModel(BertConfig(**ENCODER), add_pooling_layer=False),
        "bert_tanh_gelu": BertModel(BertConfig(**ENCODER, hidden_act="gelu_new")),
        "bert_score": BertForSequenceClassification(BertConfig(**ENCODER, **score)),
        "roberta": RobertaModel(RobertaConfig(**ROBERTA)),
        "roberta_score": RobertaForSequenceClassification(RobertaConfig(**ROBERTA, **score)),
        "xlm_roberta": XLMRobertaModel(XLMRobertaConfig(**ROBERTA | {"pad_token_id": 5})),
        "xlm_roberta_score": XLMRobertaForSequenceClassification(
            XLMRobertaConfig(**ROBERTA, **score)
        ),
        "qwen3_body": Qwen3Model(Qwen3Config(**SIZES | ODD)),
    }


def draw_texts(config: Any) -> list[dict[str, list[int]]]:
    """Texts of random tokens, and their types: in the second half that of a second text."""
    draw = np.random.RandomState(0)
    second = getattr(config, "type_vocab_size", 1) - 1
    return [
        {
            "tokens": draw.randint(6, config.vocab_size, length).tolist(),
            "types": [0] * (length - length // 2) + [second] * (length // 2),
        }
        for length in LENGTHS
    ]


@torch.no_grad()
def answers(model: PreTrainedModel, text: dict[str, list[int]]) -> dict[str, list[float]]:
    inputs = {"input_ids": torch.tensor([text["tokens"]])}
    if hasattr(model.config, "type_vocab_size"):
        inputs["token_type_ids"] = torch.tensor([text["types"]])
    out = model(**inputs, output_hidden_states=True)
    if hasattr(out, "logits"):
        return {"logits": rounded(out.logits[0])}
    hidden = out.last_hidden_state[0]
    return {"cls": rounded(hidden[0]), "last": rounded(hidden[-1]), "mean": rounded(hidden.mean(0))}


def rounded(vector: torch.Tensor) -> list[float]:
    return [round(float(number), 6) for number in vector]


def golden(model: PreTrainedModel) -> dict[str, Any]:
    model = model.float().eval()
    model.set_attn_implementation("eager")
    shapes = set_weights(model)
    texts = draw_texts(model.config)
    return {
        "config": config_json(model.config, model),
        "tensors": shapes,
        "texts": [text | answers(model, text) for text in texts],
    }


def main() -> None:
    folder, known = Path(__file__).parent / "embedders", models()
    for name in sys.argv[1:] or known:
        text = json.dumps(golden(known[name]), indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
