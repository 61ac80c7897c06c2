"""What quantising the weights of a model changes about its answers, on a text that comes along.

Each token of the text is predicted from those before it, by the model in full precision and by its
quantised forms. The table has, for each form, the bytes of its weights; the perplexity of the text;
how far the distributions of next tokens are from those of the model in full precision (mean
Kullback-Leibler divergence, nats); and how often the likeliest token is the same.

    python benchmarks/quantized_accuracy.py
    python benchmarks/quantized_accuracy.py --model ./llama-8b --forms int4 'int4 *.down_proj'
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from paged.attention import BACKENDS, attention_metadata
from paged.cache import PagedKVCache
from paged.models.config import ModelConfig
from paged.models.loading import ModelSource, resolve_model
from paged.models.registry import get_family
from paged.models.weights import for_device, param_bytes
from paged.runtime.config import QUANTIZATION_EXCLUDE

TEXT = Path(__file__).parent / "texts" / "accuracy.txt"
FORMS = ("fp8", "int8", "int4", "int4 *.down_proj", "int4 *.q_proj *.o_proj")
PAGE_SIZE = 16
_BACKEND = "xla"  # attention is the same for all forms, and not what is measured


@dataclass(frozen=True)
class Accuracy:
    """How one form of a model does.

    Attributes:
        form: the method of quantisation, and patterns of what else is excluded from it.
        weights: bytes.
        perplexity: of the text.
        divergence: from the distributions in full precision, mean over tokens, nats.
        agreement: share of the tokens whose likeliest successor is the same.
    """

    form: str
    weights: int
    perplexity: float
    divergence: float
    agreement: float

    def row(self) -> str:
        """As a row of the table."""
        return (
            f"| {self.form} | {self.weights / 1e6:.1f} | {self.perplexity:.3f} | "
            f"{self.divergence:.5f} | {self.agreement:.1%} |"
        )


@partial(jax.jit, static_argnames="config")
def logprobs(params: Any, tokens: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Log-probabilities [T, V] float32 of what follows each of tokens [T] of one sequence."""
    num_tokens = len(tokens)
    num_pages = -(-num_tokens // PAGE_SIZE)
    cache = PagedKVCache.zeros(config.cache_spec(num_pages + 1, PAGE_SIZE, params_dtype(params)))
    meta = attention_metadata(
        jnp.arange(1, num_pages + 1, dtype=jnp.int32)[None],
        jnp.zeros(1, jnp.int32),
        jnp.full(1, num_tokens, jnp.int32),
        jnp.zeros(1, jnp.int32),
        num_tokens=num_tokens,
        page_size=PAGE_SIZE,
        tile_size=BACKENDS[_BACKEND]().tile_size,
        decode_only=False,
        backend=_BACKEND,
    )
    family = get_family(config.architecture)
    hidden, _ = family.forward(params, config, tokens, cache, meta)
    return jax.nn.log_softmax(family.logits(params, config, hidden))


def params_dtype(params: Any) -> jnp.dtype:
    """The dtype of what is in full precision."""
    return params.embedding.dtype


def predictions(source: ModelSource, tokens: Sequence[int], dtype: jnp.dtype) -> np.ndarray:
    """`logprobs` of the model as it is on disk or as `source` quantises it."""
    params = for_device(source.load(dtype, progress=False), jax.devices()[0])
    config = source.config.for_length(len(tokens))
    return np.asarray(logprobs(params, jnp.asarray(tokens, jnp.int32), config=config))


def measure(
    form: str, weights: int, found: np.ndarray, expected: np.ndarray, tokens: Sequence[int]
) -> Accuracy:
    """Compare predictions [T, V] with those in full precision."""
    following = found[np.arange(len(tokens) - 1), tokens[1:]]
    return Accuracy(
        form=form,
        weights=weights,
        perplexity=float(np.exp(-following.mean())),
        divergence=float((np.exp(expected) * (expected - found)).sum(axis=-1).mean()),
        agreement=float((found.argmax(axis=-1) == expected.argmax(axis=-1)).mean()),
    )


def compare(source: ModelSource, text: str, forms: Sequence[str], dtype: jnp.dtype) -> list[str]:
    """The lines of the table."""
    tokens = source.tokenizer().encode(text)
    lines = [
        f"{source.name}, {len(tokens)} tokens, {dtype} on {jax.devices()[0].device_kind}",
        "",
        "| weights | MB | perplexity | divergence | same token |",
        "| --- | --- | --- | --- | --- |",
    ]
    expected = predictions(source, tokens, dtype)
    whole = param_bytes(source.specs, dtype)
    lines.append(measure(str(dtype), whole, expected, expected, tokens).row())
    for form in forms:
        method, *excluded = form.split()
        quantized = source.quantized(method, (*QUANTIZATION_EXCLUDE, *excluded))
        size = param_bytes(quantized.specs, dtype)
        found = predictions(quantized, tokens, dtype)
        lines.append(measure(form, size, found, expected, tokens).row())
    return lines


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, GGUF file or hub id; default the embedded one")
    parser.add_argument("--text", type=Path, default=TEXT, help="what is predicted")
    parser.add_argument("--dtype", default="float32", help="of what is in full precision")
    parser.add_argument(
        "--forms",
        nargs="+",
        default=FORMS,
        metavar="FORM",
        help="values of --quantization, each perhaps with patterns of what stays",
    )
    args = parser.parse_args()
    source = resolve_model(args.model)
    text = args.text.read_text(encoding="utf-8")
    print("\n".join(compare(source, text, args.forms, jnp.dtype(args.dtype))))


if __name__ == "__main__":
    main()
