"""Front, core and output processor joined: text in, text out, in one thread."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paged.runtime.about import About, cache_settings
from paged.runtime.config import EngineConfig, flags
from paged.runtime.engine_state import EngineState
from paged.runtime.errors import ConfigError
from paged.runtime.flags import keywords
from paged.runtime.front import Front, Prepared
from paged.runtime.generation_defaults import default_params
from paged.runtime.hints import keyword_hint
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import EngineRequest, EngineStats, SequenceOutput
from paged.runtime.outputs import RequestOutput
from paged.runtime.processor import OutputProcessor
from paged.runtime.quantization import quantized_source
from paged.runtime.remote_core import RemoteCore

if TYPE_CHECKING:
    from paged.models.loading import ModelSource
    from paged.models.tokenizer import Tokenizer


class Core(Protocol):
    """What an engine needs of `EngineCore`, or of a `RemoteCore` that speaks for one.

    Attributes:
        has_work: whether `step` gets something done, or has something to say, at once: if only
            that the core has died, be there a request to hear it or not.
    """

    @property
    def has_work(self) -> bool: ...
    def fileno(self) -> int | None:
        """What becomes readable when a core in another process has news, or one here has some that
        did not come through `add`; None where there is none such."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]: ...
    def step(self) -> list[SequenceOutput]: ...
    def stats(self) -> EngineStats: ...
    def look(self, deliver: Callable[[EngineState], None]) -> None:
        """Have a close look at the engine delivered, here or in a later `step`."""

    def reset_prefix_cache(self) -> bool: ...
    def kill(self, reason: str) -> None:
        """Die, even in the middle of a step, if that can be done; called from any thread."""

    def close(self) -> None: ...


class LoadedCore(Core, Protocol):
    """A core that says what it serves."""

    max_model_len: int
    vocab_size: int
    memory: MemoryPlan
    startup: dict[str, float]


class Engine:
    """Requests in, outputs out. One thread drives it; only `front` may be used from others.

    Attributes:
        front: makes the requests that `add` takes.
        about: what it says of itself; None of cores that say nothing.
    """

    def __init__(self, core: Core, front: Front, about: About | None = None) -> None:
        self.front, self.about = front, about
        self._core = core
        self._processor = OutputProcessor(front.tokenizer)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do, be it to say that the core has died."""
        return self._core.has_work

    def fileno(self) -> int | None:
        """What becomes readable when there is work to do; None if `step` alone makes it."""
        return self._core.fileno()

    @property
    def request_ids(self) -> list[str]:
        """Requests that have not ended."""
        return self._processor.request_ids

    def add(self, prepared: Prepared) -> None:
        """Start a request. Raises InvalidRequest if its id is in use, EngineDead after a death."""
        self._core.add(prepared.request)
        try:
            self._processor.add(*prepared)
        except Exception:
            self._core.abort(prepared.request.request_id)
            raise

    def abort(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End requests; each gives a last output. Ids that are not running are ignored."""
        news = [item for request_id in request_ids for item in self._core.abort(request_id)]
        return self._processor.process(news).outputs

    def step(self) -> list[RequestOutput]:
        """Advance by one step.

        If the device fails, every request ends with an error, and the next call raises EngineDead.
        """
        outputs, aborts = self._processor.process(self._core.step())
        for request_id, index in aborts:
            self._core.abort(request_id, index)
        return outputs

    def stats(self) -> EngineStats:
        return self._core.stats()

    def look(self, deliver: Callable[[EngineState], None]) -> None:
        """Have a close look at the engine delivered, now or in a later `step`."""
        self._core.look(deliver)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while requests use pages."""
        return self._core.reset_prefix_cache()

    def kill(self, reason: str) -> None:
        """Have a core die that hangs, if that can be done; from any thread."""
        self._core.kill(reason)

    def close(self) -> None:
        """End everything and free the device's memory. Idempotent."""
        self._core.close()


