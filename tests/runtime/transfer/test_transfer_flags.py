"""What does not go together is a line at the start."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from paged.models.loading import ModelSource
from paged.runtime import core
from paged.runtime.config import EngineConfig
from paged.runtime.core import EngineCore
from paged.runtime.errors import ConfigError
from paged.runtime.llm import LLM
from paged.runtime.transfer.door import listen
from tests.runtime.test_core import source

__all__ = ["source"]

ASKS: dict[str, Any] = {"prefill_servers": ("a:1",), "kv_offloading_size": 1.0}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"prefill_servers": ("a:1",)}, "--prefill-servers needs host memory"),
        (ASKS | {"prefill_servers": ("a",)}, "with spaces between several, got 'a'"),
        (ASKS | {"prefill_servers": ("a:0",)}, "with spaces between several, got 'a:0'"),
        (ASKS | {"prefill_servers": (":80",)}, "with spaces between several, got ':80'"),
        (ASKS | {"prefill_servers": ("a:1,b:2",)}, "with spaces between several, got 'a:1,b:2'"),
        (ASKS | {"prefill_servers": ("http://a:1",)}, "must be like HOST:PORT"),
        (ASKS | {"prefill_servers": ("a b:1",)}, "must be like HOST:PORT"),
        (ASKS | {"prefill_servers": ("::1:9100",)}, "must be like HOST:PORT"),
        (ASKS | {"prefill_servers": ("a:65536",)}, "must be like HOST:PORT"),
        (ASKS | {"min_remote_prefill_tokens": -1}, "at least 0, got -1"),
        (ASKS | {"remote_prefill_timeout": 0.0}, "above 0 and finite, in seconds, got 0.0"),
        ({"kv_transfer_port": 2**16}, "between 0 and 65535, got 65536"),
        ({"kv_transfer_host": "::"}, "--kv-transfer-host :: is where a port is listened on"),
        (
            {"kv_transfer_port": 1, "pipeline_parallel_size": 2},
            "--kv-transfer-port is for a model in one process and one piece",
        ),
        (
            {"prefill_servers": ("a:1",), "nnodes": 2, "tensor_parallel_size": 2},
            "--prefill-servers is for a model in one process and one piece",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**flags)


def test_addresses_are_hosts_and_ports() -> None:
    EngineConfig(**ASKS | {"prefill_servers": ("10.0.0.1:9100", "[::1]:9100", "name:9100")})


def test_an_engine_that_runs_when_it_is_called_serves_nobody() -> None:
    with pytest.raises(ConfigError, match="needs an engine that runs by itself"):
        LLM(kv_transfer_port=0)


def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = EngineConfig(kv_transfer_host="0.0.0.0", kv_transfer_port=0)
    monkeypatch.delenv("PAGED_TRANSFER_KEY", raising=False)
    with pytest.raises(ConfigError, match="lets other machines in: set PAGED_TRANSFER_KEY"):
        listen(everywhere)
    monkeypatch.setenv("PAGED_TRANSFER_KEY", "secret")
    listener = listen(everywhere)
    assert listener is not None
    listener.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--kv-transfer-port {port} cannot be listened on"):
            listen(EngineConfig(kv_transfer_port=port))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "a..b", "x" * 70, "[::1]"])
def test_a_host_that_is_none_is_named(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_TRANSFER_KEY", "secret")
    with pytest.raises(ConfigError, match="cannot be listened on") as raised:
        listen(EngineConfig(kv_transfer_host=host, kv_transfer_port=0))
    assert host in str(raised.value)


def test_a_port_is_looked_at_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, source: ModelSource
) -> None:
    def load(*args: object, **more: object) -> None:
        raise AssertionError("it takes minutes")

    monkeypatch.setattr(core, "prepare", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = EngineConfig(kv_transfer_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot be listened on"):
            EngineCore(config, source)
    monkeypatch.delenv("PAGED_TRANSFER_KEY", raising=False)
    with pytest.raises(ConfigError, match="set PAGED_TRANSFER_KEY to a secret"):
        EngineCore(EngineConfig(kv_transfer_host="::", kv_transfer_port=0), source)


def test_without_the_flag_nobody_listens() -> None:
    assert listen(EngineConfig()) is None
