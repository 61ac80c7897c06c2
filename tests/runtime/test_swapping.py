"""A forced swap changes no token of windows, 8 bits, guided answers and searched ones.

See `test_offloading` for plain requests of other models.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from paged.runtime.beam_search import BeamSearchParams
from paged.runtime.core import EngineCore
from paged.runtime.llm import LLM
from paged.runtime.load_costs import FREE
from paged.runtime.messages import SequenceOutput
from paged.runtime.runner import StepRunner
from paged.runtime.sampling_params import SamplingParams
from tests.runtime.fakes import write_model
from tests.runtime.structured_cases import CASES
from tests.runtime.test_offloading import swap_everything
from tests.runtime.test_structured_output import FLAGS, MODEL, wish

WINDOWS = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 2, "sliding_window": 24}
PROMPTS = ["Say something: " * 4, "Say something: " * 2 + "else", "x" * 70]
STRUCTURED = [CASES["record"], CASES["prefixes"]]


@pytest.fixture(scope="module")
def llm(
    tmp_path_factory: pytest.TempPathFactory, compile_cache: str, few_programs: None
) -> Iterator[LLM]:
    folder = write_model(tmp_path_factory.mktemp("model"), MODEL | WINDOWS | {"head_dim": 16})
    more: dict[str, Any] = {
        "kv_cache_dtype": "fp8",
        "kv_offloading_size": 2**-9,
        "max_num_seqs": 4,
        "compile_cache_dir": compile_cache,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepRunner, "measure_loads", lambda runner: FREE)
        llm = LLM(model=str(folder), **FLAGS | more)
    with llm:
        yield llm


def plain(llm: LLM) -> Any:
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * len(PROMPTS)
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]


def several(llm: LLM) -> Any:
    """Continuations that share the pages of their prompt, drawn with a seed."""
    params = SamplingParams(n=3, seed=5, temperature=1.0, max_tokens=30, ignore_eos=True)
    outputs = llm.generate(PROMPTS[:1], params, use_tqdm=False)
    return [each.token_ids for each in outputs[0].outputs]


def structured(llm: LLM) -> Any:
    outputs = llm.generate(PROMPTS[:2], list(map(wish, STRUCTURED)), use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert all(case.fulfils(text) for case, text in zip(STRUCTURED, texts, strict=True))
    return texts


def searched(llm: LLM) -> Any:
    params = BeamSearchParams(beam_width=3, max_tokens=16)
    outputs = llm.beam_search(PROMPTS, params, use_tqdm=False)
    return [[beam.token_ids for beam in output.outputs] for output in outputs]


@pytest.mark.parametrize("ask", [plain, several, structured, searched])
def test_a_forced_swap_changes_no_token(
    ask: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = ask(llm)
    assert llm.reset_prefix_cache()
    before = llm.get_metrics()
    step, numbers = EngineCore.step, count(1)

    def swapping_step(core: EngineCore) -> list[SequenceOutput]:
        news = step(core)
        if next(numbers) % 5 == 0:
            swap_everything(core)
        return news

    monkeypatch.setattr(EngineCore, "step", swapping_step)
    assert ask(llm) == expected
    after = llm.get_metrics()
    assert after.host_bytes_loaded > before.host_bytes_loaded
    assert after.num_preemptions > before.num_preemptions or ask is searched
    assert after.compiles_after_warmup == 0


def test_the_model_is_what_this_is_about(llm: LLM, tmp_path: Path) -> None:
    core = llm._engine._core
    assert isinstance(core, EngineCore)
    cache = core._runner.shapes.cache
    assert cache.dtype.itemsize == 1
    assert len(cache.windows) == 2
