"""`paged bench steps`: which steps are run, and what is counted of them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from paged.http.cli import main
from paged.models.experts import Routing
from paged.runtime.bench.results import read_result
from paged.runtime.bench.step_times import _rows
from paged.runtime.buckets import Bucket
from paged.runtime.planning import plan
from paged.runtime.planning.work import Work, work_of

# Two layers: one sees all, one sees 4 tokens; 10 numbers a token, 7 a row's logits.
WORK = Work(
    layer_bytes=90,
    expert_bytes=0,
    head_bytes=10,
    layer_flop=2 * 10,
    expert_flop=0,
    head_flop=2 * 7,
    pair_flop=3,
    kv_bytes=2,
    windows=(None, 4),
    width=1,
    mixtures=0,
    routing=None,
    products="full",
    expanded_bytes=0,
    all_experts=False,
    devices=1,
)


def test_work_of_a_decode_step() -> None:
    # Two rows after 9 tokens: each sees 10 and 4 tokens, itself among them.
    assert WORK.flop((1, 1), 9) == 2 * (2 * 10 + 2 * 7) + 2 * (10 + 4) * 3
    assert WORK.bytes((1, 1), 9) == 100 + 2 * (2 * (9 + 3) + 2 * 2)


def test_work_of_a_chunk() -> None:
    # Three tokens after 2 see 3, 4 and 5 tokens, with the window 3, 4 and 4.
    assert WORK.flop((3,), 2) == 2 * (3 * 10 + 7) + (12 + 11) * 3
    assert WORK.bytes((3,), 2) == 100 + 2 * (2 + 2 + 2 * 3)


def test_a_mixture_reads_the_experts_that_are_chosen() -> None:
    routing = Routing(num_experts=4, num_chosen=1, expert_size=1, renormalise=True)
    mixture = replace(WORK, expert_bytes=400, routing=routing, kv_bytes=0)
    assert mixture.bytes((1,), 0) == 100 + 400 / 4
    assert 490 < mixture.bytes((1,) * 20, 0) < 500
    assert replace(mixture, all_experts=True).bytes((1,), 0) == 100 + 400


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("name", ["MixtralForCausalLM", "Qwen2MoeForCausalLM"])
def test_every_family_with_experts_has_them_counted(
    name: str, has_kernel: bool, tmp_path: Path
) -> None:
    """Some families have nothing of their own but how tokens choose; others have more.

    Without a kernel, as on a CPU, every expert is multiplied.
    """
    model = {
        "architectures": [name],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "vocab_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 256,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(model))
    planned = plan(str(tmp_path), "H200")
    device = planned.gpu.device if has_kernel else jax.devices()[0]
    work = work_of(planned.source.config, planned.shapes, planned.dtype, device)
    num_experts, num_chosen, expert = 8, 2, 3 * 64 * 128  # numbers
    assert work.routing is not None
    assert (work.routing.num_experts, work.routing.num_chosen) == (num_experts, num_chosen)
    assert work.expert_bytes == num_experts * expert * 2
    assert work.all_experts != has_kernel
    assert work.expert_flop == 2 * (num_chosen if has_kernel else num_experts) * expert
    assert work.expert_flop < work.layer_flop < work.expert_flop + 2 * 2 * expert


def test_rows_of_a_step() -> None:
    mixed = Bucket(64, 4, False)
    assert list(_rows(Bucket(4, 4, True), 10, 512)) == [(1, 1, 1, 1)]
    assert list(_rows(Bucket(4, 4, True), 512, 512)) == []
    assert list(_rows(mixed, 0, 512)) == [(64,), (16,) * 4]
    assert list(_rows(mixed, 500, 532)) == [(32, 32)]
    assert list(_rows(mixed, 500, 512)) == []  # it would take more rows than there are


def test_every_step_is_timed(
    bench: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "steps.json", tmp_path / "steps.html"
    files = ("--output-json", path, "--html", page)
    bench("steps", "--contexts", "0", "100", "400", "600", "--num-iters=2", *files)
    result = read_result(path)
    assert result.ceilings is not None
    found = {(each.bucket, each.rows, each.context_tokens): each for each in result.steps}
    decode = {(f"decode_{rows}", rows, at) for rows in (1, 2) for at in (100, 400)}
    mixed = {(f"mixed_{size}", 1, at) for size in (16, 64) for at in (0, 100, 400)}
    assert set(found) == decode | mixed | {("mixed_64", 2, 0)}
    for each in result.steps:
        assert each.ms > 0
        assert each.flops_fraction * each.ms * result.ceilings.flops_per_second == pytest.approx(
            1e3 * each.flops
        )
    # Weights, and of every row the keys and values of 100 tokens, float32, and its own.
    layer = 64 * (4 + 2 * 2) * 16 + 64 * 64 + 3 * 64 * 128
    weights = 4 * (2 * (layer + 2 * 64) + 64 * 300)
    assert found["decode_2", 2, 100].bytes == weights + 2 * 101 * 2 * (2 * 2 * 16 * 4)
    assert "decode_2" in capsys.readouterr().out
    assert "Time of a step, decode" in page.read_text()


def test_a_bucket_that_is_not_there_is_named(
    bench: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError):
        bench("steps", "--buckets", "decode_3")
    told = capsys.readouterr().err
    assert "--buckets decode_3 and --contexts 0 128 512" in told
    assert "there are mixed_64, mixed_16, decode_2, decode_1, and sequences of 512" in told


def test_contexts_are_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "steps", "--contexts", "-1"])
    assert "must be at least 0" in capsys.readouterr().err
