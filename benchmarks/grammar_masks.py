"""What forms of the output cost the host in a step, and whether the device has something to do.

    python benchmarks/grammar_masks.py --sequences 64 --vocabulary 131072

A tiny model with a large vocabulary writes that many answers at once, each held to the same form.
Every part of a step is timed by the clock (see `host_time.py`): compute the masks, send them, take
in the tokens. All of that but the sending happens while the device computes the step's logits: only
the choice of its tokens waits. A model of real size hides it, as far as its step takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.host_time import Stopwatch
from paged.models.loading import resolve_model
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.grammar import grammar_of
from paged.runtime.guides import Grammars, Guide
from paged.runtime.messages import EngineRequest
from paged.runtime.runner import InFlight, StepRunner
from paged.runtime.sampling_params import SamplingParams
from paged.runtime.structured_outputs import StructuredOutputsParams

STEPS, WARM_UP, PROMPT, LENGTH = 40, 8, 16, 128
PARTS: tuple[tuple[Any, str, str], ...] = (
    (EngineCore, "step", "the rest of a step"),
    (Grammars, "masks", "compute the masks"),
    (StepRunner, "load_masks", "send the masks"),
    (Guide, "advance", "take in the tokens"),
    (InFlight, "read", "wait for the device"),
)
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


def measure(core: EngineCore, grammar: str, sequences: int) -> dict[str, float]:
    """Microseconds of each part of a step, medians over steps in which all sequences decode."""
    for number in range(sequences):
        params = SamplingParams(max_tokens=LENGTH, seed=number)
        prompt = [1 + number % 200] * PROMPT
        core.add(EngineRequest(f"{number}", prompt, params, 0, time.time(), "", grammar))
    while core.stats().num_running < sequences:
        core.step()
    for _ in range(WARM_UP):
        core.step()
    watch = Stopwatch()
    with ExitStack() as stack:
        for owner, name, title in PARTS:
            part = watch.timed(title, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, part))
        for _ in range(STEPS):
            core.step()
    for number in range(sequences):
        core.abort(f"{number}")
    while core.has_work:
        core.step()
    return watch.medians()


def main() -> None:
    """Start the engine and measure each form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=131_072)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.vocabulary)
        config = EngineConfig(
            model=folder,
            load_format="dummy",
            max_num_seqs=args.sequences,
            max_num_batched_tokens=max(args.sequences, 64),
            max_model_len=PROMPT + LENGTH,
            kv_cache_memory_bytes=2**28,
            compile_cache_dir="",
        )
        source = resolve_model(folder, load_format="dummy")
        core = EngineCore(config, source, progress=False)
        for name, form in FORMS.items():
            params = StructuredOutputsParams(**form)
            grammar = grammar_of(params, source.tokenizer(), args.vocabulary)
            print(f"{name}, {args.sequences} sequences, {args.vocabulary} tokens:")
            for part, microseconds in measure(core, grammar, args.sequences).items():
                print(f"  {part:20} {microseconds:8,.0f} us", flush=True)
        core.close()


if __name__ == "__main__":
    main()
