"""The command line: what it understands, and what it says when it does not."""

import argparse
import errno
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paged
from paged.http.cli import main, parse, parsers
from paged.http.options import ALWAYS_ON, ConvertOptions, ModelOptions, ServeOptions
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, EngineDead
from paged.runtime.flags import read_flags

Capture = pytest.CaptureFixture[str]


def engine_config(*argv: str) -> EngineConfig:
    return read_flags(EngineConfig, parse(["serve", *argv]))


def complaint(capsys: Capture, *argv: str) -> str:
    """The one line that a mistake gives."""
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "command",
    ["", "serve", "generate", "chat", "bench", "simulate", "convert", "plan", "doctor"],
)
def test_help_is_instant(command: str) -> None:
    """Nothing heavy is imported to print it."""
    code = (
        "import sys\n"
        "from paged.http.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: print({'jax', 'numpy', 'transformers', 'starlette'} & {*sys.modules})"
    )
    argv = [sys.executable, "-c", code, *filter(None, [command]), "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith("usage: paged")
    assert done.stdout.splitlines()[-1] == "set()"


def test_it_is_a_module_too() -> None:
    argv = [sys.executable, "-m", "paged.http", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"paged {paged.__version__}\n"


def test_every_field_of_the_configuration_has_its_flag() -> None:
    assert engine_config() == EngineConfig()
    assert read_flags(ServeOptions, parse(["serve"])) == ServeOptions()
    assert read_flags(ModelOptions, parse(["serve"])) == ModelOptions()
    assert engine_config("--dtype", "bfloat16", "--gpu-memory-utilization", "0.5") == EngineConfig(
        dtype="bfloat16", gpu_memory_utilization=0.5
    )


def test_conversion_takes_two_names_and_shares_flags() -> None:
    args = parse(["convert", "org/name", "out", "--dtype=float16", "--revision", "v2"])
    assert (args.model, args.out) == ("org/name", "out")
    assert read_flags(ConvertOptions, args) == ConvertOptions(dtype="float16", revision="v2")
    assert read_flags(ConvertOptions, parse(["convert", "a", "b"])) == ConvertOptions()


def test_numbers_with_suffixes_are_flags() -> None:
    config = engine_config("--max-model-len", "4K", "--kv-cache-memory-bytes=2g")
    assert (config.max_model_len, config.kv_cache_memory_bytes) == (4096, 2 * 10**9)
    assert engine_config("--max-model-len", "auto").max_model_len == -1
    assert engine_config("--max-model-len", "-1").max_model_len == -1


def test_underscores_are_dashes() -> None:
    assert engine_config("--max_num_seqs=3", "--download_dir", "/a_b").download_dir == "/a_b"


def test_booleans_have_a_negation() -> None:
    assert not engine_config("--no-enable-prefix-caching").enable_prefix_caching
    assert engine_config("--enable-prefix-caching").enable_prefix_caching


def test_flags_in_json(capsys: Capture, tmp_path: Path) -> None:
    flag = "--default-chat-template-kwargs"
    file = tmp_path / "flags.yaml"
    file.write_text("default_chat_template_kwargs: {style: [1, null]}")
    for argv in ((f'{flag}={{"style": [1, null]}}',), ("--config", str(file))):
        options = read_flags(ModelOptions, parse(["serve", *argv]))
        assert options.default_chat_template_kwargs == {"style": [1, None]}
    for text in ("{", "[]", "7", "[" * 100_000):
        assert "must be a JSON object, got" in complaint(capsys, "serve", flag, text)


def test_flags_for_what_is_always_on() -> None:
    options = read_flags(ServeOptions, parse(["serve", *ALWAYS_ON]))
    assert options == ServeOptions()


def test_the_model_is_an_argument_or_a_flag() -> None:
    assert engine_config("org/name").model == "org/name"
    assert engine_config("--model", "org/name").model == "org/name"
    assert engine_config("--block-size", "32", "org/name").model == "org/name"
    assert engine_config().model is None
    with pytest.raises(ConfigError, match="--model must not be empty"):
        engine_config("")
    for argv in (["a", "--model", "b"], ["--model", "a", "--model=b"]):
        with pytest.raises(ConfigError, match="names one model"):
            engine_config(*argv)


def test_a_text_is_no_model() -> None:
    with pytest.raises(ConfigError, match="--prompt"):
        parse(["generate", "Once upon a time"])
    assert parse(["generate", "org/name", "--prompt", "Once upon a time"]).model == "org/name"


def test_no_command_shows_what_there_is(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse([])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("usage: paged [-h] [--version] COMMAND")


def test_flags_with_several_values() -> None:
    argv = ["serve", "--served-model-name", "a", "b", "--api-key", "k"]
    args = parse(argv)
    assert read_flags(ModelOptions, args).served_model_name == ("a", "b")
    assert read_flags(ServeOptions, args).api_key == ("k",)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["serve", "--max-num-seq", "3"],
            "unknown flag --max-num-seq: did you mean --max-num-seqs?",
        ),
        (
            ["serve", "--max-batch-size=3"],
            "unknown flag --max-batch-size: did you mean --max-num-seqs?",
        ),
        (["serve", "--xyzzy"], "unknown flag --xyzzy"),
        (["serve", "a", "b"], "unknown argument 'b'"),
        (["serve", "--port", "x"], "argument --port: must be a whole number in digits such as"),
        (["serve", "--port", "99999"], "argument --port: must be between 0 and 65535, got '99999'"),
        (["bench", "serve", "--port=-1"], "argument --port: must be between 0 and 65535, got '-1'"),
        (["serve", "--dtype", "int3"], "argument --dtype: invalid choice: 'int3'"),
        (["serve", "-q", "awq"], "'awq' is how checkpoints are stored, which their config.json"),
        (["serve", "-q", "int3"], "argument --quantization/-q: invalid choice: 'int3'"),
        (["serve", "--enable-lora"], "unknown flag --enable-lora: there are no LoRA adapters yet"),
        (["serve", "--config"], "argument --config: expected one argument"),
        (["collect-env"], "unknown command collect-env: did you mean paged doctor?"),
        (["serve", "--num-gpu-blocks-override", "9"], "did you mean --kv-cache-memory-bytes?"),
        (["sevre"], "argument COMMAND: invalid choice: 'sevre'"),
        (["bench", "serve", "--num-prompt", "3"], "did you mean --num-prompts?"),
    ],
)
def test_a_mistake_gives_one_line(capsys: Capture, argv: list[str], line: str) -> None:
    assert line in complaint(capsys, *argv)


