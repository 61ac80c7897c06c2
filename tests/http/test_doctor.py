"""`paged doctor`: every check with machines that are well and with such as are not."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from paged.http.cli import main
from paged.http.doctor import check_keys, check_port
from paged.http.options import ServeOptions
from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import DeviceMemory
from paged.runtime.doctor import gpus, jax_install, machine, model
from paged.runtime.doctor.finding import Finding, any_wrong, report
from paged.runtime.doctor.gpus import Ask, Card, cards
from paged.runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]
GIB = 2**30
H200 = Card(0, "NVIDIA H200", "580.65.06", 143_771 * 2**20, 600 * 2**20, "9.0")
LLAMA = str(ROOT / "benchmarks" / "models" / "llama-3.1-8b")
Capture = pytest.CaptureFixture[str]


def statuses(findings: Iterator[Finding]) -> list[str]:
    return [each.status for each in findings]


def driver(text: str, processes: str = "") -> Ask:
    """A driver that says this of its GPUs, and of what runs on them."""

    def ask(arguments: Sequence[str]) -> str | None:
        return processes if any("compute-apps" in each for each in arguments) else text

    return ask


def test_cards_are_what_the_driver_says() -> None:
    told = "0, NVIDIA H200, 580.65.06, 143771, 600, 9.0\n1, NVIDIA L4, 580.65.06, 23034, 0, 8.9\n"
    assert cards(driver(told))[0] == H200
    assert [card.index for card in cards(driver(told))] == [0, 1]
    assert cards(lambda arguments: None) == []
    shared = "0, NVIDIA GB10, 580.95, [N/A], [N/A], 12.1\n"
    assert cards(driver("No devices were found\n")) == []
    assert cards(driver(shared)) == [Card(0, "NVIDIA GB10", "580.95", 0, 0, "12.1")]


def test_a_machine_without_a_gpu_is_no_fault(tmp_path: Path) -> None:
    absent, there = tmp_path / "absent", tmp_path / "nvidiactl"
    there.touch()
    assert statuses(gpus.check_driver([], absent)) == ["warning"]
    assert statuses(gpus.check_driver([], there)) == ["wrong"]
    assert statuses(gpus.check_driver([H200], there)) == ["ok"]
    old = Card(0, "Tesla T4", "580.65.06", 15 * GIB, 0, "7.5")
    assert statuses(gpus.check_driver([old])) == ["warning"]


@pytest.mark.parametrize(
    ("chosen", "devices", "status"),
    [
        *((None, 1, "ok"), ("0", 1, "ok"), ("", 1, "wrong"), ("7", 1, "wrong"), ("0", 2, "wrong")),
        *(("-1", 1, "wrong"), ("0,-1", 1, "ok"), ("-1,0", 1, "wrong"), ("GPU-5a3f", 1, "ok")),
    ],
)
def test_visible_gpus(chosen: str | None, devices: int, status: str) -> None:
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    config = EngineConfig(tensor_parallel_size=devices)
    assert statuses(gpus.check_visibility([H200], config, environment)) == [status]
    without = statuses(gpus.check_visibility([], config, environment))
    assert without == ([] if devices == 1 else ["warning"])


def test_memory_that_others_have_is_told_with_a_share_that_would_do() -> None:
    config, ask = EngineConfig(), driver("", "4711, python, 40000 MiB\n")
    assert statuses(gpus.check_memory([H200], config, ask, {})) == ["ok"]
    used = Card(0, "NVIDIA H200", "580.65.06", 143_771 * 2**20, 40_600 * 2**20, "9.0")
    [found] = gpus.check_memory([used], config, ask, {})
    assert found.status == "wrong"
    assert "4711, python" in found.found
    assert "--gpu-memory-utilization 0.71." in found.remedy
    full = Card(0, "NVIDIA H200", "580.65.06", 143_771 * 2**20, 143_700 * 2**20, "9.0")
    [found] = gpus.check_memory([full], config, ask, {})
    assert "--gpu-memory-utilization" not in found.remedy
    lower = EngineConfig(gpu_memory_utilization=0.7)
    assert statuses(gpus.check_memory([used], lower, ask, {})) == ["ok"]
    assert statuses(gpus.check_memory([used], config, ask, {"CUDA_VISIBLE_DEVICES": "1"})) == []


@pytest.mark.parametrize(
    ("packages", "version", "status"),
    [
        ({"jax-cuda13-plugin": "0.11.2"}, "580.65", "ok"),
        ({"jax-cuda13-plugin": "0.11.1"}, "580.65", "wrong"),
        ({"jax-cuda13-plugin": "0.11.2"}, "550.54", "wrong"),
        ({"jax-cuda12-plugin": "0.11.2"}, "550.54", "ok"),
        ({}, "580.65", "wrong"),
    ],
)
def test_the_plugin_goes_with_jax_and_driver(
    packages: dict[str, str], version: str, status: str
) -> None:
    card = Card(0, "NVIDIA H200", version, 140 * GIB, 0, "9.0")
    there = {"jax": "0.11.2", "jaxlib": "0.11.2", **packages}
    assert statuses(jax_install.check_jax([card], there.get)) == [status]
    assert statuses(jax_install.check_jax([], there.get)) == ["ok"]


def test_a_driver_that_is_too_old_is_told() -> None:
    card = Card(0, "NVIDIA H200", "470.1", 140 * GIB, 0, "9.0")
    [found] = jax_install.check_jax([card], {"jaxlib": "0.11.2"}.get)
    assert "older than what CUDA 12 needs" in found.found


def test_variables_that_have_effects() -> None:
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5",
        "LD_LIBRARY_PATH": "/usr/local/cuda/lib64",
    }
    found = [*jax_install.check_environment([H200], environment)]
    assert [each.status for each in found] == ["warning"] * 3
    assert statuses(jax_install.check_environment([], {"JAX_PLATFORMS": "cpu"})) == []


def test_what_jax_finds() -> None:
    def fails() -> DeviceMemory:
        raise ConfigError("JAX finds no device: it broke")

    def broken() -> int:
        raise OSError("error 999")

    cpu = DeviceMemory("cpu", "cpu", None)
    assert statuses(jax_install.check_device([], lambda: cpu)) == ["ok"]
    assert statuses(jax_install.check_device([], fails)) == ["wrong"]
    # With GPUs JAX is not asked: it would take some of their memory.
    assert statuses(jax_install.check_device([H200], fails, lambda: 1)) == ["ok"]
    assert statuses(jax_install.check_device([H200], fails, lambda: 0)) == ["wrong"]
    assert statuses(jax_install.check_device([H200], fails, broken)) == ["wrong"]


def said(config: EngineConfig, found: Sequence[Card] = ()) -> dict[str, Finding]:
    return {each.check: each for each in model.check_model(config, None, found)}


def test_a_folder_without_weights_and_tokenizer() -> None:
    found = said(EngineConfig(model=LLAMA))
    assert [found[name].status for name in ("model", "weights", "tokenizer")] == [
        *("ok", "wrong", "wrong")
    ]
    assert "chat template" not in found


def test_whether_it_fits_the_gpu_that_is_here() -> None:
    dummy = {"load_format": "dummy", "skip_tokenizer_init": True}
    config = EngineConfig(model=LLAMA, max_model_len=8192, **dummy)  # type: ignore[arg-type]
    assert "895," in said(config, [H200])["memory"].found
    small = Card(0, "NVIDIA L4", "580.65.06", 22 * GIB, 0, "8.9")
    large = EngineConfig(model=LLAMA, **dummy)  # type: ignore[arg-type]
    assert said(large, [small])["memory"].status == "wrong"
    strange = Card(0, "NVIDIA X1", "580.65.06", 22 * GIB, 0, "8.9")
    assert said(config, [strange])["memory"].status == "ok"


def test_a_length_that_the_model_was_not_made_for() -> None:
    """A start refuses it on any device, so that no GPU is needed to see it."""
    config = EngineConfig(model=LLAMA, max_model_len=200_000, load_format="dummy")
    found = said(config)["length"]
    assert found.status == "wrong"
    assert "greater than the model's own length of 131072" in found.found


def test_models_that_are_not_here() -> None:
    assert said(EngineConfig(model="/no/such/folder"))["model"].status == "wrong"
    assert said(EngineConfig(model="no/such-model"))["model"].status == "warning"


def test_what_the_hub_has_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this model the cache has what describes it, and its weights are for the first start."""

    def cached(name: str, **how: Any) -> str:
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        if name == "some/tokenizer":
            raise LocalEntryNotFoundError(name)
        return LLAMA

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    found = said(EngineConfig(model="some/model", tokenizer="some/tokenizer"))
    assert [found[name].status for name in ("model", "weights", "tokenizer")] == [
        *("ok", "warning", "wrong")
    ]
    assert "hf download some/model" in found["weights"].remedy


