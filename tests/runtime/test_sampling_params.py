"""What reaches the engine is in range and of Python's own types, whatever a caller wrote."""

from typing import Any

import numpy as np
import pytest

from paged.runtime.errors import ConfigError, InvalidRequest
from paged.runtime.sampling_params import SamplingParams, with_model_defaults

INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


def refused(**fields: Any) -> str | None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**fields)
    return caught.value.param


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", b"1", [1], object()])
def test_an_integer_is_no_other_type(name: str, value: Any) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [None, "1", [1.0], 1j, 10**400, float("nan"), float("inf")])
def test_a_number_is_finite_and_no_other_type(name: str, value: Any) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", [1]),
        ("stop", [None]),
        ("stop_token_ids", 5),
        ("stop_token_ids", ["5"]),
        ("stop_token_ids", [5.0]),
        ("logit_bias", [5]),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: "1"}),
        ("logit_bias", {5: float("nan")}),
    ],
)
def test_lists_hold_what_they_should(name: str, value: Any) -> None:
    assert refused(**{name: value}) == name


def test_numbers_of_numpy_become_pythons() -> None:
    given = SamplingParams(
        seed=np.int64(3),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=list(np.array([1, 2])),
        logit_bias={np.int32(4): np.float32(1)},  # type: ignore[dict-item]
    )
    assert given == SamplingParams(
        seed=3, temperature=0.5, stop_token_ids=[1, 2], logit_bias={4: 1.0}
    )
    assert type(given.seed) is int
    assert type(given.temperature) is float


def test_temperatures_stay_within_float32() -> None:
    assert SamplingParams(temperature=1e300).effective_temperature == 1e6
    assert SamplingParams(temperature=1e-4).effective_temperature == 0.01
    assert SamplingParams(temperature=1e-6).effective_temperature == 0


@pytest.mark.parametrize(
    "defaults", [{"temperature": "hot"}, {"top_p": 0}, {"top_k": [5]}, {"max_new_tokens": 0}]
)
def test_a_model_whose_defaults_cannot_be_says_where_they_are(defaults: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        with_model_defaults(defaults)
