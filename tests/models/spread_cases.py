"""Models on several devices, in a process that has eight: what their steps answer and exchange.

    python -m tests.models.spread_cases CASES

CASES is a JSON list of `Case`s; for each it prints a line of JSON, of `Found`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from paged.models.loading import ModelSource, resolve_model
from paged.models.loading.checkpoint import TensorInfo
from paged.models.registry import model_config
from paged.models.tokenizer import Tokenizer
from paged.runtime.placement import COPIED, Placement
from paged.runtime.programs import abstract
from tests.models.goldens.tiny_weights import tiny_weight
from tests.models.harness import Runner, load_golden, step
from tests.models.quantized.packers import write_pair
from tests.models.quantized.test_published import BOTH_SIDES, WEIGHT_ONLY

# Of goldens whose heads, experts or MLPs few numbers of devices can share.
SIZES: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "multi_query_group_num": 4,
    "intermediate_size": 256,
    "ffn_hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 128,
    "padded_vocab_size": 128,
}
F32 = jnp.dtype(jnp.float32)
LIGHT = {"xla_backend_optimization_level": "0"}
PROMPT, ANSWER = 24, 4
OTHERS = r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)"


@dataclass(frozen=True)
class Case:
    """A golden's model on so many devices.

    Attributes:
        sized: with `SIZES` instead of its own, so that it is no golden any more.
        quantization: on load, or None.
        published: how others have quantised it, or None.
        kv_dtype: of pages.
    """

    golden: str
    devices: int
    sized: bool = True
    quantization: str | None = None
    published: str | None = None
    kv_dtype: str = "float32"


@dataclass(frozen=True)
class Found:
    """What a case did.

    Attributes:
        away: the greatest difference of a log-probability from that of one device, as a share of
            the greatest one: rounding, which is no mistake, grows with them.
        from_golden: from that of transformers; None for other sizes.
        same: whether greedy tokens are those of one device.
        all_reduces, others: collectives of a decode step.
        copies: of whole pages in a decode step.
        most: share of all weights that a device holds, at most.
    """

    away: float
    from_golden: float | None
    same: bool
    all_reduces: int
    others: int
    copies: int
    most: float


class TinyCheckpoint:
    """Tensors as the parts of a description want them, drawn by name."""

    def __init__(self, specs: Any) -> None:
        parts = {part.name: part for spec in jax.tree.leaves(specs) for part in spec.parts}
        self._parts = parts

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(part.shape, "memory") for name, part in self._parts.items()}

    def read(self, name: str) -> np.ndarray:
        return tiny_weight(name, self._parts[name].shape)


def source_of(case: Case, folder: Path) -> ModelSource:
    """The model of a case, in a folder if it is published."""
    data = load_golden(case.golden)["config"]
    if case.sized:
        latent = "kv_lora_rank" in data  # these have a key/value head for each head
        data |= {key: value for key, value in SIZES.items() if key in data}
        data |= {"num_key_value_heads": data["num_attention_heads"]} if latent else {}
        data.setdefault("head_dim", 8)
    if case.quantization:
        data["hidden_size"] = 128  # whole groups
        if case.sized and "kv_lora_rank" not in data:
            data["head_dim"] = 32
    config = model_config(data)
    source = ModelSource(case.golden, config, data, {}, None, no_tokenizer)
    if case.quantization:
        source = source.quantized(case.quantization, ())
    checkpoint = TinyCheckpoint(source.specs)
    if case.published:
        settings, packer = (WEIGHT_ONLY | BOTH_SIDES)[case.published]
        shapes = {name: each.shape for name, each in checkpoint.tensors.items()}
        golden = {"config": data, "tensors": shapes}
        return resolve_model(write_pair(folder, golden, settings, lambda _: packer)[0])
    return replace(source, open_checkpoint=lambda: checkpoint)


def no_tokenizer() -> Tokenizer:
    raise AssertionError("token ids are enough here")


class SpreadRunner(Runner):
    """As `Runner`, on several devices.

    Attributes:
        programs: by the tokens of each row.
    """

    def __init__(self, source: ModelSource, place: Placement, kv_dtype: str) -> None:
        params = source.load(F32, progress=False, mesh=place.mesh)
        super().__init__(source.config.share(place.num_devices), params, kv_dtype=kv_dtype)
        self.place = place
        self.programs: dict[tuple[int, ...], Compiled] = {}
        self._cache = place.zeros(self.spec)

    def step(
        self, rows: Mapping[int, Sequence[int]], *, num_tokens: int | None = None
    ) -> np.ndarray:
        arrays, fixed = self._inputs(rows, num_tokens)
        key = tuple(map(len, rows.values()))
        if key not in self.programs:
            self.programs[key] = self._compiled(arrays, fixed)
        inputs = map(np.asarray, arrays)
        logprobs, self._cache = self.programs[key](self.params, self._cache, *inputs)
        for slot, chunk in rows.items():
            self.contexts[slot] += len(chunk)
        return np.asarray(logprobs)

    def _compiled(self, arrays: Sequence[jax.Array], fixed: Mapping[str, Any]) -> Compiled:
        args = (abstract(self.params), self.place.cache_shapes(self.spec), *abstract(arrays))
        job = self.place.job(partial(step, **fixed), args, (1,), (COPIED, self.place.pages))
        lowered = jax.jit(job.function, donate_argnums=job.donated).lower(*job.args)
        return lowered.compile(LIGHT)

    @property
    def page_shape(self) -> str:
        """Of an array of pages on each device, as XLA writes it."""
        first = jax.tree.leaves(self._cache)[0].addressable_shards[0].data
        return ",".join(map(str, first.shape))


def answered(runner: Runner, prompt: list[int]) -> tuple[np.ndarray, list[int]]:
    """Log-probabilities [T, V] of a prompt and of what follows it greedily, and the latter."""
    table = runner.step({0: prompt})
    tokens = [int(table[-1].argmax())]
    for _ in range(ANSWER):
        table = np.concatenate([table, runner.step({0: tokens[-1:]})])
        tokens.append(int(table[-1].argmax()))
    return table, tokens


def held(params: Any) -> int:
    """Bytes of parameters on the first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))


