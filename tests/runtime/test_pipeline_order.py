"""In which order a pipeline enqueues what, with stages and ways between them that only tell."""

from types import SimpleNamespace
from typing import Any

import pytest

from paged.runtime import pipeline
from paged.runtime.pipeline import Pipeline
from paged.runtime.step_device import Result

FORWARD, SAMPLE = ("forward", "bucket"), ("sample", 1, "mode")


class FakeStage:
    def __init__(self, index: int, told: list[str]) -> None:
        self.index, self.told, self.num_forwards = index, told, 0
        buckets = SimpleNamespace(all=lambda: ["bucket"])
        self.shapes = SimpleNamespace(stage=index, buckets=buckets)
        self.params = self.programs = self.cache = None

    def enqueue(self, key: Any, *inputs: Any) -> Any:
        self.told.append(f"{key[0]} {self.index}: {', '.join(map(str, inputs))}")
        if key[0] == "forward":
            return SimpleNamespace(relay=f"{inputs[0]}>{self.index}", sampling=f"rows {inputs[0]}")
        return SimpleNamespace(tokens=f"{key[0]}d")

    def take(self, tokens: Any, sampling: Any) -> None:
        self.told.append(f"take {self.index}: {tokens} of {sampling}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def hop(source: Any, target: Any, kinds: Any) -> Any:
        def carry(key: Any, arrays: Any) -> Any:
            told.append(f"{source.stage} to {target.stage}")
            return arrays

        return carry

    monkeypatch.setattr(pipeline, "_hop", hop)
    monkeypatch.setattr(pipeline, "_relay", lambda *args: None)
    monkeypatch.setattr(pipeline, "_results", lambda *args: {})
    monkeypatch.setattr(Result, "come", lambda self, made: setattr(self, "arrays", made))
    return told


def piped(told: list[str], number: int) -> Any:
    stages: Any = {index: FakeStage(index, told) for index in range(number)}
    return Pipeline(stages, [stage.shapes for stage in stages.values()], None)


def test_a_stage_begins_a_step_while_the_next_ends_the_one_before(told: list[str]) -> None:
    device = piped(told, 2)
    device.call(FORWARD, "a")
    first = device.call(SAMPLE)
    assert told == ["forward 0: a", "0 to 1"]
    assert not first.arrays
    told.clear()
    device.call(("copy_pages",), "pages")
    device.call(FORWARD, "b")
    device.call(SAMPLE)
    assert told == [
        *("copy_pages 0: pages", "forward 0: b"),
        *("forward 1: a, a>0", "sample 1: "),
        *("0 to 1", "1 to 0", "take 0: sampled of rows a"),
    ]
    assert first.arrays.tokens == "sampled"
    told.clear()
    device.call(("drain",))
    copied = told.index("copy_pages 1: pages")
    assert told[copied:] == [
        *("copy_pages 1: pages", "forward 1: b, b>0", "sample 1: "),
        *("1 to 0", "take 0: sampled of rows b"),
    ]
    told.clear()
    device.call(("drain",))
    assert told == [], "nothing is left"


def test_tokens_are_back_before_the_step_that_may_need_them(told: list[str]) -> None:
    device = piped(told, 3)
    for name in "abcd":
        device.call(FORWARD, name)
        device.call(SAMPLE)
    assert told.index("take 0: sampled of rows a") < told.index("forward 0: d")
    assert "take 0: sampled of rows b" in told
    assert "take 0: sampled of rows c" not in told
    lasts = [each for each in told if each.startswith("forward 2")]
    assert lasts == ["forward 2: a, a>1", "forward 2: b, b>1"]


def test_what_is_told_between_steps_goes_with_the_next_one(told: list[str]) -> None:
    device = piped(told, 2)
    device.call(FORWARD, "a")
    device.call(SAMPLE)
    device.call(("load_rules",), "rules")
    device.call(("drain",))
    assert "load_rules 1: rules" not in told
    device.call(FORWARD, "b")
    device.call(("load_masks",), "masks")
    device.call(SAMPLE)
    device.call(("drain",))
    order = ["sample 1: ", "load_rules 1: rules", "forward 1: b, b>0", "load_masks 1: masks"]
    assert [each for each in told if each in order] == [*order, "sample 1: "]
    assert not any(each.startswith("load") and " 0:" in each for each in told)
