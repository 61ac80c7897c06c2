"""The parsers by the names that `--tool-call-parser` and `--reasoning-parser` take."""

from __future__ import annotations

from paged.http.api.parsers.calls import Format
from paged.http.api.parsers.json_calls import (
    DEEPSEEK,
    GRANITE,
    HERMES,
    INTERNLM,
    JAMBA,
    KIMI_K2,
    LLAMA3,
    MISTRAL,
    PHI4_MINI,
)
from paged.http.api.parsers.pythonic import LLAMA4_PYTHONIC, PYTHONIC
from paged.http.api.parsers.reasoning import (
    GRANITE_THINK,
    MISTRAL_THINK,
    SEED_THINK,
    THINK,
    THINK_ASSUMED,
    Thinking,
)
from paged.http.api.parsers.tagged_calls import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_XML

FORMATS: dict[str, Format] = {
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM45,
    "glm47": GLM45,
    "granite": GRANITE,
    "hermes": HERMES,
    "internlm": INTERNLM,
    "jamba": JAMBA,
    "kimi_k2": KIMI_K2,
    "llama3_json": LLAMA3,
    "llama4_json": LLAMA3,
    "llama4_pythonic": LLAMA4_PYTHONIC,
    "minimax_m2": MINIMAX_M2,
    "mistral": MISTRAL,
    "phi4_mini_json": PHI4_MINI,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN3_XML,
    "qwen3_xml": QWEN3_XML,
}
THINKINGS: dict[str, Thinking] = {
    "deepseek_r1": THINK_ASSUMED,
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": GRANITE_THINK,
    "kimi_k2": THINK,
    "minimax_m2": THINK_ASSUMED,
    "mistral": MISTRAL_THINK,
    "olmo3": THINK,
    "qwen3": THINK,
    "seed_oss": SEED_THINK,
}
# One machine reads all of gpt-oss's format, whichever of its two names it is asked for by.
HARMONY_CALLS, HARMONY_REASONING = "openai", "openai_gptoss"

TOOL_PARSERS = tuple(sorted([*FORMATS, HARMONY_CALLS]))
REASONING_PARSERS = tuple(sorted([*THINKINGS, HARMONY_REASONING]))