def engine_config(model: str | None, given: dict[str, Any]) -> EngineConfig:
    """The configuration that keywords ask for, by any name that their flags have.

    Raises:
        TypeError: for an unknown name, with the one that was meant; or for two names of one flag.
    """
    names = {name: flag.name for flag in flags() for name in keywords(flag)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in names:
            raise TypeError(f"unexpected keyword argument {name!r}: {_meant(name, names)}")
        if names[name] in values:
            raise TypeError(f"{name!r} and another name of {names[name]!r} are given: use one")
        values[names[name]] = value
    return EngineConfig(model=model, **values)


def _meant(name: str, names: Iterable[str]) -> str:
    if hint := keyword_hint(name):
        return hint
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else "see EngineConfig for what there is"


def load_engine(
    config: EngineConfig,
    *,
    separate_process: bool = False,
    make_core: Callable[[EngineConfig], LoadedCore] | None = None,
) -> Engine:
    """Find the model, load and compile it.

    Args:
        separate_process: whether the core runs in a process of its own; this one leaves the device
            alone then.
        make_core: what finds the core in another way.

    Raises:
        ConfigError: flags that do not go together or do not fit the device.
        ModelNotFoundError, CheckpointError, TokenizerError: see `paged.models`.
    """
    source = find_model(config)
    _check_makes_text(config, source)
    defaults = default_params(config, source)
    tokenizer = None if config.skip_tokenizer_init else load_tokenizer(config, source)
    if make_core is None:
        make_core = RemoteCore if separate_process else partial(_core_here, source)
    core = make_core(config)
    front = Front(
        tokenizer=tokenizer,
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        max_logprobs=config.max_logprobs,
        default_params=defaults,
        eos_token_ids=source.eos_token_ids,
        has_priorities=config.scheduling_policy != "fcfs",
    )
    about = About(core.memory, core.startup, cache_settings(config, core.memory))
    return Engine(core, front, about)


def _check_makes_text(config: EngineConfig, source: ModelSource) -> None:
    # Here, so that front, processor and their tests need no JAX.
    from paged.runtime.pooling.setup import makes_no_text, runs_pooling

    if runs_pooling(config, source):
        advice = "" if makes_no_text(source) else " --runner generate makes text of it."
        raise ConfigError(
            f"{source.name} gives embeddings or scores, not text: serve it with `paged serve`, or "
            f"ask `LLM.embed` or `LLM.score`.{advice}"
        )


def load_again(
    config: EngineConfig, front: Front, make_core: Callable[[EngineConfig], LoadedCore] | None
) -> Engine:
    """Another engine after one with this front whose core, in another process, has died.

    Raises as `load_engine`, and whatever `make_core` raises.
    """
    core = (make_core or RemoteCore)(config)
    return Engine(core, replace(front, max_model_len=core.max_model_len))


def find_model(config: EngineConfig) -> ModelSource:
    """The model that a configuration names. Raises ModelNotFoundError, or what is wrong with it."""
    from paged.models.loading import resolve_model

    source = resolve_model(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        load_format=config.load_format,
    )
    if config.quantization is None:
        return source
    return quantized_source(source, config.quantization, config.quantization_exclude)


def _core_here(source: ModelSource, config: EngineConfig) -> LoadedCore:
    from paged.runtime.core import EngineCore

    return EngineCore(config, source)


def load_tokenizer(config: EngineConfig, source: ModelSource) -> Tokenizer:
    """The tokenizer that a configuration asks for: the model's own unless it names another."""
    from paged.models.loading import resolve_model
    from paged.models.tokenizer import tokenizer_from_folder

    if config.tokenizer is None:
        return source.tokenizer()
    folder = Path(config.tokenizer).expanduser()
    if folder.is_dir():
        return tokenizer_from_folder(folder, source.config.eos_token_ids)
    other = resolve_model(config.tokenizer, download_dir=config.download_dir, load_format="dummy")
    return other.tokenizer()