def test_flags_of_other_engines_are_explained(capsys: Capture) -> None:
    found = complaint(capsys, "serve", "--distributed-executor-backend", "mp")
    assert "each host has one process" in found


@pytest.mark.parametrize("name", ["--tensor-parallel-size", "-tp"])
def test_devices_that_share_a_model(name: str) -> None:
    assert engine_config(name, "2") == EngineConfig(tensor_parallel_size=2)
    assert engine_config(name, "1") == EngineConfig()


@pytest.mark.parametrize(
    ("name", "word"),
    [("-pp", "at least 1"), ("-dp", "CUDA_VISIBLE_DEVICES"), ("-tp", "at least 1")],
)
def test_other_ways_to_use_devices_are_refused(name: str, word: str) -> None:
    assert engine_config("-pp", "1", "-dp", "1") == EngineConfig()
    with pytest.raises(ConfigError, match=word):
        engine_config(name, "2" if name == "-dp" else "0")


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--nnodes", "2"), "give a multiple of 2"),
        (("--nnodes", "2", "--node-rank", "2", "-tp", "2"), "below --nnodes"),
        (("--nnodes", "0"), "at least 1"),
        (("--master-port", "0"), "between 1 and 65535"),
        (("--nnodes", "2", "-tp", "2", "--kv-offloading-size", "1"), "one process"),
        (("--nnodes", "2", "-tp", "2", "-pp", "3"), "pipeline-parallel-size 3 .* multiple of 2"),
        (("-pp", "2", "--kv-offloading-size", "1"), "a model in one piece"),
        (("-pp", "2", "--cpu-offload-gb", "1"), "a model in one piece"),
        (("-tp", "2", "--cpu-offload-gb", "1"), "--cpu-offload-gb is for one device"),
    ],
)
def test_hosts_that_cannot_share_a_model_are_refused(argv: tuple[str, ...], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        engine_config(*argv)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (("--headless",), "give --nnodes and --node-rank"),
        (("--headless", "--nnodes", "2", "-tp", "2"), "not for rank 0"),
        (("--nnodes", "2", "-tp", "2", "--node-rank", "1"), "needs --headless"),
        (("--nnodes", "2", "-tp", "2", "--no-engine-process"), "needs an engine process"),
    ],
)
def test_what_each_host_is_told_goes_together(
    capsys: Capture, argv: tuple[str, ...], word: str
) -> None:
    assert main(["serve", "--port", "0", *argv]) == 2
    assert word in capsys.readouterr().err


def test_swap_space_is_another_name_for_the_offloading_size() -> None:
    assert engine_config("--swap-space", "4") == EngineConfig(kv_offloading_size=4.0)


def test_flags_that_have_no_effect_are_accepted() -> None:
    assert parse(["serve", "--disable-log-requests"]).disable_log_requests


def test_flags_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(
        "model: org/name\nmax-model-len: 4K\nblock_size: 32\nenable-prefix-caching: false\n"
        "served-model-name: [a, b]\ntokenizer: null\n"
    )
    config = engine_config("--config", str(path), "--block-size", "64")
    assert config == EngineConfig(
        model="org/name", max_model_len=4096, block_size=64, enable_prefix_caching=False
    )
    args = parse(["serve", "other", "--config", str(path)])
    assert (args.model, args.served_model_name) == ("other", ["a", "b"])