def test_the_embedded_model_is_well_and_its_template_shown() -> None:
    found = said(EngineConfig())
    assert {each.status for each in found.values()} == {"ok"}
    assert "assistant" in found["chat template"].found


def test_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(folder: Path, room: int = 1, *, fatal: bool = True) -> list[str]:
        return statuses(machine.check_folder("cache", folder, room, "--flag", fatal=fatal))

    assert look(tmp_path / "new" / "deep") == ["ok"]
    assert not (tmp_path / "new").exists()
    assert look(tmp_path, room=2**60) == ["warning"]
    file = tmp_path / "file"
    file.touch()
    assert look(file / "below") == ["wrong"]
    assert look(file / "below", fatal=False) == ["warning"]

    def closed(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "exists", closed)
    assert look(tmp_path / "of" / "others") == ["wrong"]


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = (resource.RLIM_INFINITY, 65_536, 1024, 64)
    found = [machine.check_files(limit).status for limit in limits]
    assert found == ["ok", "ok", "warning", "wrong"]
    usage = shutil.disk_usage(tmp_path)
    for total, status in ((64 * 2**20, "warning"), (8 * GIB, "ok")):
        changed = usage._replace(total=total)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, changed=changed: changed)
        assert statuses(machine.check_shared_memory(tmp_path)) == [status]
    assert statuses(machine.check_shared_memory(tmp_path / "absent")) == ["warning"]


