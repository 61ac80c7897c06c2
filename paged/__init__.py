"""Paged: LLM inference and serving on JAX/XLA over a paged KV cache.

The names a user types live here and are resolved on first use, so that importing the ground
floor (pages, prefix cache, attention) pulls in nothing from the floors above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "paged.runtime.llm",
    "AsyncEngine": "paged.runtime.async_engine",
    "EngineConfig": "paged.runtime.config",
    "BeamSearchParams": "paged.runtime.beam_search",
    "SamplingParams": "paged.runtime.sampling_params",
    "RequestOutputKind": "paged.runtime.sampling_params",
    "StructuredOutputsParams": "paged.runtime.structured_outputs",
    "RequestOutput": "paged.runtime.outputs",
    "CompletionOutput": "paged.runtime.outputs",
    "Logprob": "paged.runtime.outputs",
    "PoolingEngine": "paged.runtime.pooling.engine",
    "EmbeddingRequestOutput": "paged.runtime.pooling.outputs",
    "ScoringRequestOutput": "paged.runtime.pooling.outputs",
    "ConfigError": "paged.errors",
    "EngineDead": "paged.runtime.errors",
    "InvalidRequest": "paged.runtime.errors",
    "serve_app": "paged.http.replicas.application",
}

__all__ = [*_PUBLIC, "__version__"]

if TYPE_CHECKING:  # each "as" itself: a checker then takes it for a name of ours, not of our needs
    from paged.errors import ConfigError as ConfigError
    from paged.http.replicas.application import serve_app as serve_app
    from paged.runtime.async_engine import AsyncEngine as AsyncEngine
    from paged.runtime.beam_search import BeamSearchParams as BeamSearchParams
    from paged.runtime.config import EngineConfig as EngineConfig
    from paged.runtime.errors import EngineDead as EngineDead
    from paged.runtime.errors import InvalidRequest as InvalidRequest
    from paged.runtime.llm import LLM as LLM
    from paged.runtime.outputs import CompletionOutput as CompletionOutput
    from paged.runtime.outputs import Logprob as Logprob
    from paged.runtime.outputs import RequestOutput as RequestOutput
    from paged.runtime.pooling.engine import PoolingEngine as PoolingEngine
    from paged.runtime.pooling.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from paged.runtime.pooling.outputs import ScoringRequestOutput as ScoringRequestOutput
    from paged.runtime.sampling_params import RequestOutputKind as RequestOutputKind
    from paged.runtime.sampling_params import SamplingParams as SamplingParams
    from paged.runtime.structured_outputs import (
        StructuredOutputsParams as StructuredOutputsParams,
    )


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'paged' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
