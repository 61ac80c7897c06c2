"""Every flag that users of other engines know: it works with its meaning, or one line says why not
and what is meant here.
"""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from paged.http.cli import parse
from paged.http.options import ModelOptions, ServeOptions
from paged.http.serve import with_key
from paged.runtime import hints
from paged.runtime.config import EngineConfig
from paged.runtime.engine import engine_config
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags

Capture = pytest.CaptureFixture[str]
OPTIONS: tuple[type[Any], ...] = (EngineConfig, ModelOptions, ServeOptions)

# What is written, the field that it sets, and to what.
WORKING: dict[str, list[tuple[str, str, Any]]] = {
    "model": [
        ("org/name", "model", "org/name"),
        ("--model org/name", "model", "org/name"),
        ("--tokenizer t", "tokenizer", "t"),
        ("--skip-tokenizer-init", "skip_tokenizer_init", True),
        ("--runner pooling", "runner", "pooling"),
        ("--revision v2", "revision", "v2"),
        ("--download-dir d", "download_dir", "d"),
        ("--load-format dummy", "load_format", "dummy"),
        *((f"--dtype {name}", "dtype", name) for name in ("half", "float16", "bfloat16", "float")),
        ("--dtype float32", "dtype", "float32"),
        ("-q fp8", "quantization", "fp8"),
        ("--quantization int4", "quantization", "int4"),
        ("--max-model-len 32k", "max_model_len", 32_000),
        ("--max-model-len 25.6k", "max_model_len", 25_600),
        ("--max_model_len 32K", "max_model_len", 32_768),
        ("--max-model-len auto", "max_model_len", -1),
        ("--max-model-len=-1", "max_model_len", -1),
        ("--seed 3", "seed", 3),
        ("--generation-config vllm", "generation_config", "vllm"),
        ("--generation-config /a/b", "generation_config", "/a/b"),
        (
            "--override-generation-config '{\"top_k\": 5}'",
            "override_generation_config",
            {"top_k": 5},
        ),
        ("--override-generation-config.top_k 5", "override_generation_config", {"top_k": 5}),
        ("--max-logprobs 5", "max_logprobs", 5),
    ],
    "memory": [
        ("--gpu-memory-utilization 0.92", "gpu_memory_utilization", 0.92),
        ("--gpu_memory_utilization 0.92", "gpu_memory_utilization", 0.92),
        ("--kv-cache-memory-bytes 4M", "kv_cache_memory_bytes", 4 * 2**20),
        ("--kv-cache-memory 25.6g", "kv_cache_memory_bytes", 25_600_000_000),
        ("--block-size 32", "block_size", 32),
        *((f"--kv-cache-dtype {name}", "kv_cache_dtype", name) for name in ("fp8", "fp8_e5m2")),
        ("--enable-prefix-caching", "enable_prefix_caching", True),
        ("--no-enable-prefix-caching", "enable_prefix_caching", False),
        ("--no_enable_prefix_caching", "enable_prefix_caching", False),
        ("--kv-offloading-size 8", "kv_offloading_size", 8.0),
        ("--swap-space 4", "kv_offloading_size", 4.0),
        ("--kv-transfer-port 9100", "kv_transfer_port", 9100),
        ("--kv-transfer-host ::1 --kv-transfer-port 9100", "kv_transfer_host", "::1"),
        ("--prefill-servers a:1 b:2 --swap-space 1", "prefill_servers", ("a:1", "b:2")),
        ("--min-remote-prefill-tokens 1k", "min_remote_prefill_tokens", 1000),
        ("--remote-prefill-timeout 5", "remote_prefill_timeout", 5.0),
        ("--cpu-offload-gb 2", "cpu_offload_gb", 2.0),
    ],
    "scheduler": [
        ("--max-num-seqs 8", "max_num_seqs", 8),
        ("--max-num-batched-tokens 8K", "max_num_batched_tokens", 8192),
        ("--no-enable-chunked-prefill", "enable_chunked_prefill", False),
        ("--long-prefill-token-threshold 4k", "long_prefill_token_threshold", 4000),
        ("--max-long-partial-prefills 2", "max_long_partial_prefills", 2),
        ("--scheduling-policy priority", "scheduling_policy", "priority"),
        ("--max-num-queued-tokens 1m", "max_waiting_tokens", 1_000_000),
    ],
    "devices": [
        ("--tensor-parallel-size 2", "tensor_parallel_size", 2),
        ("-tp 2", "tensor_parallel_size", 2),
        ("--tp 2", "tensor_parallel_size", 2),
        ("-pp 2", "pipeline_parallel_size", 2),
        ("--pipeline-parallel-size 2", "pipeline_parallel_size", 2),
        ("--nnodes 2 -tp 2", "nnodes", 2),
        ("--nnodes 2 -tp 2 --node-rank 1", "node_rank", 1),
        ("--master-addr a", "master_addr", "a"),
        ("--master-port 5000", "master_port", 5000),
        ("--data-parallel-size 1", "data_parallel_size", 1),
    ],
    "door": [
        ("--host ::1", "host", "::1"),
        ("--port 9000", "port", 9000),
        ("--uds /tmp/paged", "uds", "/tmp/paged"),
        ("--api-key k1 k2", "api_key", ("k1", "k2")),
        ("--root-path /a", "root_path", "/a"),
        ("--ssl-certfile a --ssl-keyfile b", "ssl_keyfile", "b"),
        ("--ssl-certfile a --ssl-ca-certs c", "ssl_ca_certs", "c"),
        ("--allowed-origins a b", "allowed_origins", ("a", "b")),
        ("--allowed-methods GET", "allowed_methods", ("GET",)),
        ("--allowed-headers a", "allowed_headers", ("a",)),
        ("--allow-credentials", "allow_credentials", True),
        ("--shutdown-timeout 60", "shutdown_timeout", 60.0),
    ],
    "answers": [
        ("--served-model-name a b", "served_model_name", ("a", "b")),
        ("--chat-template t", "chat_template", "t"),
        ("--default-chat-template-kwargs {}", "default_chat_template_kwargs", {}),
        (
            "--default_chat_template_kwargs.enable_thinking false "
            "--default-chat-template-kwargs.style.tone=dry",
            "default_chat_template_kwargs",
            {"enable_thinking": False, "style": {"tone": "dry"}},
        ),
        ("--trust-request-chat-template", "trust_request_chat_template", True),
        ("--response-role r", "response_role", "r"),
        (
            "--enable-auto-tool-choice --tool-call-parser hermes",
            "enable_auto_tool_choice",
            True,
        ),
        ("--exclude-tools-when-tool-choice-none", "exclude_tools_when_tool_choice_none", True),
        *(
            (f"--reasoning-parser {name}", "reasoning_parser", name)
            for name in ("deepseek_r1", "qwen3", "glm45", "granite", "openai_gptoss")
        ),
        ("--return-tokens-as-token-ids", "return_tokens_as_token_ids", True),
        ("--enable-force-include-usage", "enable_force_include_usage", True),
        ("--enable-prompt-tokens-details", "enable_force_include_usage", False),
        ("--enable-server-load-tracking", "disable_log_stats", False),
        ("--enable-request-id-headers", "disable_log_stats", False),
        ("--async-scheduling --scheduler-reserve-full-isl", "max_num_seqs", None),
    ],
    "logs": [
        ("--enable-log-requests", "enable_log_requests", True),
        ("--no-enable-log-requests", "enable_log_requests", False),
        ("--disable-log-requests", "enable_log_requests", False),
        ("--enable-log-requests --enable-log-outputs", "enable_log_outputs", True),
        ("--max-log-len 10", "max_log_len", 10),
        ("--disable-log-stats", "disable_log_stats", True),
        ("--disable-uvicorn-access-log", "disable_uvicorn_access_log", True),
        (
            "--disable-access-log-for-endpoints /health,/metrics",
            "disable_access_log_for_endpoints",
            "/health,/metrics",
        ),
        ("--uvicorn-log-level warning", "uvicorn_log_level", "warning"),
        ("--otlp-traces-endpoint http://a:1", "otlp_traces_endpoint", "http://a:1"),
    ],
}

