"""A file may list models, each with flags of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paged.http import start as starting
from paged.http.api.defaults import RequestDefaults
from paged.http.api.service import Service
from paged.http.cli import main, parse
from paged.http.entries import Entry, read_entries
from paged.http.options import ServeOptions
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from paged.runtime.pooling.engine import PoolingEngine
from tests.http.fakes import FakeEngine

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]
TWO = """
port: 9000
dtype: float32
max-num-seqs: 8
models:
  - model: org/chat
    served-model-name: [chat, gpt]
    gpu_memory_utilization: 0.6
    max-num-seqs: 16
    enable-prefix-caching: false
    chat-template: "{{ a }}"
    reasoning-parser: qwen3
    response-role: model
    default-chat-template-kwargs: {style: [1, null]}
  - model: org/embedder
    kv-cache-memory: 2M
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def entries(path: Path, text: str, *argv: str) -> list[Entry]:
    path.write_text(text)
    return read_entries(parse(["serve", *argv, "--config", str(path)]))


def test_each_has_flags_of_its_own_over_those_that_are_shared(path: Path) -> None:
    chat, embedder = entries(path, TWO, "--port=9001", "--seed=3", "--max-num-seqs=4")
    assert (chat.name, chat.names, chat.config.model) == ("chat", ("chat", "gpt"), "org/chat")
    assert (embedder.names, embedder.config.model) == (("org/embedder",), "org/embedder")
    assert (chat.share, embedder.share) == (0.6, None)
    assert [each.config.kv_cache_memory_bytes for each in (chat, embedder)] == [None, 2 * 2**20]
    assert [each.config.max_num_seqs for each in (chat, embedder)] == [16, 4]
    assert [each.config.enable_prefix_caching for each in (chat, embedder)] == [False, True]
    assert {(each.config.seed, each.config.dtype) for each in (chat, embedder)} == {(3, "float32")}
    assert (chat.role, embedder.role) == ("model", "assistant")
    assert chat.defaults == RequestDefaults(chat_template_kwargs={"style": [1, None]})
    assert embedder.defaults == RequestDefaults()
    assert (chat.chat_template, embedder.chat_template) == ("{{ a }}", None)
    assert (chat.answers.reasoning_parser, embedder.answers.reasoning_parser) == ("qwen3", None)
    args = parse(["serve", "--config", str(path), "--port=9001"])
    assert read_flags(ServeOptions, args).port == 9001


def test_without_a_list_there_is_one() -> None:
    [entry] = read_entries(parse(["serve", "org/name", "--gpu-memory-utilization=0.5"]))
    assert (entry.name, entry.share) == ("org/name", 0.5)
    [entry] = read_entries(parse(["serve"]))
    assert (entry.name, entry.share) == ("SmolLM2-135M-Instruct", 0.9)


@pytest.mark.parametrize(
    ("flag", "named"),
    [
        ("org/name", "--model"),
        ("--model=org/name", "--model"),
        ("--served-model-name=a", "--served-model-name"),
        ("--gpu-memory-utilization=0.9", "--gpu-memory-utilization"),
        ("--kv-cache-memory=1g", "--kv-cache-memory"),
    ],
)
def test_what_each_must_say_cannot_be_shared(path: Path, flag: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^{named} is of one model, .* lists 2 under models"):
        entries(path, TWO, flag)
    if flag.startswith("--"):
        with pytest.raises(ConfigError, match=f"^{named} is of one model"):
            entries(path, f"{flag[2:].replace('=', ': ')}\n{TWO}")


@pytest.mark.parametrize("models", ["", "{}", "[]", "[a]", "{model: a}"])
def test_what_is_no_list_of_flags(path: Path, models: str) -> None:
    with pytest.raises(ConfigError, match="models must list the models"):
        entries(path, f"models: {models}\n")


def test_flags_of_the_server_are_not_those_of_a_model(path: Path) -> None:
    for flag in ("port: 3", "api-key: k", "root-path: /a", "no-engine-process: true"):
        with pytest.raises(ConfigError, match=r"is of the whole server, not of models\[1\]"):
            entries(path, f"models:\n  - {{model: a}}\n  - {{{flag}}}\n")


def test_a_name_is_that_of_one_model(path: Path) -> None:
    for second in ("{model: a}", "{model: b, served-model-name: [c, a]}"):
        with pytest.raises(ConfigError, match="2 models are called 'a'"):
            entries(path, f"models: [{{model: a}}, {second}]\n")


def test_a_mistake_says_where_it_is(path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        entries(path, "models: [{model: a}, {max-num-seq: 3}]\n")
    assert capsys.readouterr().err == (
        "paged serve: models[1]: error: unknown flag --max-num-seq: did you mean --max-num-seqs?\n"
    )


def test_only_a_server_has_several(path: Path, capsys: Capture) -> None:
    path.write_text(TWO.replace("port: 9000\n", ""))
    with pytest.raises(SystemExit):
        parse(["generate", "--prompt=a", "--config", str(path)])
    assert "unknown flag --models" in capsys.readouterr().err


def test_each_of_several_has_a_process(path: Path, capsys: Capture) -> None:
    path.write_text(TWO)
    argv = ["serve", "--port=0", "--host=127.0.0.1", "--no-engine-process", "--config", str(path)]
    path.write_text(TWO.replace("port: 9000\n", ""))
    assert main(argv) == 2
    assert "--no-engine-process is for one model" in capsys.readouterr().err


def test_the_documents_show_what_is_understood(path: Path) -> None:
    page = (ROOT / "docs/several_models.md").read_text()
    [example] = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    llama, bge = entries(path, example)
    assert (llama.names, llama.share) == (("llama", "default"), 0.6)
    assert (bge.config.model, bge.share) == ("BAAI/bge-m3", 0.2)


def test_each_engine_gets_its_share_and_a_process(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def start(config: EngineConfig, *, separate_process: bool, **how: Any) -> FakeEngine:
        asked.append((config.model, config.gpu_memory_utilization, separate_process))
        return FakeEngine()

    def divide(configs: Any, shares: dict[str, float | None]) -> dict[str, float]:
        assert shares == {"chat": 0.6, "org/embedder": None}
        return {"chat": 0.6, "org/embedder": 0.25}

    monkeypatch.setattr(starting, "divide", divide)
    monkeypatch.setattr(starting, "wants_pooling", lambda config: config.model == "org/embedder")
    monkeypatch.setattr(AsyncEngine, "from_config", start)
    monkeypatch.setattr(PoolingEngine, "from_config", start)
    with starting.running(entries(path, TWO), ServeOptions()) as services:
        assert [service.model_name for service in services] == ["chat", "org/embedder"]
        assert [service.role for service in services if isinstance(service, Service)] == [
            *("model", "assistant")
        ]
    assert asked == [("org/chat", 0.6, True), ("org/embedder", 0.25, True)]
