"""Several models on one device: who gets what, and refusals with numbers that would do."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paged.runtime import sharing
from paged.runtime.config import EngineConfig
from paged.runtime.device_probe import MEMORY_FRACTIONS, DeviceMemory, probe_device
from paged.runtime.errors import ConfigError
from paged.runtime.setup import claim_devices
from paged.runtime.sharing import Claim, check_on_cpu, divide, shares_on_gpu
from tests.runtime.test_core import MODEL

GIB = 2**30
TOTAL = 80 * GIB
CHAT = Claim("chat", 0.6, None, 16 * GIB, has_pages=True)
EMBEDDER = Claim("embedder", 0.2, None, GIB, has_pages=False)


def refusal(*claims: Claim) -> str:
    with pytest.raises(ConfigError) as caught:
        shares_on_gpu(claims, TOTAL, "GPU")
    return str(caught.value)


def test_stated_shares_are_kept() -> None:
    assert shares_on_gpu([CHAT, EMBEDDER], TOTAL, "GPU") == {"chat": 0.6, "embedder": 0.2}
    whole = [CHAT, replace(EMBEDDER, share=0.1), replace(EMBEDDER, name="b", share=0.3)]
    assert sum(shares_on_gpu(whole, TOTAL, "GPU").values()) == pytest.approx(1)


def test_pages_in_bytes_come_with_weights_and_a_part_of_the_rest() -> None:
    by_bytes = replace(CHAT, share=None, pages=8 * GIB)
    shares = shares_on_gpu([by_bytes, replace(by_bytes, name="b"), EMBEDDER], TOTAL, "GPU")
    assert shares == pytest.approx({"chat": 0.35, "b": 0.35, "embedder": 0.2})


def test_shares_of_more_than_all() -> None:
    text = refusal(replace(CHAT, share=0.7), replace(EMBEDDER, share=0.5))
    assert text.splitlines() == [
        "The models cannot share the 80.00 GiB of this GPU:",
        "  model     weights    gpu-memory-utilization  kv-cache-memory-bytes",
        "  chat      16.00 GiB  0.7 (56.00 GiB)         not given",
        "  embedder  1.00 GiB   0.5 (40.00 GiB)         not given",
        "  the shares add up to 1.2, and may to 1",
        "  This would do: gpu-memory-utilization 0.56 for chat, 0.33 for embedder",
    ]


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ([replace(CHAT, share=None), EMBEDDER], "chat: states neither gpu-memory-utilization"),
        ([CHAT, replace(EMBEDDER, share=None)], "embedder: states no gpu-memory-utilization, and"),
        ([CHAT, replace(EMBEDDER, share=None, pages=GIB)], "embedder: states no gpu-memory"),
        (
            [replace(CHAT, share=0.1), EMBEDDER],
            "chat: its share is 8.00 GiB, and it is to hold 16.00 GiB",
        ),
        (
            [replace(CHAT, pages=40 * GIB), EMBEDDER],
            "chat: its share is 48.00 GiB, and it is to hold 56.00 GiB",
        ),
        (
            [replace(CHAT, share=None, pages=40 * GIB), EMBEDDER],
            "chat: weights, pages and 1.00 GiB for steps each want 57.00 GiB together, and of the "
            "90% that are shared out 56.00 GiB is left",
        ),
    ],
)
def test_what_is_wrong_is_said_by_name(claims: list[Claim], said: str) -> None:
    assert f"\n  {said}" in refusal(*claims)


def test_shares_that_can_stay_are_left_alone() -> None:
    text = refusal(CHAT, replace(EMBEDDER, share=None))
    assert text.endswith("This would do: gpu-memory-utilization 0.6 for chat, 0.3 for embedder")


def test_too_many_weights_have_no_advice() -> None:
    text = refusal(replace(CHAT, share=0.5, weights=70 * GIB), EMBEDDER)
    assert text.endswith("serve fewer models here")


CLAIMS = st.lists(
    st.builds(
        Claim,
        name=st.uuids().map(str),
        share=st.none() | st.floats(0.01, 1),
        pages=st.none() | st.integers(1, TOTAL),
        weights=st.integers(1, TOTAL // 3),
        has_pages=st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


ADVISED = r"([\d.]+M?) for ([\w-]{36})"


@given(CLAIMS)
def test_what_is_shared_out_fits_and_advice_does(claims: list[Claim]) -> None:
    said = ""
    try:
        shares = shares_on_gpu(claims, TOTAL, "GPU")
    except ConfigError as error:
        said = str(error)
        shares = {name: float(share) for share, name in re.findall(ADVISED, said)}
        claims = [replace(each, share=shares.get(each.name), pages=None) for each in claims]
    if said.endswith("serve fewer models here"):
        return
    assert sum(shares.values()) <= 1 + 1e-6
    assert all(claim.weights <= shares[claim.name] * TOTAL for claim in claims)
    assert not said or shares_on_gpu(claims, TOTAL, "GPU") == shares


@given(CLAIMS, st.integers(1, TOTAL))
def test_the_same_on_a_cpu(claims: list[Claim], available: int) -> None:
    try:
        check_on_cpu(claims, available)
    except ConfigError as error:
        advised = re.findall(ADVISED, str(error))
        by_name = {name: int(size[:-1]) * 2**20 for size, name in advised}
        better = [replace(each, pages=by_name.get(each.name)) for each in claims]
        if advised:
            check_on_cpu(better, available)
    else:
        pages = sum(claim.pages or 0 for claim in claims if claim.has_pages)
        assert sum(claim.weights for claim in claims) + pages <= available


def test_a_cpu_counts_pages_in_bytes() -> None:
    pages = replace(CHAT, share=None, pages=GIB)
    check_on_cpu([pages, replace(EMBEDDER, share=None)], 18 * GIB)
    check_on_cpu([pages, EMBEDDER], None)
    with pytest.raises(ConfigError, match="chat: states no kv-cache-memory-bytes"):
        check_on_cpu([CHAT, EMBEDDER], None)
    with pytest.raises(ConfigError, match=r"want 18\.00 GiB together") as caught:
        check_on_cpu([pages, EMBEDDER], 18 * GIB - 1)
    assert "the 18.00 GiB of memory that this machine has left" in str(caught.value)


@pytest.fixture
def configs(tmp_path: Path) -> dict[str, EngineConfig]:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = EngineConfig(model=str(tmp_path), kv_cache_memory_bytes=2**20)
    return {"a": config, "b": replace(config, runner="pooling")}


def test_weights_are_counted_before_they_are_there(
    configs: dict[str, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Claim] = []

    def note(claims: list[Claim], total: int, kind: str) -> dict[str, float]:
        seen.extend(claims)
        return {}

    monkeypatch.setattr(sharing, "probe_device", lambda: DeviceMemory("gpu", "G", GIB))
    monkeypatch.setattr(sharing, "shares_on_gpu", note)
    assert divide(configs, {"a": None, "b": 0.5}) == {}
    assert [(each.share, each.pages, each.has_pages) for each in seen] == [
        (None, 2**20, True),
        (0.5, 2**20, False),
    ]
    assert seen[0].weights > seen[1].weights > 0  # vectors need no head


def test_devices_that_cannot_share_a_model_are_said_before_its_bytes(
    configs: dict[str, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "probe_device", lambda: DeviceMemory("gpu", "G", GIB))
    several = {"a": replace(configs["a"], tensor_parallel_size=3)}
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 does not go with this model"):
        divide(several, {"a": None})


@pytest.mark.parametrize("users", [None, *MEMORY_FRACTIONS])
def test_a_share_is_told_to_jax_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, users: str | None
) -> None:
    seen: list[dict[str, str]] = []
    device = SimpleNamespace(process_index=0)

    def note() -> list[SimpleNamespace]:
        seen.append({name: os.environ[name] for name in MEMORY_FRACTIONS if name in os.environ})
        return [device]

    monkeypatch.setattr(jax, "local_devices", note)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    if users:
        monkeypatch.setenv(users, "0.5")
    before = dict(os.environ)
    assert claim_devices(EngineConfig(gpu_memory_utilization=0.3)) == (device,)
    assert seen == [{users: "0.5"} if users else {MEMORY_FRACTIONS[0]: "0.3"}]
    assert dict(os.environ) == before


def test_a_device_is_found_without_taking_it(
    configs: dict[str, EngineConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe_device().platform == "cpu"
    assert divide(configs, {"a": None, "b": None}) == {"a": 0.9, "b": 0.9}
    monkeypatch.setenv("JAX_PLATFORMS", "nonesuch")
    with pytest.raises(ConfigError, match=r"JAX finds no device: .*nonesuch"):
        probe_device()
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    with pytest.raises(ConfigError, match="XLA_PYTHON_CLIENT_MEM_FRACTION is set"):
        divide(configs, {"a": None, "b": None})