# What is written, and words of the line that answers.
REFUSED: dict[str, list[tuple[str, str]]] = {
    "model": [
        ("--tokenizer-mode slow", "always the fast one"),
        ("--trust-remote-code", "never run"),
        ("--tokenizer-revision v", "--tokenizer"),
        ("--hf-config-path p", "config.json of your own"),
        ("--hf-overrides {}", "config.json of your own"),
        ("--hf-overrides.rope_theta 1", "config.json of your own"),
        ("--hf-token t", "HF_TOKEN"),
        ("--logprobs-mode raw_logprobs", "before temperature"),
        ("--convert embed", "--runner"),
        ("--task embed", "--runner"),
        ("--enforce-eager", "compiled ahead"),
        ("--ignore-patterns x", "only files that a model needs"),
        ("--use-tqdm-on-load", "terminal"),
        ("--load-format safetensors", "drop the flag"),
        ("--load-format tensorizer", "choose from 'auto', 'dummy'"),
        *(
            (f"-q {name}", "how checkpoints are stored")
            for name in ("awq", "gptq", "compressed-tensors")
        ),
        ("-q bitsandbytes", "choose from 'fp8'"),
        ("--max-logprobs=-1", "between 0 and 20"),
        ("--model a --model b", "names one model"),
    ],
    "memory": [
        ("--num-gpu-blocks-override 9", "--kv-cache-memory-bytes"),
        ("--prefix-caching-hash-algo xxhash", "BLAKE2b"),
        ("--kv-offloading-backend native", "host memory"),
        ("--kv-cache-dtype int8_per_token_head", "called int8 here"),
        ("--kv-cache-dtype nvfp4", "choose from 'auto'"),
        ("--preemption-mode swap", "--kv-offloading-size"),
        ("--calculate-kv-scales", "no calibration"),
    ],
    "scheduler": [
        ("--max-num-partial-prefills 2", "--max-long-partial-prefills"),
        ("--no-scheduler-reserve-full-isl", "all its pages fit"),
        ("--no-async-scheduling", "always enqueued"),
        ("--stream-interval 5", "every token is sent"),
        ("--max-num-queued-reqs 9", "--max-waiting"),
        ("--num-scheduler-steps 8", "never waits for the host"),
    ],
    "devices": [
        ("--nnodes 2", "a multiple of 2"),
        ("-dp 2", "CUDA_VISIBLE_DEVICES"),
        ("--data-parallel-rank 0", "CUDA_VISIBLE_DEVICES"),
        ("--data-parallel-hybrid-lb", "CUDA_VISIBLE_DEVICES"),
        ("--enable-expert-parallel", "experts whole already"),
        ("--distributed-executor-backend ray", "each host has one process"),
        ("--disable-custom-all-reduce", "XLA"),
    ],
    "compilation": [
        ("-O0", "compiled ahead"),
        ("-O3", "compiled ahead"),
        ("-O 2", "compiled ahead"),
        ("--cudagraph-capture-sizes 1 2 4", "compiled ahead"),
        ("--max-cudagraph-capture-size 512", "compiled ahead"),
        ("--compilation-config {}", "compiled ahead"),
        ("--compilation-config.cudagraph_mode NONE", "compiled ahead"),
        ("--performance-mode throughput", "--max-num-seqs"),
    ],
    "not there": [
        *((f"--{name}", "no LoRA") for name in ("enable-lora", "max-loras=2", "max-lora-rank=8")),
        ("--lora-modules a=b", "no LoRA"),
        ("--speculative-config {}", "no speculative decoding"),
        ("--structured-outputs-config {}", "llguidance"),
        ("--kv-events-config {}", "no events"),
        ("--kv-transfer-config {}", "--prefill-servers"),
        ("--enable-sleep-mode", "until it ends"),
    ],
    "door": [
        ("--chat-template-content-format openai", "one text"),
        ("--tool-parser-plugin p", "--tool-call-parser"),
        ("--enable-auto-tool-choice", "requires --tool-call-parser"),
        ("--enable-reasoning", "--reasoning-parser"),
        ("--enable-log-outputs", "needs --enable-log-requests"),
        ("--middleware m", "proxy"),
        ("--disable-fastapi-docs", "/docs"),
        ("--h11-max-incomplete-event-size 1", "--max-body-size"),
        ("--h11-max-header-count 1", "httptools"),
        ("--ssl-cert-reqs 2", "--ssl-ca-certs"),
        ("--collect-detailed-traces all", "span"),
        ("--kv-cache-metrics", "/metrics"),
        ("--cudagraph-metrics", "/metrics"),
        ("--enable-mfu-metrics", "paged bench profile"),
    ],
    "never existed": [
        ("--max-batch-size 8", "--max-num-seqs"),
        ("--max-batch-total-tokens 8", "--max-num-batched-tokens"),
        ("--batch-idle-timeout 8", "no idle timeout"),
        ("--max-num-batches 8", "--max-num-seqs"),
        ("--enable-long-tail-optimization", "--long-prefill-token-threshold"),
        ("--num-gpu-blocks-util 0.9", "--gpu-memory-utilization"),
    ],
    "SGLang and TGI": [
        ("--model-path m", "--model?"),
        ("--context-length 8", "--max-model-len"),
        ("--mem-fraction-static 0.9", "--gpu-memory-utilization"),
        ("--max-running-requests 8", "--max-num-seqs"),
        ("--max-queued-requests 8", "--max-waiting"),
        ("--max-total-tokens 8", "--kv-cache-memory-bytes"),
        ("--chunked-prefill-size 8", "--max-num-batched-tokens"),
        ("--max-prefill-tokens 8", "--max-num-batched-tokens"),
        ("--schedule-policy fcfs", "--scheduling-policy"),
        ("--enable-priority-scheduling", "--scheduling-policy priority"),
        ("--schedule-conservativeness 1", "gives its own back"),
        ("--page-size 8", "--block-size"),
        ("--random-seed 8", "--seed"),
        ("--watchdog-timeout 8", "--step-timeout"),
        ("--skip-server-warmup", "before the first request"),
        ("--enable-cache-report", "always tells"),
        ("--sampling-defaults openai", "--generation-config"),
        ("--crash-on-nan", "its own request"),
        ("--disable-radix-cache", "--no-enable-prefix-caching"),
        ("--enable-metrics", "always there"),
        ("--enable-deterministic-inference", "no batch-invariant mode"),
        ("--model-id m", "--model?"),
        ("--num-shard 2", "--tensor-parallel-size"),
        ("--quantize awq", "--quantization"),
        ("--max-concurrent-requests 8", "--max-waiting"),
        ("--max-input-tokens 8", "--max-model-len"),
        ("--max-batch-prefill-tokens 8", "--max-num-batched-tokens"),
        ("--waiting-served-ratio 1", "every step"),
        ("--max-stop-sequences 8", "fixed"),
        ("--max-best-of 8", "fixed"),
        ("--max-top-n-tokens 8", "--max-logprobs"),
        ("--max-client-batch-size 8", "fixed"),
        ("--payload-limit 8", "--max-body-size"),
        ("--cuda-memory-fraction 1", "--gpu-memory-utilization"),
    ],
}


