"""Values of flags, as they are typed."""

from argparse import ArgumentParser, ArgumentTypeError
from typing import Any

import pytest

from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import add_flags, number, read_flags, size
from paged.runtime.planning.options import PlanOptions


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17", 17),
        ("-1", -1),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25_600),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1g", 10**9),
        ("1G", 2**30),
        (str(2**62 + 1), 2**62 + 1),
    ],
)
def test_numbers_may_have_suffixes(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1kb", "0.1K", "1e3", "inf", "9" * 5000])
def test_other_numbers_are_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"whole number .*, got '.{0,103}'$"):
        size(text)


@pytest.mark.parametrize("text", ["", "x", "nan", "inf", "1e400", "9" * 5000])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"must be a number such as 0.5, got '.{0,103}'$"):
        number(text)


def test_a_field_may_say_what_its_value_is_called() -> None:
    parser = ArgumentParser()
    add_flags(parser, PlanOptions, "plan")
    assert "--svg FILE" in parser.format_help()


def test_a_flag_may_have_another_spelling() -> None:
    parser = ArgumentParser()
    add_flags(parser, EngineConfig, "engine")
    for spelling in ("--kv-cache-memory", "--kv-cache-memory-bytes"):
        args = parser.parse_args([spelling, "2K"])
        assert read_flags(EngineConfig, args).kv_cache_memory_bytes == 2048


@pytest.mark.parametrize(
    "given", [{"quantization": "awq"}, {"load_format": "x"}, {"dtype": "int3"}]
)
def test_python_may_not_choose_what_the_command_line_may_not(given: dict[str, Any]) -> None:
    [(name, value)] = given.items()
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be one of .*{value}"):
        EngineConfig(**given)


def test_element_types_have_their_other_names() -> None:
    assert EngineConfig(dtype="half").dtype == "half"
