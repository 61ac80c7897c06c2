"""lm-evaluation-harness on a small task of each kind, with the demo model."""

import json
from typing import Any

import pytest

from tests.clients.talking import HERE, needs_python, talk

pytestmark = [pytest.mark.clients, needs_python]

# By transformers, from the same GGUF file in float32: of each choice, and of the first sentence.
CHOICES = [
    [-0.2581, -4.3844, -16.4767],
    [-0.3794, -11.7317, -14.5649],
    [-13.5822, -3.5712],
    [-1.7514, -24.6494],
]
SENTENCE = -72.6184


def evaluated(url: str, model: str, task: str) -> Any:
    printed = talk(HERE, "lm_eval_client.py", url, model, task)
    return json.loads(printed.splitlines()[-1])


def test_choices(demo_url: str) -> None:
    """Each is scored by echo, with log-probabilities and no token made."""
    found = evaluated(demo_url, "local-completions", "capitals")
    assert found["scores"]["acc,none"] == 1
    for sample, expected in zip(found["samples"], CHOICES, strict=True):
        scores = [score for [[score, _]] in sample["got"]]
        assert scores == pytest.approx(expected, abs=2e-3)
    likeliest = [greedy for sample in found["samples"] for [[_, greedy]] in sample["got"]]
    assert likeliest.count(True) == 2


def test_whole_texts(demo_url: str) -> None:
    found = evaluated(demo_url, "local-completions", "sentences")
    assert found["samples"][0]["got"][0][0] == pytest.approx(SENTENCE, abs=5e-3)
    assert 2 < found["scores"]["byte_perplexity,none"] < 4


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_answers(demo_url: str, model: str) -> None:
    found = evaluated(demo_url, model, "continued")
    answers = [sample["got"][0][0] for sample in found["samples"]]
    assert all(answer and "." not in answer and "\n" not in answer for answer in answers)
    if model == "local-completions":
        assert answers[:2] == [" Paris", " cold"]
