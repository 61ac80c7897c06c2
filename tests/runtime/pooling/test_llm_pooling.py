"""`LLM.embed` and `LLM.score` over the real device, on the tiny models of the goldens."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged.models.embedder import Embedder
from paged.models.loading import resolve_model
from paged.models.pooling import Pooling
from paged.models.weights import param_shapes
from paged.runtime import llm as llm_module
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.compiler import memory_to_run
from paged.runtime.config import EngineConfig
from paged.runtime.engine import load_engine
from paged.runtime.errors import ConfigError, EngineDead, InvalidRequest, Unsupported
from paged.runtime.llm import LLM
from paged.runtime.pooling import setup as pooling_setup
from paged.runtime.pooling.engine import wants_pooling
from paged.runtime.pooling.grid import Grid
from paged.runtime.pooling.runner import compile_programs
from paged.runtime.pooling.setup import check_memory, prepare_pooling
from tests.models.harness import load_golden, write_checkpoint
from tests.models.test_embedder_goldens import golden_of
from tests.models.test_modules import MEAN, write, write_modules
from tests.runtime.fakes import engine
from tests.runtime.pooling.pooling_fakes import letter_tokenizer

TOLERANCE = 1e-4
FLAGS: dict[str, Any] = {
    "max_model_len": 48,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
}
Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("jit"))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        golden = golden_of(name) if name != "qwen3" else load_golden(name)
        path = write_checkpoint(tmp_path / name, golden)
        letter_tokenizer().backend.save(str(path / "tokenizer.json"))
        return path

    return make


@pytest.fixture
def load(cache: str) -> Any:
    loaded: list[LLM] = []

    def make(path: Path, **flags: Any) -> LLM:
        loaded.append(LLM(str(path), compile_cache_dir=cache, **FLAGS | flags))
        return loaded[-1]

    yield make
    for each in loaded:
        each.close()


def normalized(vectors: Any) -> np.ndarray:
    return np.array(vectors) / np.linalg.norm(vectors, axis=-1, keepdims=True)


def texts(name: str, kind: str) -> tuple[list[Any], np.ndarray]:
    """Token ids of a golden's texts of one type, and their vectors."""
    found = [text for text in golden_of(name)["texts"] if not any(text["types"])]
    return [text["tokens"] for text in found], np.array([text[kind] for text in found])


def embed(llm: LLM, prompts: Any, **how: Any) -> np.ndarray:
    outputs = llm.embed(prompts, use_tqdm=False, **how)
    return np.stack([output.outputs.embedding for output in outputs])


def test_an_encoder_without_modules_gives_its_first_token(folder, load):
    llm = load(folder("roberta"))
    prompts, wanted = texts("roberta", "cls")
    np.testing.assert_allclose(embed(llm, prompts), normalized(wanted), atol=TOLERANCE)
    assert llm.get_metrics().compiles_after_warmup == 0
    assert llm.get_tokenizer().encode("a") == [0, 2, 1]


def test_modules_decide(folder, load):
    path = folder("xlm_roberta")
    write_modules(path, "Transformer", "Pooling")
    write(path, "1_Pooling/config.json", MEAN)
    write(path, "sentence_xlm-roberta_config.json", {"max_seq_length": 32})
    llm = load(path, max_model_len=None)
    prompts, wanted = texts("xlm_roberta", "mean")
    np.testing.assert_allclose(embed(llm, prompts), wanted, atol=TOLERANCE)
    with pytest.raises(InvalidRequest, match="maximum context length is 32 tokens"):
        llm.embed([[7] * 33])


@pytest.mark.parametrize("runner", ["auto", "pooling"])
def test_the_body_of_a_decoder_gives_its_last_token(folder, load, runner):
    llm = load(folder("qwen3_body"), runner=runner)
    prompts, wanted = texts("qwen3_body", "last")
    np.testing.assert_allclose(embed(llm, prompts), normalized(wanted), atol=TOLERANCE)
    longest = [5 + place % 90 for place in range(48)]
    alone = embed(llm, longest)
    np.testing.assert_allclose(embed(llm, [*prompts, longest])[-1:], alone, atol=1e-5)
    with pytest.raises(InvalidRequest, match="an input has 49 tokens"):
        llm.embed([[7] * 49])
    np.testing.assert_allclose(
        embed(llm, [[*longest, 7]], truncate_prompt_tokens=-1), alone, atol=1e-5
    )


