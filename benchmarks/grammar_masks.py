"""What forms of the output cost the host in a step: computing masks, and taking in the tokens.

    python benchmarks/grammar_masks.py --sequences 64 --vocabulary 131072

So many answers at once, each held to the same form, go from one random token to the next that the
form allows. The vocabulary is made of words. Times are those of a processor, all threads together,
whatever else runs. In an engine the masks of a step are computed while the device computes its
logits, so that they cost nothing where that takes longer; only sending them is left.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from paged.models.loading import resolve_model
from paged.runtime.grammar import grammar_of
from paged.runtime.guides import Grammars, Guide
from paged.runtime.structured_outputs import StructuredOutputsParams

STEPS, WARM_UP = 25, 5
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 0,
}
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_FORM = {"type": "json_schema", "json_schema": _PERSON}
_THOUGHTS = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
FORMS: dict[str, dict[str, Any]] = {
    "a list of records": {"json": {"type": "array", "items": _PERSON, "minItems": 100}},
    "any JSON object": {"json_object": True},
    "a regular expression": {"regex": r"([a-z]{3,10}( |, )){100}"},
    "reasoning first": {
        "structural_tag": {"format": {"type": "sequence", "elements": [_THOUGHTS, _FORM]}}
    },
}


def write_model(folder: Path, vocab_size: int) -> None:
    """A configuration, and a tokenizer of bytes and of words, with and without a space before."""
    syllables = [a + b for a, b in itertools.product("bcdfghklmnprstvw", "aeiou")]
    words = ("".join(word) for word in itertools.product(syllables, repeat=3))
    tokens = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    spelled = (each for word in words for each in (word, f"Ġ{word}"))
    tokens += itertools.islice(spelled, vocab_size - len(tokens))
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))


def measure(grammars: Grammars, grammar: str, sequences: int) -> tuple[float, float]:
    """Microseconds of a processor in a step, medians: computing the masks, taking in the tokens."""
    guides = [Guide(grammars.compile(grammar)) for _ in range(sequences)]
    rng = np.random.default_rng(0)
    times = []
    for _ in range(STEPS):
        start = time.process_time()
        masks = grammars.masks(guides)
        between = time.process_time()
        tokens = [_any_of(mask, rng) for mask in masks]
        again = time.process_time()
        for guide, token in zip(guides, tokens, strict=True):
            guide.advance(token)
        times.append((between - start, time.process_time() - again))
    assert not any(guide.error for guide in guides)
    masking, advancing = np.median(times[WARM_UP:], axis=0)
    return 1e6 * masking, 1e6 * advancing


def _any_of(mask: NDArray[np.int32], rng: np.random.Generator) -> int:
    return int(rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))))


def main() -> None:
    """Make the vocabulary and measure each form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.vocabulary)
        tokenizer = resolve_model(folder, load_format="dummy").tokenizer()
    grammars = Grammars(lambda: tokenizer, args.vocabulary, frozenset({0}))
    print(f"microseconds a step, {args.sequences} sequences, {args.vocabulary} tokens")
    for name, form in FORMS.items():
        grammar = grammar_of(StructuredOutputsParams(**form), tokenizer, args.vocabulary)
        masking, advancing = measure(grammars, grammar, args.sequences)
        print(f"  {name:22} masks {masking:8,.0f}   tokens taken in {advancing:6,.0f}", flush=True)
    grammars.close()


if __name__ == "__main__":
    main()
