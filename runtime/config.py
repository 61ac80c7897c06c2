"""Engine flags, each declared once: name, default, help. The command line, the documentation and
the keywords of `LLM(...)` all come from `EngineConfig`'s fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Literal, get_type_hints

from paged.runtime.errors import ConfigError
from paged.runtime.flags import (
    choices_of,
    json_object,
    kv_cache_dtype,
    load_format,
    option,
    port,
    quantization,
    size_or_auto,
)
from paged.runtime.lanes import DEFAULT_LANES

PAGE_SIZES = (8, 16, 32, 64, 128)
MAX_LOGPROBS = 20
LONGEST_TIMEOUT = 7 * 24 * 60 * 60  # seconds that a request may be given
QUANTIZATION_EXCLUDE = ("lm_head", "*.output_layer", "*.gate", "*.router", "*.shared_expert_gate")
# Commas and slashes are in no host: who gives a list or a URL is to hear of it.
_ADDRESS = re.compile(r"(\[[^\s\[\]]+\]|[^\s\[\]:,/]+):(?P<port>[0-9]{1,5})")
_COUNTS = {"kv_cache_memory_bytes": 2**63, "max_num_seqs": 2**20, "max_num_batched_tokens": 2**24}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything the engine is told. Made once; derived values live in other records."""

    model: str | None = option(
        None,
        "Folder, GGUF file or Hugging Face hub id of the model; "
        "without one, the embedded SmolLM2-135M-Instruct.",
    )
    tokenizer: str | None = option(None, "Folder or hub id of another tokenizer.")
    runner: Literal["auto", "generate", "pooling"] = option(
        "auto",
        "What the model is for: 'generate' text, or 'pooling' for embeddings and scores; auto is "
        "pooling for encoders and for folders with a modules.json.",
    )
    skip_tokenizer_init: bool = option(False, "Token ids in and out only; load no tokenizer.")
    revision: str | None = option(None, "Branch, tag or commit of the hub repository.")
    download_dir: str | None = option(None, "Where hub files are cached; default the hub's own.")
    load_format: Literal["auto", "dummy"] = option(
        "auto",
        "Where weights come from: 'auto' the files, 'dummy' random from config.json alone.",
        type=load_format,
    )
    dtype: Literal["auto", "float32", "float", "bfloat16", "float16", "half"] = option(
        "auto", "Element type of weights and activations; auto is the checkpoint's, float32 on CPU."
    )
    quantization: Literal["fp8", "int8", "int4", "gguf"] | None = option(
        None,
        "Quantize weights in full precision as they are loaded: 'fp8' and 'int8' have 8 bits and "
        "multiply in 8 bits, 'int4' has 4 and multiplies in --dtype. Embeddings and norms stay as "
        "they are, as the start's log tells. 'gguf' keeps the weights of a GGUF file as the file "
        "has them, which are expanded without it. Other checkpoints that are quantized already "
        "need no flag.",
        also=("-q",),
        type=quantization,
    )
    quantization_exclude: tuple[str, ...] = option(
        QUANTIZATION_EXCLUDE,
        "Patterns, as of files, for names of weights that --quantization leaves as they are; "
        f"default {' '.join(QUANTIZATION_EXCLUDE)}: the head and what routes to experts; nothing "
        "with gguf.",
        metavar="PATTERN",
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of a sequence, prompt and output; default the model's own length, "
        "-1 for the longest that fits in memory.",
        type=size_or_auto,
        metavar="LEN",
    )
    seed: int = option(0, "Seed of dummy weights and of requests that bring none.")
    generation_config: str = option(
        "auto",
        "Where request defaults come from: 'auto' the model's generation_config.json, another file "
        "like it or its folder, or 'paged' (as 'vllm') for neutral ones.",
    )
    override_generation_config: Mapping[str, Any] | None = option(
        None, "What goes before them, as JSON.", type=json_object, metavar="JSON"
    )
    max_logprobs: int = option(
        MAX_LOGPROBS, f"Most log-probabilities a request may ask for, up to {MAX_LOGPROBS}."
    )
    tensor_parallel_size: int = option(
        1,
        "Devices that share the model, in this machine or in --nnodes: each has its share of the "
        "weights and of the KV pages. It must divide the attention heads.",
        also=("-tp", "--tp"),
        begins="devices",
    )
    nnodes: int = option(
        1,
        "Processes that share the model's devices, one on each of several hosts, all started with "
        "the same flags but for --node-rank.",
    )
    node_rank: int = option(0, "Which of them this is; 0 is the one that answers HTTP.")
    master_addr: str = option("127.0.0.1", "Address of rank 0 that the others reach.")
    master_port: int = option(
        29501, "Port of rank 0 at which the others join.", type=port, metavar="PORT"
    )
    pipeline_parallel_size: int = option(
        1,
        "Stages that the layers are divided into, each on --tensor-parallel-size devices of its "
        "own, each at work on another step.",
        also=("-pp",),
    )
    data_parallel_size: int = option(
        1, "Always 1: a server has one copy of a model; start another for another.", also=("-dp",)
    )
    gpu_memory_utilization: float = option(
        0.9, "Share of the device's memory for weights, step memory and KV pages.", begins="memory"
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes for KV pages (as 2g or 512m); overrides the share above. On CPU default 1g.",
        also=("--kv-cache-memory",),
    )
    kv_cache_dtype: Literal[
        "auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"
    ] = option(
        "auto",
        "Element type of the KV cache; auto is that of the weights. fp8 (e4m3 unless said "
        "otherwise) and int8 hold about twice the tokens of 16 bits, less precisely; not for the "
        "latents of DeepSeek.",
        type=kv_cache_dtype,
    )
    kv_offloading_size: float = option(
        0.0,
        "GiB of host memory for KV pages that the device has no room for: those of preempted "
        "sequences and of prefixes. They come back where that is faster than computing them again.",
        also=("--swap-space",),
        metavar="GIB",
    )
    kv_offloading_dir: str | None = option(
        None,
        "Folder for KV pages that went to host memory, to be found again by later starts with the "
        "same model; a stop writes there what the device still holds.",
    )
    kv_offloading_dir_size: float = option(64.0, "GiB that they may take there.", metavar="GIB")
    prefill_servers: tuple[str, ...] = option(
        (),
        "Prefill servers, as HOST:PORT of their --kv-transfer-port, that compute long prompts for "
        "this one and hand over their KV pages; needs --kv-offloading-size.",
        metavar="HOST:PORT",
    )
    min_remote_prefill_tokens: int = option(
        512, "Prompt tokens that are not cached, above which a prefill server is asked."
    )
    remote_prefill_timeout: float = option(
        30.0,
        "Seconds without news of a prompt after which it is computed here.",
        metavar="SECONDS",
    )
    kv_transfer_port: int | None = option(
        None,
        "Port at which other engines have this one compute prompts, and get their KV pages.",
        type=port,
        metavar="PORT",
    )
    kv_transfer_host: str = option(
        "127.0.0.1", "Address of that port; one that is no loopback needs PAGED_TRANSFER_KEY."
    )
    cpu_offload_gb: float = option(
        0.0,
        "GiB of the device's memory to free of weights: those of as many layers as that takes live "
        "in host memory and are copied in each step, which makes steps slow.",
        metavar="GIB",
    )
    block_size: int = option(16, "Tokens per KV page: 8, 16, 32, 64 or 128.")
    enable_prefix_caching: bool = option(True, "Keep and share the pages of common prefixes.")
    max_num_seqs: int | None = option(
        None,
        "Most sequences in a step; default 256 on GPU (1024 from 70 GiB up), 32 on CPU.",
        begins="scheduler",
    )
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in a step; default 8192 on GPU, 512 on CPU."
    )
    enable_chunked_prefill: bool = option(True, "Split prompts over steps, mixed with decodes.")
    long_prefill_token_threshold: int = option(
        0, "Most tokens of one prompt in a step; 0 for no limit of its own."
    )
    scheduling_policy: Literal["fcfs", "priority", "lanes"] = option(
        "fcfs",
        "Order of requests: first come first served, by priority, or in lanes, in which short "
        "requests do not wait for long ones.",
    )
    long_prompt_threshold: int = option(
        DEFAULT_LANES.long_prompt,
        "Under lanes: prompt tokens to compute above which a request is long.",
    )
    short_request_share: float = option(
        DEFAULT_LANES.share,
        "Under lanes: share of each step's work that is kept for short requests while there are "
        "any, 0.5 or more.",
    )
    max_long_partial_prefills: int = option(
        DEFAULT_LANES.most_long, "Under lanes: long prompts that are computed at the same time."
    )
    max_waiting: int | None = option(
        None,
        "Most sequences that wait for a slot, beyond which requests are refused with a 503; each "
        "of n and each prompt counts. Default no limit.",
    )
    max_waiting_tokens: int | None = option(
        None,
        "Most prompt tokens that are yet to be computed, beyond which requests are refused with a "
        "503. Default no limit.",
        also=("--max-num-queued-tokens",),
    )
    attention_backend: Literal["auto", "xla", "triton", "mosaic"] = option(
        "auto",
        "Attention over pages; auto is mosaic on Hopper, triton on other GPUs, else xla.",
        begins="compilation",
    )
    attention_tuning_seconds: float = option(
        40.0,
        "Most seconds of a start that go into timing attention kernels, once for each kind of GPU "
        "and heads that nobody has timed yet; 0 for none. What is found is kept in the compilation "
        "cache.",
    )
    compile_cache_dir: str | None = option(
        None, "Folder of the persistent compilation cache; default ~/.cache/paged/jit, '' for none."
    )

    @property
    def devices_here(self) -> int:
        """Devices that each process has of those that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nnodes

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_model()
        self._check_devices()
        self._check_hosts()
        self._check_memory()
        self._check_offloading()
        self._check_counts()
        self._check_lanes()
        self._check_queue()
        self._check_transfer()
        if not 0 <= self.attention_tuning_seconds < float("inf"):
            raise ConfigError(
                "--attention-tuning-seconds must be at least 0 and finite, "
                f"got {self.attention_tuning_seconds}"
            )

    def _check_choices(self) -> None:
        """What the command line refuses by itself is refused for `LLM(...)`, too."""
        for name, hint in get_type_hints(type(self)).items():
            choices = choices_of(hint)
            if choices and (value := getattr(self, name)) not in choices:
                allowed = ", ".join(map(str, choices))
                raise ConfigError(
                    f"--{name.replace('_', '-')} must be one of {allowed}, got {value!r}"
                )

    def _check_model(self) -> None:
        if self.model == "":
            raise ConfigError("--model must not be empty: leave it out for the embedded model")
        if self.max_model_len is not None and self.max_model_len != -1 and self.max_model_len < 2:
            raise ConfigError(
                f"--max-model-len must be at least 2, or -1, got {self.max_model_len}"
            )
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"--seed must be a 64-bit integer, got {self.seed}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(
                f"--max-logprobs must be between 0 and {MAX_LOGPROBS}, got {self.max_logprobs}"
            )

    def _check_memory(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "--gpu-memory-utilization must be above 0 and at most 1, "
                f"got {self.gpu_memory_utilization}"
            )
        if self.block_size not in PAGE_SIZES:
            raise ConfigError(
                f"--block-size must be one of {', '.join(map(str, PAGE_SIZES))}, "
                f"got {self.block_size}"
            )

    def _check_counts(self) -> None:
        for name, limit in _COUNTS.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value < limit:
                allowed = f"at least 1 and below {limit}"
                raise ConfigError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")

    def _check_queue(self) -> None:
        for name, least in (("max_waiting", 0), ("max_waiting_tokens", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} must be at least {least}, got {value}")

    def _check_lanes(self) -> None:
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "--long-prefill-token-threshold must be at least 0, "
                f"got {self.long_prefill_token_threshold}"
            )
        if self.scheduling_policy == "lanes" and not self.enable_chunked_prefill:
            raise ConfigError(
                "--scheduling-policy lanes needs chunked prefill: leave out "
                "--no-enable-chunked-prefill"
            )
        if not 0.5 <= self.short_request_share < 1:
            raise ConfigError(
                "--short-request-share must be at least 0.5 and below 1, "
                f"got {self.short_request_share}"
            )
        for name in ("long_prompt_threshold", "max_long_partial_prefills"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    def _check_devices(self) -> None:
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                f"--tensor-parallel-size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.pipeline_parallel_size < 1:
            raise ConfigError(
                f"--pipeline-parallel-size must be at least 1, got {self.pipeline_parallel_size}"
            )
        if self.pipeline_parallel_size > 1 and (self.kv_offloading_size or self.cpu_offload_gb):
            flag = "--kv-offloading-size" if self.kv_offloading_size else "--cpu-offload-gb"
            raise ConfigError(
                f"{flag} is for a model in one piece: leave it out, or --pipeline-parallel-size"
            )
        if self.data_parallel_size != 1:
            raise ConfigError(
                f"--data-parallel-size must be 1, got {self.data_parallel_size}: a server has one "
                "copy of a model. Start a server for each copy, on devices of its own "
                "(CUDA_VISIBLE_DEVICES)"
            )

    def _check_hosts(self) -> None:
        if self.nnodes < 1:
            raise ConfigError(f"--nnodes must be at least 1, got {self.nnodes}")
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(
                f"--node-rank must be at least 0 and below --nnodes ({self.nnodes}), "
                f"got {self.node_rank}"
            )
        if not 1 <= self.master_port < 2**16:
            raise ConfigError(f"--master-port must be between 1 and 65535, got {self.master_port}")
        stages, devices = self.pipeline_parallel_size, self.tensor_parallel_size
        if stages == 1 and devices % self.nnodes:
            raise ConfigError(
                f"--tensor-parallel-size {devices} cannot be shared by --nnodes {self.nnodes}, "
                f"each with as many devices: give a multiple of {self.nnodes}"
            )
        if stages > 1 and stages % self.nnodes:
            raise ConfigError(
                f"--pipeline-parallel-size {stages} cannot be shared by --nnodes {self.nnodes}, "
                f"each with as many whole stages: give a multiple of {self.nnodes}"
            )
        if self.nnodes > 1 and self.kv_offloading_size:
            raise ConfigError(
                "--kv-offloading-size is for the devices of one process: leave it out, or --nnodes"
            )

    def _check_transfer(self) -> None:
        for flag, is_set in (
            ("--prefill-servers", bool(self.prefill_servers)),
            ("--kv-transfer-port", self.kv_transfer_port is not None),
        ):
            if is_set and (self.nnodes > 1 or self.pipeline_parallel_size > 1):
                raise ConfigError(
                    f"{flag} is for a model in one process and one piece: leave it out, or "
                    "--nnodes and --pipeline-parallel-size"
                )
        if self.prefill_servers and not self.kv_offloading_size:
            raise ConfigError(
                "--prefill-servers needs host memory, which pages pass through: give "
                "--kv-offloading-size."
            )
        for address in self.prefill_servers:
            match = _ADDRESS.fullmatch(address)
            if match is None or not 0 < int(match["port"]) < 2**16:
                raise ConfigError(
                    "--prefill-servers must be like HOST:PORT, with spaces between several, "
                    f"got {address!r}"
                )
        if self.kv_transfer_port is not None and not 0 <= self.kv_transfer_port < 2**16:
            raise ConfigError(
                f"--kv-transfer-port must be between 0 and 65535, got {self.kv_transfer_port}"
            )
        if self.kv_transfer_port is None and self.kv_transfer_host != "127.0.0.1":
            raise ConfigError(
                f"--kv-transfer-host {self.kv_transfer_host} is where a port is listened on: give "
                "--kv-transfer-port, too"
            )
        if self.min_remote_prefill_tokens < 0:
            raise ConfigError(
                "--min-remote-prefill-tokens must be at least 0, "
                f"got {self.min_remote_prefill_tokens}"
            )
        if not 0 < self.remote_prefill_timeout < float("inf"):
            raise ConfigError(
                "--remote-prefill-timeout must be above 0 and finite, in seconds, "
                f"got {self.remote_prefill_timeout}"
            )

    def _check_offloading(self) -> None:
        if not 0 <= self.kv_offloading_size < float("inf"):
            raise ConfigError(
                "--kv-offloading-size must be at least 0 and finite, in GiB, "
                f"got {self.kv_offloading_size}"
            )
        if not 0 <= self.cpu_offload_gb < float("inf"):
            raise ConfigError(
                f"--cpu-offload-gb must be at least 0 and finite, in GiB, got {self.cpu_offload_gb}"
            )
        if self.cpu_offload_gb and self.tensor_parallel_size > 1:
            raise ConfigError(
                "--cpu-offload-gb is for one device: leave it out, or --tensor-parallel-size, "
                f"got {self.tensor_parallel_size}"
            )
        if self.kv_offloading_size and not self.enable_prefix_caching:
            raise ConfigError(
                "--kv-offloading-size needs the prefix cache, which finds pages in host memory "
                "too: leave --no-enable-prefix-caching away."
            )
        if self.kv_offloading_dir is not None and not self.kv_offloading_size:
            raise ConfigError(
                "--kv-offloading-dir needs host memory, which pages pass through: give "
                "--kv-offloading-size."
            )
        if self.kv_offloading_dir == "":
            raise ConfigError("--kv-offloading-dir must not be empty; for this folder write .")
        if not 0 < self.kv_offloading_dir_size < float("inf"):
            raise ConfigError(
                "--kv-offloading-dir-size must be above 0 and finite, in GiB, "
                f"got {self.kv_offloading_dir_size}"
            )


def flags() -> tuple[Field[Any], ...]:
    """The fields of `EngineConfig`, with help in their metadata."""
    return fields(EngineConfig)