def test_a_model_that_generates_embeds_if_it_is_told_to(folder, load):
    path = folder("qwen3")
    llm = load(path, runner="pooling")
    assert embed(llm, ["abc", "d"]).shape == (2, 64)
    assert not wants_pooling(EngineConfig(model=str(path)))
    write_modules(path, "Transformer", "Pooling", "Normalize")
    assert wants_pooling(EngineConfig(model=str(path)))
    assert not wants_pooling(EngineConfig(model=str(path), runner="generate"))


@pytest.mark.parametrize(("name", "can_make_text"), [("bert", False), ("qwen3", True)])
def test_who_wants_text_is_told_of_a_flag_only_if_it_helps(folder, name, can_make_text):
    path = folder(name)
    write_modules(path, "Transformer", "Pooling", "Normalize")
    with pytest.raises(ConfigError, match="gives embeddings or scores, not text") as caught:
        load_engine(EngineConfig(model=str(path)))
    assert ("--runner generate" in str(caught.value)) == can_make_text


def test_a_start_that_runs_out_of_memory_says_what_to_do(folder, load, monkeypatch):
    def compiled(*args: Any, **how: Any) -> dict[Any, Any]:
        return {}

    def fail(*args: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(pooling_setup, "compile_programs", compiled)
    monkeypatch.setattr(pooling_setup, "PoolingRunner", fail)
    with pytest.raises(ConfigError, match="has run out of memory while the engine was started"):
        load(folder("bert"))


@pytest.mark.parametrize(
    ("flag", "flags"),
    [
        ("--prefill-servers", {"prefill_servers": ("a:1",), "kv_offloading_size": 1.0}),
        ("--kv-transfer-port", {"kv_transfer_port": 0}),
    ],
)
def test_there_are_no_pages_to_hand_over(folder, flag, flags):
    with pytest.raises(ConfigError, match=f"{flag} is for models that generate text, and "):
        prepare_pooling(EngineConfig(**flags), resolve_model(folder("bert")))


def test_vectors_of_matryoshka_models_may_be_cut(folder, load):
    path = folder("bert")
    config = json.loads((path / "config.json").read_text())
    write(path, "config.json", config | {"matryoshka_dimensions": [8]})
    llm = load(path)
    whole = embed(llm, "abc")
    np.testing.assert_allclose(embed(llm, "abc", dimensions=8), normalized(whole[:, :8]), atol=1e-6)


def test_a_cross_encoder_scores_pairs(folder, load):
    path = folder("bert_score")
    llm = load(path)
    documents = ["abc", "zz", "", "abcdefgh" * 3]
    outputs = llm.score("query", documents, use_tqdm=False)
    assert len({tuple(output.prompt_token_ids[:7]) for output in outputs}) == 1
    scores = [output.outputs.score for output in outputs]
    assert all(0 < score < 1 for score in scores)
    pairs = llm.score(["query"] * 4, documents, use_tqdm=False)
    assert [output.outputs.score for output in pairs] == pytest.approx(scores, abs=1e-6)
    config = json.loads((path / "config.json").read_text())
    linear = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    write(path, "config.json", config | linear)
    plain = load(path).score("query", documents, use_tqdm=False)
    numbers = np.array([output.outputs.score for output in plain])
    np.testing.assert_allclose(1 / (1 + np.exp(-numbers)), scores, atol=1e-6)
    with pytest.raises(Unsupported, match="no embeddings"):
        llm.embed("abc")


def test_other_models_score_by_cosine(folder, load):
    llm = load(folder("bert"))
    [same, other] = llm.score("abc", ["abc", "xyz"], use_tqdm=False)
    first, second = embed(llm, ["abc", "xyz"])
    assert same.outputs.score == pytest.approx(1, abs=1e-5)
    assert other.outputs.score == pytest.approx(float(first @ second), abs=1e-5)


def test_nothing_gives_nothing_and_closed_is_closed(folder, load):
    llm = load(folder("bert"))
    assert llm.embed([]) == []
    with pytest.raises(InvalidRequest, match="use embed or score"):
        llm.generate("abc")
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="shut down"):
        llm.embed("abc")