def test_a_file_of_flags_may_have_none_yet(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("# port: 8000\n")
    assert engine_config("--config", str(path)) == EngineConfig()


@pytest.mark.parametrize(
    "content",
    [
        None,
        "- a\n- b\n",
        "a: [",
        "\xff",
        "port: 1\nport: 2",
        "a: [{b: 1, b: 2}]",
        "a: " + "[" * 5000,
    ],
)
def test_files_that_hold_no_flags(tmp_path: Path, capsys: Capture, content: str | None) -> None:
    path = tmp_path / "flags.yaml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    assert main(["serve", "--config", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paged: error: --config {path}: ")


def test_a_mistake_in_a_file_is_one_of_the_command_line(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("max-num-seq: 3\n")
    assert "did you mean --max-num-seqs?" in complaint(capsys, "serve", "--config", str(path))


@pytest.mark.parametrize("value", ["{a: 2020-01-01}", "{a: !!binary aGk=}", "&a {b: *a}"])
def test_values_that_json_cannot_say(tmp_path: Path, capsys: Capture, value: str) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(f"default-chat-template-kwargs: {value}\n")
    assert main(["serve", "--config", str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "default-chat-template-kwargs must hold what JSON can say" in line


@pytest.mark.parametrize("content", ["a: {b: c d}\n", "port: [1, 2]\n", "x y: z\n"])
def test_a_file_holds_nothing_but_flags(tmp_path: Path, capsys: Capture, content: str) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text(content)
    assert "unknown" in complaint(capsys, "serve", "--config", str(path))


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--shutdown-timeout", ["-1", "1e9"]),
        ("--max-body-size", ["0", "-1"]),
        ("--model", [""]),
        ("--served-model-name", [""]),
        ("--api-key", [""]),
        ("--tool-call-parser", ["hermit", ""]),
        ("--reasoning-parser", ["hermes", ""]),
        ("--seed", [str(2**63), str(-(2**63) - 1)]),
        ("--max-num-seqs", ["0", str(10**30)]),
        ("--max-num-batched-tokens", ["0", str(10**30)]),
        ("--kv-cache-memory-bytes", ["0", str(10**30)]),
    ],
)
def test_values_out_of_range_are_refused_by_name(flag: str, values: list[str]) -> None:
    for value in values:
        args = parse(["serve", f"{flag}={value}"])
        with pytest.raises(ConfigError, match=flag):
            [read_flags(kind, args) for kind in (ServeOptions, ModelOptions, EngineConfig)]


def test_parsers_are_known_and_listed() -> None:
    names = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser"]
    options = read_flags(ModelOptions, parse(["serve", *names, "qwen3"]))
    assert (options.tool_call_parser, options.reasoning_parser) == ("hermes", "qwen3")
    with pytest.raises(ConfigError, match=r"deepseek_v3, .*hermes, .* got 'hermit'"):
        ModelOptions(tool_call_parser="hermit")
    with pytest.raises(ConfigError, match="--enable-auto-tool-choice requires --tool-call-parser"):
        ModelOptions(enable_auto_tool_choice=True)


@pytest.mark.parametrize(
    ("error", "status"), [(ConfigError("too small"), 2), (EngineDead("lost"), 1)]
)
def test_our_own_errors_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: Exception, status: int
) -> None:
    def fail(config: EngineConfig) -> Any:
        raise error

    monkeypatch.setattr(AsyncEngine, "from_config", fail)
    assert main(["generate", "--prompt", "a"]) == status
    assert capsys.readouterr().err == f"paged: error: {error}\n"


def test_other_errors_are_bugs_and_keep_their_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncEngine, "from_config", lambda config: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--prompt", "a"])


@pytest.mark.parametrize(
    ("number", "status", "told"),
    [(errno.EPIPE, 141, ""), (errno.ENOSPC, 2, "No space left on device: make room")],
)
def test_output_that_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: int, status: int, told: str
) -> None:
    """As with `| head`, or a full disk."""

    class Closed(io.StringIO):
        def flush(self) -> None:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(sys, "stdout", Closed())
    assert main(["hash-key", "--name", "somebody"]) == status
    lines = capsys.readouterr().err.splitlines()
    assert [told in line for line in lines if "error" in line] == [True] * bool(told)


TYPED_NUMBERS = ["", "x", "nan", "1e26", "-7", "9" * 5000, "0x10", "½"]


@pytest.mark.parametrize("parser", list(parsers()), ids=lambda parser: parser.prog)
def test_bad_numbers_are_told_in_words(parser: argparse.ArgumentParser) -> None:
    """Of every flag of every command: never by the name of a function, nor by an exception."""
    for action in parser._actions:
        for text in TYPED_NUMBERS if action.type and action.option_strings else ():
            told = ": must be"  # of what is taken
            try:
                parser._get_value(action, text)
            except argparse.ArgumentError as error:
                told = str(error)
            assert re.search(r": (must be|must begin|knows|'|that files)", told), told
