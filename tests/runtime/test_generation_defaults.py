"""Which file the defaults of requests come from, and what goes before it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.generation_defaults import default_params
from paged.runtime.sampling_params import SamplingParams

SOURCE: Any = SimpleNamespace(generation_config={"temperature": 0.5, "top_k": 40})


def defaults(**flags: Any) -> SamplingParams:
    return default_params(EngineConfig(**flags), SOURCE)


def test_they_are_the_model_s_or_neutral() -> None:
    assert defaults() == SamplingParams(temperature=0.5, top_k=40)
    assert defaults(generation_config="paged") == SamplingParams()
    assert defaults(generation_config="vllm") == SamplingParams()


def test_they_are_another_file_s(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text('{"top_p": 0.8, "max_new_tokens": 9}')
    for path in (file, tmp_path):
        wanted = SamplingParams(top_p=0.8, max_tokens=9)
        assert defaults(generation_config=str(path)) == wanted


def test_some_go_before_them() -> None:
    given = {"top_k": 5, "min_p": 0.1}
    wanted = SamplingParams(temperature=0.5, top_k=5, min_p=0.1)
    assert defaults(override_generation_config=given) == wanted
    wanted = SamplingParams(top_k=5, min_p=0.1)
    assert defaults(generation_config="paged", override_generation_config=given) == wanted


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a file like generation_config\.json, got 'vlm'"):
        defaults(generation_config="vlm")
    with pytest.raises(ConfigError, match=r"a file like generation_config\.json, got"):
        defaults(generation_config=str(tmp_path))
    with pytest.raises(ConfigError, match="what stands for it, asks for what cannot be: top_p"):
        defaults(override_generation_config={"top_p": 7})