def test_random_weights_need_no_checkpoint(folder, load):
    path = folder("bert")
    (path / "model.safetensors").unlink()
    assert np.isfinite(embed(load(path, load_format="dummy"), "abc")).all()


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("bert", {"runner": "generate"}, ["BertModel", "cannot generate text"]),
        ("qwen3_body", {"runner": "generate"}, ["Qwen3Model", "cannot generate text"]),
        ("bert", {"max_model_len": 65}, ["65", "64"]),
        ("roberta", {"max_model_len": 64}, ["64", "62"]),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_loaded(folder, load, name, flags, words):
    path = folder(name)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as error:
        load(path, **flags)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, ["2 labels"]),
        ({"id2label": 5}, ["'id2label'", "5"]),
        ({"position_embedding_type": "relative_key"}, ["relative_key", "'absolute'"]),
        ({"is_decoder": True}, ["is_decoder", "True"]),
        ({"hidden_act": "swish"}, ["'swish'", "gelu"]),
    ],
)
def test_encoders_that_are_not_run_are_refused(folder, load, change, words):
    path = folder("bert_score")
    config = json.loads((path / "config.json").read_text())
    write(path, "config.json", config | change)
    with pytest.raises(ConfigError) as error:
        load(path)
    assert all(word in str(error.value) for word in words)


def test_a_dense_layer_must_fit(folder, load):
    path = folder("bert")
    write_modules(path, "Transformer", "Pooling", "Dense")
    write(path, "1_Pooling/config.json", MEAN)
    write(path, "2_Dense/config.json", {"in_features": 9, "out_features": 3})
    with pytest.raises(ConfigError, match="'2_Dense' takes 9 numbers, and vectors have 72"):
        load(path)


def test_vectors_are_cut_to_no_more_than_they_have(folder, load):
    path = folder("bert")
    config = json.loads((path / "config.json").read_text())
    write(path, "config.json", config | {"matryoshka_dimensions": [8, 768]})
    with pytest.raises(ConfigError, match=r"'matryoshka_dimensions' has 768, and .* have 72"):
        load(path)


def test_weights_and_steps_must_fit_together():
    check_memory(3 * 2**30, 2**31, 2**30)
    with pytest.raises(ConfigError, match=r"2\.00 GiB.*1\.00 GiB.*2\.50 GiB"):
        check_memory(5 * 2**29, 2**31, 2**30)


def test_the_memory_of_steps_is_known(folder):
    source = resolve_model(folder("bert"))
    embedder = Embedder(source.config, Pooling("mean"))
    params = param_shapes(embedder.specs(), jnp.dtype("float32"))
    programs = compile_programs(embedder, Grid.make(16, 1, 16), params, show_progress=False)
    assert memory_to_run(programs.values()) > 16 * 100 * 4, "the inner values of a layer"


def test_an_interrupt_ends_the_request():
    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    future = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        llm_module._result(future)
    assert future.cancelled()


def test_engines_for_text_refuse_such_a_model(folder):
    with pytest.raises(ConfigError, match=r"embeddings or scores, not text.*LLM\.embed"):
        AsyncEngine(str(folder("bert")))


def test_models_that_generate_say_how_to_embed(monkeypatch):
    monkeypatch.setattr(llm_module, "load_engine", lambda config: engine())
    with LLM() as llm, pytest.raises(InvalidRequest, match='runner="pooling"'):
        llm.embed("abc")
