"""What the way through Ray Serve costs: streams of a clock instead of a model, on a cluster here.

    .venv/ray/bin/python benchmarks/ray_streams.py [--streams 4 16 64] [--step-ms 50] [--seconds 5]

Every stream gets an event each step. The processor time of each process on its way is that of its
system; an event's way is from its making to the client, which runs in this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import httpx2
import psutil
from starlette.types import ASGIApp, Receive, Scope, Send

from paged.http.replicas.replica import respond
from paged.http.replicas.reply_pipes import Address, Pipes
from paged.http.replicas.request import Asked

_PROCESSES = {
    "proxy": "ray::ProxyActor",
    "router": "ray::ServeReplica:default:Router",
    "replica": "ray::ServeReplica:default:Replica",
}
_HEAD = [(b"content-type", b"text/event-stream")]


_HEADS = "| streams | events/s | in a piece | µs: proxy | router | replica | way: P50, P99, ms |"


def _clock(step: float, seconds: float) -> ASGIApp:
    """An application whose every reply is a stream of the times at which its events were made."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEAD})
        end = time.time() + seconds
        while time.time() < end:
            event = b"data: %.6f\n\n" % time.time()
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(step)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    return app


class _Clock:
    """A replica without a model."""

    def __init__(self, step: float, seconds: float) -> None:
        self._app, self._pipes = _clock(step, seconds), Pipes()

    async def answer(self, request: Asked, router: Address, number: int) -> None:
        pipe = await self._pipes.to(router)
        await respond(self._app, request, partial(pipe.send, number))
        pipe.end(number)


@dataclass(frozen=True)
class Found:
    """What so many streams were like.

    Attributes:
        delays: seconds of each event's way.
        pieces: how many times something came.
        used: processor seconds, by process.
    """

    delays: Sequence[float]
    pieces: int
    seconds: float
    used: dict[str, float]


async def _stream(client: httpx2.AsyncClient, url: str, delays: list[float]) -> int:
    pieces = 0
    async with client.stream("POST", url, json={"prompt": "x"}) as reply:
        async for text in reply.aiter_text():
            pieces += 1
            now = time.time()
            events = text.replace("data: ", "").split()
            delays += [now - float(event) for event in events if event != "[DONE]"]
    return pieces


async def _measure(url: str, num_streams: int) -> Found:
    delays: list[float] = []
    limits = httpx2.Limits(max_connections=num_streams)
    async with httpx2.AsyncClient(limits=limits, timeout=60) as client:
        before, start = _used(), time.time()
        streams = (_stream(client, url, delays) for _ in range(num_streams))
        pieces = sum(await asyncio.gather(*streams))
    after = _used()
    used = {name: after[name] - before[name] for name in _PROCESSES}
    return Found(delays, pieces, time.time() - start, used)


def _used() -> dict[str, float]:
    """Processor seconds of each process so far."""
    found = dict.fromkeys(_PROCESSES, 0.0)
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for name, begins in _PROCESSES.items():
            if title.startswith(begins):
                times = process.cpu_times()
                found[name] += times.user + times.system
    return found


def _row(num_streams: int, found: Found) -> str:
    count = len(found.delays)
    cuts = statistics.quantiles(found.delays, n=100)
    costs = [f"{found.used[name] / count * 1e6:.0f}" for name in _PROCESSES]
    cells = [
        str(num_streams),
        f"{count / found.seconds:,.0f}",
        f"{count / found.pieces:.2f}",
        *costs,
        f"{cuts[49] * 1e3:.0f}, {cuts[98] * 1e3:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    args = parser.parse_args()
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from paged.http.replicas.deployments import ServedRouter

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        how = RequestRouterConfig(
            request_router_class="paged.http.replicas.router:ReplicaRouter",
            request_router_kwargs={"policy": "prefix"},
        )
        replica = serve.deployment(
            _Clock, name="Replica", max_ongoing_requests=1000, request_router_config=how
        ).bind(args.step_ms / 1e3, args.seconds)
        router = serve.deployment(ServedRouter, name="Router", max_ongoing_requests=1000)
        serve.run(router.bind(replica, 1000))
        url = f"http://127.0.0.1:{port}/"
        asyncio.run(_measure(url, 2))
        print(_HEADS)
        for num_streams in args.streams:
            print(_row(num_streams, asyncio.run(_measure(url, num_streams))), flush=True)
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