def rows(table: dict[str, list[Any]]) -> list[Any]:
    return [row for each in table.values() for row in each]


def options(written: str) -> dict[str, Any]:
    """What `paged serve` is told, over all its dataclasses."""
    args = parse(["serve", *shlex.split(written)])
    return {name: value for kind in OPTIONS for name, value in vars(read_flags(kind, args)).items()}


def answer(capsys: Capture, *argv: str) -> str:
    """The one line that something refused is answered with."""
    with pytest.raises((ConfigError, SystemExit)) as refused:
        [read_flags(kind, parse(argv)) for kind in OPTIONS]
    if isinstance(refused.value, SystemExit):
        assert refused.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        return line
    return str(refused.value)


def test_flags_that_work() -> None:
    """All in one test: a parser is made for each row, and rows are many."""
    found = [(written, name, options(written)[name]) for written, name, _ in rows(WORKING)]
    assert found == rows(WORKING)


def test_flags_that_are_refused(capsys: Capture) -> None:
    for written, words in rows(REFUSED):
        line = answer(capsys, "serve", *shlex.split(written))
        assert words in line, written


def test_what_hints_name_is_there() -> None:
    texts = [*hints.FLAGS.values(), *hints.VARIABLES.values()]
    named = {name for text in texts for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
    fields = {name for kind in OPTIONS for name in kind.__dataclass_fields__}
    others = {spelling for kind in OPTIONS for spelling in _spellings(kind)}
    known = {f"--{no}{name.replace('_', '-')}" for name in fields for no in ("", "no-")}
    assert named - known - others == {"--config"}


def _spellings(kind: type[Any]) -> list[str]:
    fields = kind.__dataclass_fields__.values()
    return [spelling for each in fields for spelling in each.metadata["also"]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--default-chat-template-kwargs.a"], "expected one argument"),
        (["--default-chat-template-kwargs.a", "--tp", "2"], "expected one argument"),
        (["--default-chat-template-kwargs..a=1"], "has a key without a name"),
        (
            ["--default-chat-template-kwargs={}", "--default-chat-template-kwargs.a=1"],
            "are both given: use one",
        ),
        (
            ["--default-chat-template-kwargs.a=1", "--default-chat-template-kwargs.a.b=1"],
            "goes into what has a value already",
        ),
        (
            ["--default-chat-template-kwargs.a.b=1", "--default-chat-template-kwargs.a=1"],
            "would replace what was given for keys below it",
        ),
    ],
)
def test_keys_of_json_that_cannot_be(capsys: Capture, argv: list[str], words: str) -> None:
    assert words in answer(capsys, "serve", *argv)


