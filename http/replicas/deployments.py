"""The two deployments of an application, in Ray Serve's terms."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paged.http.api.errors import ApiError
from paged.http.replicas.joined import Whole
from paged.http.replicas.options import ReplicaOptions, Told
from paged.http.replicas.relay import Messages, Relay
from paged.http.replicas.replica import Replica
from paged.http.replicas.reply_pipes import Inboxes, watch
from paged.http.replicas.request import Asked
from paged.http.server import TIME_TO_LEAVE
from paged.runtime.errors import Overloaded

# A router holds little of a request; how many it may hold is for the replicas to say.
_MOST_AT_ROUTER = 100_000
_SECONDS_FOR_ALL = 5.0


class ServedReplica(Replica):
    """A replica as Serve runs it."""

    def __init__(self, flags: Sequence[str]) -> None:
        super().__init__(flags, serve.get_replica_context().replica_id.unique_id)

    def __del__(self) -> None:  # what Serve calls when the last request is answered
        self.close()


class ServedRouter:
    """What Serve's HTTP proxies send requests to."""

    def __init__(self, replicas: DeploymentHandle, max_body_size: int) -> None:
        self._relay = Relay(_Replicas(replicas), max_body_size)

    async def __call__(self, request: Request) -> Response:
        return _Relayed(self._relay)


class _Relayed(Response):
    """A response that an application gives."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":  # Serve's proxy puts the same id on it
                headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await self._relay(scope, receive, send_without_id)


class _Replicas:
    """The replicas, by way of a handle on their deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._inboxes = Inboxes()
        self._watches: set[asyncio.Task[None]] = set()

    async def answer(self, request: Asked) -> Messages:
        address = await self._inboxes.address(ray.util.get_node_ip_address())
        inbox, call = self._inboxes.open(), None
        try:
            call = self._handle.answer.remote(request, address, inbox.number)
            watching = asyncio.create_task(watch(_admitted(call), inbox))
            self._watches.add(watching)
            watching.add_done_callback(self._watches.discard)
            while messages := await inbox.read():
                yield messages
            call = None  # it ends, too
        finally:
            self._inboxes.close(inbox)
            if call is not None:
                call.cancel()

    async def answers(self, request: Asked) -> Sequence[Whole]:
        asked = self._handle.broadcast("answer_whole", request)
        try:
            found = await asked.results_async(timeout_s=_SECONDS_FOR_ALL, return_exceptions=True)
        except TimeoutError as error:
            message = f"A replica does not answer within {_SECONDS_FOR_ALL:g} s"
            raise ApiError(503, message, "ServiceUnavailableError") from error
        return [each for each in found if isinstance(each, Whole)]


async def _admitted(call: DeploymentResponse) -> None:
    """A call, in the words of the house. Raises Overloaded for one that no replica has room for."""
    try:
        await call
    except (BackPressureError, DeploymentUnavailableError) as error:
        raise Overloaded(str(error)) from error


def application(told: Told) -> Application:
    """An application as it was described."""
    # Serve ends what takes longer; engines get the rest to say so.
    grace = told.server.shutdown_timeout + TIME_TO_LEAVE
    replicas = serve.deployment(
        ServedReplica,
        name="Replica",
        ray_actor_options={"num_cpus": told.options.cpus_per_replica, "num_gpus": told.gpus},
        max_ongoing_requests=told.options.max_requests,
        max_queued_requests=told.options.max_waiting_requests,
        graceful_shutdown_timeout_s=grace,
        graceful_shutdown_wait_loop_s=0.5,
        request_router_config=RequestRouterConfig(
            request_router_class="paged.http.replicas.router:ReplicaRouter",
            request_router_kwargs={"policy": told.options.routing},
        ),
        **_how_many(told.options),
    )
    router = serve.deployment(
        ServedRouter,
        name="Router",
        num_replicas=told.options.num_routers,
        max_surge_percent=100,  # of two generations, at no time none is there
        ray_actor_options={"num_cpus": 0.5},
        max_ongoing_requests=_MOST_AT_ROUTER,
        graceful_shutdown_timeout_s=grace,
        graceful_shutdown_wait_loop_s=0.5,
    )
    return router.bind(replicas.bind(told.flags), told.server.max_body_size)


def _how_many(options: ReplicaOptions) -> dict[str, Any]:
    if options.max_replicas is None:
        return {"num_replicas": options.num_replicas}
    return {
        "autoscaling_config": {
            "min_replicas": options.num_replicas,
            "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target_requests,
        }
    }