def run(case: Case, folder: Path) -> Found:
    """Run a case beside one device."""
    source, golden = source_of(case, folder), load_golden(case.golden)
    place = Placement.on(
        jax.devices()[: case.devices], latents=source.config.latent_rank is not None
    )
    params = source.load(F32, progress=False)
    alone = Runner(source.config, params, kv_dtype=case.kv_dtype)
    spread = SpreadRunner(source, place, case.kv_dtype)
    prompt = [token % source.config.vocab_size for token in golden["prompt"][:PROMPT]]
    expected, tokens = answered(alone, prompt)
    table, others = answered(spread, prompt)
    text = spread.programs[(1,)].as_text() or ""
    from_golden = None
    if not case.sized:  # else it is another model, of fewer tokens perhaps
        chosen = table[np.arange(PROMPT - 1), prompt[1:]]
        from_golden = float(np.abs(chosen - golden["prompt_logprobs"][: PROMPT - 1]).max())
    return Found(
        away=float(np.abs(table - expected).max() / np.abs(expected).max()),
        from_golden=from_golden,
        same=tokens == others,
        all_reduces=len(re.findall(r" all-reduce(?:-start)?\(", text)),
        others=len(re.findall(OTHERS, text)),
        copies=len(re.findall(rf"= f32\[{spread.page_shape}\]\S* copy\(", text)),
        most=held(spread.params) / held(alone.params),
    )


if __name__ == "__main__":
    for fields in json.loads(sys.argv[1]):
        with TemporaryDirectory() as folder:
            done = run(Case(**fields), Path(folder))
        sys.stdout.write(json.dumps(asdict(done)) + "\n")
        sys.stdout.flush()