def test_keys_of_json_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "default-chat-template-kwargs.enable_thinking: false\n"
        'default_chat_template_kwargs.tone: "false"\n'
    )
    found = options(f"--config {file}")["default_chat_template_kwargs"]
    assert found == {"enable_thinking": False, "tone": "false"}
    found = options(f"--config {file} --default-chat-template-kwargs.tone=dry")
    assert found["default_chat_template_kwargs"] == {"tone": "dry"}


@pytest.mark.parametrize(
    ("word", "there", "not_there"),
    [
        ("all", "--block-size", "--xyzzy"),
        ("memory", "--block-size", "--max-num-seqs"),
        ("Scheduler", "--max-num-seqs", "--block-size"),
        ("max_num_seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("--max-num-seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("tp", "--tensor-parallel-size", "--max-num-seqs"),
        ("preempted", "--kv-offloading-size", "--max-num-seqs"),
    ],
)
def test_a_part_of_the_help(capsys: Capture, word: str, there: str, not_there: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(["serve", f"--help={word}"])
    shown = capsys.readouterr().out
    assert (stopped.value.code, there in shown, f"{not_there} " in shown) == (0, True, False)


def test_help_about_nothing_lists_the_groups(capsys: Capture) -> None:
    line = answer(capsys, "serve", "--help=xyzzy")
    assert "no group, flag or help has that word; the groups are server, access, processes" in line
    assert line.endswith("logging, answers, model, devices, memory, scheduler, compilation")
    assert answer(capsys, "bench", "--help=xyzzy").endswith("; --help alone shows all")


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"swap_space": 4.0}, "kv_offloading_size", 4.0),
        ({"enable_prefix_caching": True}, "enable_prefix_caching", True),
        ({"kv_cache_memory": 5}, "kv_cache_memory_bytes", 5),
        ({"generation_config": "vllm"}, "generation_config", "vllm"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", 2),
    ],
)
def test_keywords_of_llm(given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(engine_config(None, given), field) == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer_mode", "always the fast one"),
        ("trust_remote_code", "never run"),
        ("enforce_eager", "compiled ahead"),
        ("hf_overrides", "config.json of your own"),
        ("pooler_config", "modules.json"),
        ("compilation_config", "compiled ahead"),
        ("structured_outputs_config", "llguidance"),
        ("chat_template", "an argument of chat()"),
        ("disable_log_stats", "logs no statistics"),
        ("served_model_name", "`paged serve`"),
        ("max_batch_size", "did you mean max_num_seqs?"),
        ("num_gpu_blocks_util", "did you mean gpu_memory_utilization?"),
        ("max_num_queued_reqs", "did you mean max_waiting"),
    ],
)
def test_keywords_of_llm_that_are_refused(name: str, words: str) -> None:
    with pytest.raises(TypeError, match=re.escape(words)) as caught:
        engine_config(None, {name: 1})
    assert str(caught.value).startswith(f"unexpected keyword argument {name!r}: ")


