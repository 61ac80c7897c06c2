"""Models on several devices, in a process that has eight: what their steps answer and exchange.

    python -m tests.models.spread_cases CASES

CASES is a JSON list of `Case`s; for each it prints a line of JSON, of `Found`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paged.models.loading import ModelSource
from paged.models.loading.checkpoint import TensorInfo
from paged.models.registry import model_config
from paged.runtime.placement import COPIED, Placement
from paged.runtime.programs import abstract
from tests.models.goldens.tiny_weights import tiny_weight
from tests.models.harness import Runner, load_golden, step

# Of goldens whose heads, experts or MLPs few numbers of devices can share.
SIZES: dict[str, Any] = {
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "multi_query_group_num": 4},
    **{"intermediate_size": 128, "ffn_hidden_size": 128, "moe_intermediate_size": 64},
    **{"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16},
    **{"shared_expert_intermediate_size": 64, "vocab_size": 128, "padded_vocab_size": 128},
}
LIGHT = {"xla_backend_optimization_level": "0"}


@dataclass(frozen=True)
class Case:
    """A golden's model on so many devices.

    Attributes:
        sized: with `SIZES` instead of its own, so that it is no golden any more.
        quantization: on load, or None.
    """

    golden: str
    devices: int
    sized: bool = True
    quantization: str | None = None


@dataclass(frozen=True)
class Found:
    """What a case did.

    Attributes:
        away: the greatest difference of a log-probability from that of one device.
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


def source_of(case: Case) -> ModelSource:
    """The model of a case."""
    data = load_golden(case.golden)["config"]
    if case.sized:
        own = {key: value for key, value in SIZES.items() if key in data}
        heads = own.get("num_attention_heads")
        latent = {"num_key_value_heads": heads} if "kv_lora_rank" in data else {}
        data = data | own | latent
        if "head_dim" not in data and "kv_channels" not in data:
            data["head_dim"] = 8
    config = model_config(data)
    source = ModelSource(case.golden, config, data, {}, None, lambda: None)  # type: ignore[arg-type,return-value]
    if case.quantization:
        source = source.quantized(case.quantization, ())
    checkpoint = TinyCheckpoint(source.specs)
    return ModelSource(
        case.golden,
        source.config,
        data,
        {},
        lambda: checkpoint,
        lambda: None,  # type: ignore[arg-type,return-value]
    )


class SpreadRunner(Runner):
    """As `Runner`, on several devices."""

    def __init__(self, source: ModelSource, place: Placement) -> None:
        params = source.load(jnp.dtype(jnp.float32), progress=False, mesh=place.mesh)
        super().__init__(source.config.share(place.num_devices), params)
        self.place, self.texts = place, {}
        self._cache = place.zeros(self.spec)

    def step(self, rows: Any, *, num_tokens: int | None = None) -> np.ndarray:
        arrays, fixed = self._inputs(rows, num_tokens)
        program = self._compiled(tuple(map(len, rows.values())), arrays, fixed)
        logprobs, self._cache = program(
            self.params, self._cache, *map(np.asarray, arrays)
        )
        for slot, chunk in rows.items():
            self.contexts[slot] += len(chunk)
        return np.asarray(logprobs)[: sum(map(len, rows.values()))]

    def _compiled(self, key: Any, arrays: Any, fixed: Any) -> Any:
        if key not in self.texts:
            shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays]
            args = (abstract(self.params), self.place.cache_shapes(self.spec), *shapes)
            job = self.place.job(partial(step, **fixed), args, (1,), (COPIED, self.place.pages))
            lowered = jax.jit(job.function, donate_argnums=job.donated).lower(*job.args)
            self.texts[key] = lowered.compile(LIGHT)
        return self.texts[key]


def run(case: Case) -> Found:
    """Run a case beside one device."""
    source, golden = source_of(case), load_golden(case.golden)
    place = Placement.on(
        jax.devices()[: case.devices], latents=source.config.latent_rank is not None
    )
    prompt = golden["prompt"][:24]
    runners = (
        Runner(source.config, source.load(jnp.dtype(jnp.float32), progress=False)),
        SpreadRunner(source, place),
    )
    tables, tokens = [], []
    for runner in runners:
        table = runner.step({0: prompt})
        newest = [int(table[-1].argmax())]
        for _ in range(4):
            table = np.concatenate([table, runner.step({0: newest[-1:]})])
            newest.append(int(table[-1].argmax()))
        tables.append(table)
        tokens.append(newest)
    spread = runners[1]
    text = spread.texts[(1,)].as_text()
    chosen = tables[1][np.arange(len(prompt) - 1), prompt[1:]]
    expected = golden["prompt_logprobs"][: len(prompt) - 1]
    pages = jax.tree.leaves(spread._cache)[0].addressable_shards[0].data.shape
    held = [
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(each.params))
        for each in runners
    ]
    return Found(
        away=float(np.abs(tables[0] - tables[1]).max()),
        from_golden=None if case.sized else float(np.abs(chosen - expected).max()),
        same=tokens[0] == tokens[1],
        all_reduces=len(re.findall(r" all-reduce(?:-start)?\(", text)),
        others=len(re.findall(r" (?:all-gather|all-to-all|collective-permute|reduce-scatter)", text)),
        copies=len(re.findall(rf"= f32\[{','.join(map(str, pages))}\]\S* copy\(", text)),
        most=held[1] / held[0],
    )


if __name__ == "__main__":
    for fields in json.loads(sys.argv[1]):
        print(json.dumps(asdict(run(Case(**fields)))), flush=True)