def test_more_of_the_host_than_there_is() -> None:
    config = EngineConfig(kv_offloading_size=2.0**20)
    found = {each.check: each.status for each in machine.check_machine(config)}
    assert found["host memory"] == "wrong"
    none = EngineConfig(compile_cache_dir="")
    assert {each.check: each.status for each in machine.check_machine(none)}[
        "compile cache"
    ] == "warning"


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = check_port(ServeOptions(host="127.0.0.1", port=port))
    assert found.status == "wrong"
    assert str(port) in found.found
    assert check_port(ServeOptions(host="127.0.0.1", port=0)).status == "ok"


def test_keys_and_certificates_that_a_server_could_not_use(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\x00")
    for options in (
        ServeOptions(api_keys_file=str(file)),
        ServeOptions(ssl_certfile=str(file)),
        ServeOptions(metrics_need_key=True),
    ):
        assert check_keys(options).status == "wrong"
    assert check_keys(ServeOptions()).found == "everyone who reaches it may ask, by http"
    assert check_keys(ServeOptions(api_key=("a",))).found.startswith("those who have an API key")


def test_a_remedy_stands_with_what_is_wrong() -> None:
    findings = [Finding("port", "wrong", "taken", "Use another."), Finding("jax", "ok", "0.11")]
    assert any_wrong(findings)
    assert report(findings).splitlines() == [
        "wrong    port  taken",
        "               -> Use another.",
        "ok       jax   0.11",
        "1 wrong, 0 to look at",
    ]


def test_the_command_says_what_it_found_and_fails_if_it_must(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is started, which asks JAX: the rest of the machine is not waited for."""
    monkeypatch.setattr("paged.http.doctor.cards", lambda ask: [])
    argv = ["doctor", LLAMA, "--host", "127.0.0.1", "--port", "0", "--compile-cache-dir", ""]
    assert main([*argv, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["ok"]
    assert {"device", "weights", "open files", "port"} <= {
        each["check"] for each in told["findings"]
    }
    assert all(each["remedy"] for each in told["findings"] if each["status"] != "ok")
    monkeypatch.setattr("paged.http.doctor.check_device", lambda found: iter(()))
    dummy = ["--load-format", "dummy", "--skip-tokenizer-init"]
    assert main([*argv, *dummy]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 wrong")
