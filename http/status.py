"""The page at /, what it shows (/status.json), and what operators see (/debug/state)."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import paged
from paged.http.api.errors import ApiError
from paged.http.api.service import AnyService, Models, Service, models_of
from paged.http.paths import STATUS_PATH
from paged.http.recent import History, Second, history
from paged.runtime.engine_state import EngineState, ProcessState, SequenceState
from paged.runtime.errors import EngineDead
from paged.runtime.memory import MemoryPlan
from paged.runtime.messages import Distribution, EngineStats

_STATIC = Path(__file__).parent / "static"
_FILES = {path.name: path for path in _STATIC.iterdir()}
_KINDS = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# Nothing of the page comes from anywhere else, and nowhere else may show it in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
}
_MOST_CELLS = 1536
_MOST_SEQUENCES = 100
# Of ids the kind and some digits: with a whole one who asks could read another's kept response.
_BEGINNING = re.compile(r"(?:[a-z]+[-_])?.{0,8}")
_PATIENCE = 2.0
# Seconds for which all who watch are shown the same.
_FRESH = 0.4


class Pages(msgspec.Struct, frozen=True):
    """A picture of the pool.

    Attributes:
        per_cell: pages that a cell of it stands for.
        cells: of each how many are used by one sequence, by several, and cached.
    """

    per_cell: int
    cells: list[tuple[int, int, int]]


class StepTime(msgspec.Struct, frozen=True):
    """The steps of a bucket so far; `ms` is their mean."""

    bucket: str
    count: int
    ms: float


class ModelStatus(msgspec.Struct, frozen=True):
    """A model as the page shows it.

    Attributes:
        generates: whether it makes text.
        trouble: what keeps its engine from serving, None if nothing: what follows "The engine".
        stats: of the engine.
        num_devices: that share the model.
        memory: bytes by purpose, of each device.
        startup: seconds by phase.
        steps: by bucket.
        host_ms: of the host in a step, on average.
        pages, sequences: a close look, None while the engine does not answer; the first so many,
            with the beginnings of their ids.
        history: the last minutes.
    """

    name: str
    generates: bool
    trouble: str | None
    max_model_len: int
    stats: dict[str, float]
    num_devices: int
    memory: dict[str, int]
    startup: Mapping[str, float]
    steps: list[StepTime]
    host_ms: float
    pages: Pages | None
    sequences: list[SequenceState] | None
    history: History


class Status(msgspec.Struct, frozen=True):
    """The server as the page shows it; `time` in seconds, `time.time`."""

    version: str
    time: float
    models: list[ModelStatus]


@dataclass
class Glance:
    """What takes a while to find out of an engine, and is shared by all who watch."""

    taken: float = 0.0
    state: EngineState | None = None
    _running: asyncio.Task[EngineState | None] | None = None
    _second: int = 0
    _history: History | None = None

    def history(self, processes: Sequence[dict[int, Second]], now: float) -> History:
        """That of this second, see `history`."""
        if self._history is None or self._second != int(now):
            self._second, self._history = int(now), history(processes, now)
        return self._history

    async def at(self, service: Service) -> EngineState | None:
        """A look not older than `_FRESH`; None if the engine does not answer in time."""
        if time.monotonic() - self.taken > _FRESH:
            if self._running is None or self._running.done():
                self._running = asyncio.create_task(self._look(service))
            self.state = await asyncio.shield(self._running)
        return self.state

    async def _look(self, service: Service) -> EngineState | None:
        state = await look(service)
        self.taken = time.monotonic()
        return state


async def look(service: Service) -> EngineState | None:
    """A close look at an engine, but for page tables, which may have thousands of entries.

    None if it does not answer in time.
    """
    try:
        async with asyncio.timeout(_PATIENCE):
            state = await service.engine.look()
    except (TimeoutError, EngineDead):
        return None
    sequences = [msgspec.structs.replace(each, page_tables=[]) for each in state.sequences]
    return msgspec.structs.replace(state, sequences=sequences)


async def home(request: Request) -> Response:
    """The status page."""
    base = html.escape(f"{request.scope.get('root_path', '')}/")
    text = (_STATIC / "index.html").read_text(encoding="utf-8")
    return HTMLResponse(text.replace("{base}", base), headers=_HEADERS)


async def static(request: Request) -> Response:
    """A file of the page."""
    path = _FILES.get(request.path_params["name"])
    if path is None or path.suffix not in _KINDS:
        raise ApiError(404, "The status page has no such file", "NotFoundError")
    return Response(path.read_bytes(), media_type=_KINDS[path.suffix], headers=_HEADERS)


async def status(request: Request) -> Response:
    """What the status page shows, in JSON."""
    models, state = models_of(request), request.app.state
    others = await state.peers.ask("recent", list[dict[int, Second]])
    found = await asyncio.gather(
        *(
            _status_of(service, state.glances[number], [each[number] for each in others])
            for number, service in enumerate(models)
        )
    )
    body = msgspec.json.encode(Status(paged.__version__, time.time(), list(found)))
    return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})


async def debug_state(request: Request) -> Response:
    """Queues, sequences, pages, steps in flight and threads, for operators."""
    models: Models = models_of(request)
    states = await asyncio.gather(*map(_debug_of, models))
    body = {
        "version": paged.__version__,
        "time": time.time(),
        "process": ProcessState.here(),
        "http_requests": request.app.state.load.num_requests,
        "models": states,
    }
    return Response(msgspec.json.encode(body), media_type="application/json")


STATUS_ROUTES = [
    Route("/", home, include_in_schema=False),
    Route("/static/{name}", static, include_in_schema=False),
    Route(STATUS_PATH, status),
]
DEBUG_ROUTES = [Route("/debug/state", debug_state)]


def recent_of(models: Models) -> list[dict[int, Second]]:
    """What this process has seen of each model, for the others."""
    return [service.metrics.recent.seconds for service in models]


async def _status_of(
    service: AnyService, glance: Glance, others: Sequence[dict[int, Second]]
) -> ModelStatus:
    engine, stats = service.engine, service.engine.stats()
    state = await glance.at(service) if isinstance(service, Service) else None
    seconds = [service.metrics.recent.seconds, *others]
    return ModelStatus(
        name=service.model_name,
        generates=isinstance(service, Service),
        trouble=engine.trouble,
        max_model_len=engine.max_model_len,
        stats=numbers(stats),
        num_devices=engine.about.memory.num_devices if engine.about else 1,
        memory=memory_split(engine.about.memory) if engine.about else {},
        startup=engine.about.startup if engine.about else {},
        steps=[
            StepTime(name, sum(found.counts), 1000 * _mean(found))
            for name, found in stats.steps.seconds.items()
        ],
        host_ms=1000 * _mean(stats.steps.host_seconds),
        pages=picture(state.pages) if state else None,
        sequences=list(map(_shown, state.sequences[:_MOST_SEQUENCES])) if state else None,
        history=glance.history(seconds, time.time()),
    )


def _shown(sequence: SequenceState) -> SequenceState:
    found = _BEGINNING.match(sequence.request_id)
    return msgspec.structs.replace(sequence, request_id=found[0] if found else "")


async def _debug_of(service: AnyService) -> dict[str, Any]:
    """A model; what is in its engine is left out if it does not answer in time."""
    found = {"name": service.model_name, "stats": numbers(service.engine.stats())}
    if not isinstance(service, Service):
        return found
    state = await look(service)
    if state is None:
        return found | {"error": f"the engine did not answer within {_PATIENCE:g} s"}
    return found | {
        "requests": sorted(service.running),
        "sequences": state.sequences,
        "pages": runs(state.pages),
        "steps_in_flight": state.in_flight,
        "process": state.process,
    }


def numbers(stats: EngineStats) -> dict[str, float]:
    """The statistics that are numbers."""
    values = msgspec.structs.asdict(stats)
    return {name: value for name, value in values.items() if isinstance(value, int | float)}


def memory_split(memory: MemoryPlan) -> dict[str, int]:
    """Bytes by purpose, in the order of their names on the page."""
    pages = memory.num_pages * memory.bytes_per_page
    split = {
        "weights": memory.weights,
        "KV pages": pages,
        "steps": memory.steps,
        "slot state": memory.state,
        "host transfers": memory.transit,
    }
    left = (memory.budget or 0) - sum(split.values())
    return {name: size for name, size in (split | {"left over": left}).items() if size > 0}


def picture(states: bytes) -> Pages:
    """The pool in cells, few enough to be drawn; see `PagePool.states`."""
    per_cell = -(-len(states) // _MOST_CELLS) or 1
    parts = (states[start : start + per_cell] for start in range(0, len(states), per_cell))
    return Pages(per_cell, [(part.count(2), part.count(3), part.count(1)) for part in parts])


_STATES = ("free", "cached", "used", "shared")


def runs(states: bytes) -> list[tuple[str, int]]:
    """The pages in their order as (state, how many), page 1 first."""
    return [(_STATES[state], len(list(group))) for state, group in groupby(states)]


def _mean(found: Distribution) -> float:
    return found.total / (sum(found.counts) or 1)