def test_keys_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key by vLLM's name locks the door, too: nobody may think that it does and be wrong."""
    monkeypatch.delenv("PAGED_API_KEY", raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "theirs")
    assert with_key(ServeOptions()).api_key == ("theirs",)
    monkeypatch.setenv("PAGED_API_KEY", "ours")
    assert with_key(ServeOptions()).api_key == ("ours",)
    assert with_key(ServeOptions(api_key=("flag",))).api_key == ("flag",)


def test_variables_of_other_engines_get_a_line() -> None:
    environ = {
        "VLLM_API_KEY": "k",
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_XYZZY": "1",
        "MAX_TOTAL_TOKENS": "9",
        "HOME": "/root",
    }
    assert [*hints.unread_variables(environ)] == [
        "MAX_TOTAL_TOKENS is not read: --max-model-len",
        "VLLM_BATCH_INVARIANT is not read: there is no batch-invariant mode",
        "VLLM_XYZZY is not read",
    ]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve a --model b", "names one model"),
        ("profile --model a", "did you mean paged bench profile?"),
        ("complete", "did you mean paged generate?"),
    ],
)
def test_commands_of_articles_that_are_refused(capsys: Capture, command: str, words: str) -> None:
    assert words in answer(capsys, *shlex.split(command))


@pytest.mark.parametrize(
    "command",
    [
        "serve --model m --tensor-parallel-size 2 --gpu-memory-utilization 0.9 --max-model-len 8192"
        " --max-num-seqs 256 --enable-prefix-caching --swap-space 4 --disable-log-requests",
        "serve m --dtype bfloat16 --enable-chunked-prefill --max-num-batched-tokens 8192"
        " --port 8000 --host 0.0.0.0 --api-key any",
        "serve --model m --quantization fp8 --kv-cache-dtype fp8 --cpu-offload-gb 4"
        " --served-model-name gpt --uvicorn-log-level info",
    ],
)
def test_commands_of_articles_that_run(command: str) -> None:
    args = parse(shlex.split(command))
    assert read_flags(EngineConfig, args).model == "m"
