"""What quantising the weights of a model changes about its answers, on a text that comes along.

Each token of the text is predicted from those before it, by the model in full precision, by its
quantised forms, over caches of keys and values of fewer bits, and by checkpoints of the same model
that others quantised. The table has, for each form, the bytes of its weights; the perplexity of the
text; how far the distributions of next tokens are from those of the model in full precision (mean
Kullback-Leibler divergence, nats); and how often the likeliest token is the same.

    python benchmarks/quantized_accuracy.py
    python benchmarks/quantized_accuracy.py --model ./llama-8b --forms int4 'int4 *.down_proj'
    python benchmarks/quantized_accuracy.py --model ./smollm2 --folders ./smollm2-awq
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

import jax
import jax.numpy as jnp
import numpy as np

from paged.attention import BACKENDS, attention_metadata
from paged.cache import KV_DTYPES, PagedKVCache
from paged.models.config import ModelConfig
from paged.models.loading import ModelSource, resolve_model
from paged.models.registry import get_family
from paged.models.weights import for_device, param_bytes
from paged.runtime.config import QUANTIZATION_EXCLUDE

TEXT = Path(__file__).parent / "texts" / "accuracy.txt"
FORMS = ("gguf", "fp8", "int8", "int4", "int4 *.down_proj", "int4 *.q_proj *.o_proj")
CACHES = ("fp8", "fp8_e5m2", "int8")
PAGE_SIZE = 16
_BACKEND = "xla"  # attention is the same for all forms, and not what is measured


@dataclass(frozen=True)
class Accuracy:
    """How one form of a model does.

    Attributes:
        form: the method of quantisation, and patterns of what else is excluded from it; or that of
            the cache; or a folder.
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


@partial(jax.jit, static_argnames=("config", "kv_dtype"))
def logprobs(
    params: Any, tokens: jax.Array, *, config: ModelConfig, kv_dtype: str | None = None
) -> jax.Array:
    """Log-probabilities [T, V] float32 of what follows each of tokens [T] of one sequence.

    `kv_dtype` is a value of --kv-cache-dtype; None for that of the weights.
    """
    num_tokens = len(tokens)
    num_pages = -(-num_tokens // PAGE_SIZE)
    dtype = params.embedding.dtype if kv_dtype is None else KV_DTYPES[kv_dtype]
    cache = PagedKVCache.zeros(config.cache_spec(num_pages + 1, PAGE_SIZE, dtype))
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


def predictions(
    source: ModelSource, tokens: Sequence[int], dtype: jnp.dtype, *kv_dtypes: str | None
) -> list[np.ndarray]:
    """`logprobs` of the model as it is on disk or as `source` quantises it, for each cache."""
    params = for_device(source.load(dtype, progress=False), jax.devices()[0])
    config, given = source.config.for_length(len(tokens)), jnp.asarray(tokens, jnp.int32)
    return [np.asarray(logprobs(params, given, config=config, kv_dtype=each)) for each in kv_dtypes]


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


def forms_of(
    source: ModelSource, forms: Sequence[str], folders: Sequence[str]
) -> Iterator[tuple[str, ModelSource]]:
    """What is compared with the model in full precision, by its name in the table."""
    for form in forms:
        method, *excluded = form.split()
        if method != "gguf":
            yield form, source.quantized(method, (*QUANTIZATION_EXCLUDE, *excluded))
        elif source.in_file is not None:
            yield form, source.quantized(method, excluded)
    for folder in folders:
        yield Path(folder).name, resolve_model(folder)


def compare(
    source: ModelSource,
    tokens: Sequence[int],
    quantized: Iterator[tuple[str, ModelSource]],
    caches: Sequence[str],
    dtype: jnp.dtype,
) -> Iterator[str]:
    """The lines of the table, each as soon as it is measured."""
    yield from [
        f"{source.name}, {len(tokens)} tokens, {dtype} on {jax.devices()[0].device_kind}",
        "",
        "| weights | MB | perplexity | divergence | same token |",
        "| --- | --- | --- | --- | --- |",
    ]
    expected, *rest = predictions(source, tokens, dtype, None, *caches)
    whole = param_bytes(source.specs, dtype)
    yield measure(str(dtype), whole, expected, expected, tokens).row()
    for cache, found in zip(caches, rest, strict=True):
        yield measure(f"{dtype}, KV cache {cache}", whole, found, expected, tokens).row()
    for form, other in quantized:
        [found] = predictions(other, tokens, dtype, None)
        yield measure(form, param_bytes(other.specs, dtype), found, expected, tokens).row()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder, GGUF file or hub id; default the embedded one")
    parser.add_argument("--text", type=Path, default=TEXT, help="what is predicted")
    parser.add_argument("--dtype", default="float32", help="of what is in full precision")
    parser.add_argument(
        "--forms",
        nargs="*",
        default=FORMS,
        metavar="FORM",
        help="values of --quantization, each perhaps with patterns of what stays",
    )
    parser.add_argument(
        "--caches", nargs="*", default=CACHES, metavar="DTYPE", help="values of --kv-cache-dtype"
    )
    parser.add_argument(
        "--folders", nargs="+", default=(), metavar="FOLDER", help="quantized checkpoints of it"
    )
    args = parser.parse_args()
    source = resolve_model(args.model)
    tokens = source.tokenizer().encode(args.text.read_text(encoding="utf-8"))
    others = forms_of(source, args.forms, args.folders)
    for line in compare(source, tokens, others, args.caches, jnp.dtype(args.dtype)):
        print(line, flush=True)


if __name__ == "__main__":
    main()
