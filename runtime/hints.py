"""Flags, keywords and environment variables of other engines, or of stories about them, and what to
use here instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_COMPILED = "every step is compiled ahead, for sizes that Paged chooses; drop it"
_COPIES = "start a server for each copy, on devices of its own (CUDA_VISIBLE_DEVICES)"
_NO_LORA = "there are no LoRA adapters yet"
_NO_DRAFTS = "there is no speculative decoding yet; drop it"
_TEXT_ALONE = "there are no multimodal models yet: prompts are text; drop it"
_OWN_CONFIG = "name a config.json of your own, beside the model's, as the model"
_ALL_OVERLAP = "the next step is always enqueued before the last one is read; drop it"

FLAGS = {
    "-O": _COMPILED,
    "--async-scheduling": _ALL_OVERLAP,
    "--batch-idle-timeout": "there is no idle timeout: every step takes whoever is waiting",
    "--batch-size": "did you mean --max-num-seqs?",
    "--calculate-kv-scales": "pages of 8 bits need no calibration; drop it",
    "--chat-template-content-format": "templates get a message's parts as one text; drop it",
    "--chunked-prefill-size": "did you mean --max-num-batched-tokens?",
    "--collect-detailed-traces": "a span tells where a request's time went; drop it",
    "--compilation-config": _COMPILED,
    "--context-length": "did you mean --max-model-len?",
    "--convert": "did you mean --runner?",
    "--crash-on-nan": "what becomes NaN ends its own request with an error; drop it",
    "--cuda-graph-sizes": _COMPILED,
    "--cuda-memory-fraction": "did you mean --gpu-memory-utilization?",
    "--cudagraph-capture-sizes": _COMPILED,
    "--cudagraph-metrics": "every step is compiled ahead; see paged:step_seconds at /metrics",
    "--data-parallel-address": _COPIES,
    "--data-parallel-external-lb": _COPIES,
    "--data-parallel-hybrid-lb": _COPIES,
    "--data-parallel-rank": _COPIES,
    "--data-parallel-rpc-port": _COPIES,
    "--data-parallel-size-local": _COPIES,
    "--disable-async-output-proc": _ALL_OVERLAP,
    "--disable-custom-all-reduce": "XLA chooses how devices add up; see docs/tensor_parallel.md",
    "--disable-fastapi-docs": "/docs only lists the routes there are; hide it in a proxy",
    "--disable-radix-cache": "did you mean --no-enable-prefix-caching?",
    "--distributed-executor-backend": "each host has one process, see --nnodes; drop it",
    "--dp": "did you mean -dp?",
    "--enable-cache-report": "the usage always tells cached tokens; drop it",
    "--enable-deterministic-inference": "there is no batch-invariant mode; drop it",
    "--enable-expert-parallel": "--tensor-parallel-size shares out experts whole already; drop it",
    "--enable-long-tail-optimization": "there is no such thing; see --long-prefill-token-threshold",
    "--enable-lora": _NO_LORA,
    "--enable-metrics": "/metrics is always there; drop it",
    "--enable-mfu-metrics": "see `paged bench profile` for where the time of a step goes; drop it",
    "--enable-priority-scheduling": "did you mean --scheduling-policy priority?",
    "--enable-reasoning": "--reasoning-parser alone does it; drop it",
    "--enable-sleep-mode": "a server keeps its memory until it ends; drop it",
    "--enforce-eager": "every step is compiled ahead; drop it",
    "--guided-decoding-backend": "llguidance is the only one; drop it",
    "--h11-max-header-count": "headers are read by httptools, within 64 KiB; drop it",
    "--h11-max-incomplete-event-size": "did you mean --max-body-size? Headers have 64 KiB",
    "--hf-config-path": _OWN_CONFIG,
    "--hf-overrides": _OWN_CONFIG,
    "--hf-token": "put it into the environment as HF_TOKEN, or `hf auth login`",
    "--ignore-patterns": "only files that a model needs are fetched; drop it",
    "--kv-cache-metrics": "see paged:num_cached_pages and the like at /metrics; drop it",
    "--kv-events-config": "there are no events of the KV cache; drop it",
    "--kv-offloading-backend": "there is one, host memory; see also --kv-offloading-dir",
    "--kv-transfer-config": "did you mean --prefill-servers and --kv-transfer-port?",
    "--language-model-only": _TEXT_ALONE,
    "--limit-mm-per-prompt": _TEXT_ALONE,
    "--logits-processors": "there are no plugins; see logit_bias, bad_words, structured_outputs",
    "--logprobs-mode": "they are those before temperature, penalties and masks; drop it",
    "--lora-modules": _NO_LORA,
    "--max-batch-prefill-tokens": "did you mean --max-num-batched-tokens?",
    "--max-batch-size": "did you mean --max-num-seqs?",
    "--max-batch-total-tokens": "did you mean --max-num-batched-tokens?",
    "--max-best-of": "how many answers a request may ask for is fixed; drop it",
    "--max-client-batch-size": "how many prompts a request may hold is fixed; drop it",
    "--max-concurrent-requests": "did you mean --max-waiting, beside --max-num-seqs?",
    "--max-context-len-to-capture": _COMPILED,
    "--max-cpu-loras": _NO_LORA,
    "--max-cudagraph-capture-size": _COMPILED,
    "--max-input-length": "did you mean --max-model-len?",
    "--max-input-tokens": "did you mean --max-model-len?",
    "--max-lora-rank": _NO_LORA,
    "--max-loras": _NO_LORA,
    "--max-num-batches": "did you mean --max-num-seqs or --max-num-batched-tokens?",
    "--max-num-partial-prefills": "did you mean --max-long-partial-prefills, for the policy lanes?",
    "--max-num-queued-reqs": "did you mean --max-waiting, which counts those that wait alone?",
    "--max-prefill-tokens": "did you mean --max-num-batched-tokens?",
    "--max-queued-requests": "did you mean --max-waiting?",
    "--max-running-requests": "did you mean --max-num-seqs?",
    "--max-seq-len-to-capture": _COMPILED,
    "--max-stop-sequences": "how many stops a request may name is fixed; drop it",
    "--max-top-n-tokens": "did you mean --max-logprobs?",
    "--max-total-tokens": "did you mean --max-model-len, or --kv-cache-memory-bytes?",
    "--mem-fraction-static": "did you mean --gpu-memory-utilization?",
    "--middleware": "there are no plugins: put what it does into a proxy",
    "--mm-processor-kwargs": _TEXT_ALONE,
    "--model-id": "did you mean --model?",
    "--model-impl": "Paged has its own code for each family of models; drop it",
    "--model-path": "did you mean --model?",
    "--models": "list them in a --config file, under `models`",
    "--no-async-scheduling": _ALL_OVERLAP,
    "--no-scheduler-reserve-full-isl": "a prompt waits until all its pages fit; drop it",
    "--num-gpu-blocks-override": "did you mean --kv-cache-memory-bytes?",
    "--num-gpu-blocks-util": "did you mean --gpu-memory-utilization?",
    "--num-scheduler-steps": "the next step never waits for the host; drop it",
    "--num-shard": "did you mean --tensor-parallel-size?",
    "--num-speculative-tokens": _NO_DRAFTS,
    "--page-size": "did you mean --block-size?",
    "--payload-limit": "did you mean --max-body-size?",
    "--performance-mode": "see --max-num-seqs and --max-num-batched-tokens; drop it",
    "--pooler-config": "how vectors are made is read from the model's modules.json; drop it",
    "--preemption-mode": "did you mean --kv-offloading-size? Without it pages are computed again",
    "--prefix-caching-hash-algo": "it is BLAKE2b of 256 bits; drop it",
    "--quantize": "did you mean --quantization?",
    "--random-seed": "did you mean --seed?",
    "--rope-scaling": _OWN_CONFIG,
    "--rope-theta": _OWN_CONFIG,
    "--sampling-defaults": "did you mean --generation-config?",
    "--schedule-conservativeness": "a sequence that finds no page gives its own back; drop it",
    "--schedule-policy": "did you mean --scheduling-policy?",
    "--sharded": "did you mean --tensor-parallel-size?",
    "--skip-server-warmup": "every step is compiled before the first request; drop it",
    "--speculative-config": _NO_DRAFTS,
    "--speculative-model": _NO_DRAFTS,
    "--ssl-cert-reqs": "--ssl-ca-certs alone has clients show certificates; drop it",
    "--stream-interval": "every token is sent as it comes; drop it",
    "--structured-outputs-config": "llguidance is the only backend; drop it",
    "--task": "did you mean --runner?",
    "--tokenizer-mode": "the tokenizer is always the fast one of its files; drop it",
    "--tokenizer-pool-size": "did you mean --api-server-count?",
    "--tokenizer-revision": "did you mean --tokenizer, with a folder of that revision?",
    "--tool-parser-plugin": "there are no plugins; --tool-call-parser lists what there is",
    "--trust-remote-code": "a model's own code is never run; drop it",
    "--use-tqdm-on-load": "a bar is shown where there is a terminal; drop it",
    "--use-v2-block-manager": "there is one page pool; drop it",
    "--waiting-served-ratio": "every step takes whoever is waiting; drop it",
    "--watchdog-timeout": "did you mean --step-timeout?",
    "--worker-use-ray": "one process has all devices of a model; drop it",
}

# What `LLM` is asked for that another part does.
_KEYWORDS = {
    "chat_template": "it is an argument of chat()",
    "disable_log_stats": "LLM logs no statistics; drop it",
    "served_model_name": "it is a flag of `paged serve`",
}

VARIABLES = {
    "CUDA_MEMORY_FRACTION": "--gpu-memory-utilization",
    "GRACEFUL_TERMINATION_TIMEOUT": "--shutdown-timeout",
    "MAX_BATCH_PREFILL_TOKENS": "--max-num-batched-tokens",
    "MAX_BATCH_TOTAL_TOKENS": "--kv-cache-memory-bytes",
    "MAX_CONCURRENT_REQUESTS": "--max-waiting",
    "MAX_INPUT_TOKENS": "--max-model-len",
    "MAX_TOTAL_TOKENS": "--max-model-len",
    "PAYLOAD_LIMIT": "--max-body-size",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "a longer context than the model's is refused",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _NO_LORA,
    "VLLM_ATTENTION_BACKEND": "--attention-backend",
    "VLLM_BATCH_INVARIANT": "there is no batch-invariant mode",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "--timeout-keep-alive",
    "VLLM_LOGGING_LEVEL": "--uvicorn-log-level",
    "VLLM_SERVER_DEV_MODE": "--admin-api-key opens what is for admins",
}
KEY_VARIABLES = ("PAGED_API_KEY", "VLLM_API_KEY")
"""What may hold the server's key: one that is set and not read would leave the server open."""
_FLAG = re.compile(r"(?<![\w-])--?([a-z][\w-]*)")


def flag_hint(flag: str) -> str | None:
    """What to use in place of a flag that another engine has, be it negated or `--flag.key`."""
    name = flag.partition(".")[0]
    level = re.sub(r"^-O\d$", "-O", name)
    return FLAGS.get(level) or FLAGS.get(name.replace("--no-", "--", 1))


def keyword_hint(name: str) -> str | None:
    """The same for a keyword of `LLM`, with flags as keywords."""
    hint = _KEYWORDS.get(name) or flag_hint(f"--{name.replace('_', '-')}")
    return hint and _FLAG.sub(lambda flag: flag[1].replace("-", "_"), hint)


def unread_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """A line for each variable of another engine that is set, and has no effect here."""
    for name in sorted(environ):
        if name in KEY_VARIABLES or not (name in VARIABLES or name.startswith("VLLM_")):
            continue
        yield f"{name} is not read" + (f": {hint}" if (hint := VARIABLES.get(name)) else "")
