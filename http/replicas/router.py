"""Ray Serve asks here which replica gets a request; `paged.runtime.routing` knows."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged.http.replicas.request import PAGE_BYTES, Asked
from paged.runtime.routing import Policy, Router

_BYTES_PER_TOKEN = 4
# Of a replica that does not say how many it holds: nothing that was sent there is forgotten.
_MANY_TOKENS = 2**24


class ReplicaRouter(RequestRouter):
    """A router of Serve's, which tells ours what happens and asks it.

    Serve calls it on one event loop. A request counts for a replica from its choice on, lest many
    that come together all choose the same.
    """

    def initialize_state(self, policy: Policy) -> None:
        self._router = Router(policy)
        self._open: dict[str, str] = {}  # the replicas of requests, by Serve's own id

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        told = {_name(each.replica_id): each for each in replicas}
        there = set(self._router.replicas)
        for name in there - told.keys():
            self._router.remove(name)
        for name in told.keys() - there:
            self._router.add(name, _num_pages(told[name]))
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The choice, and behind it all others, for when it has no room."""
        if pending_request is None:
            return [candidate_replicas]
        # Else Serve would ask again without a pause while none has room.
        pending_request.routing_context.should_backoff = True
        known = {_name(each.replica_id): each for each in candidate_replicas}
        if not (among := known.keys() & set(self._router.replicas)):
            return [candidate_replicas]
        request_id = pending_request.metadata.internal_request_id
        self._close(request_id)  # one that had no room
        name = self._router.choose(_pages(pending_request), among)
        self._begin(pending_request, name)

        def close_if_given_up(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                self._close(request_id)

        pending_request.future.add_done_callback(close_if_given_up)
        others = [each for other, each in known.items() if other != name]
        return [[known[name]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        request_id, name = pending_request.metadata.internal_request_id, _name(replica_id)
        if self._open.get(request_id, name) != name and name in self._router.replicas:
            self._close(request_id)
            self._begin(pending_request, name)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._close(internal_request_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        if (name := _name(replica_id)) in self._router.replicas:
            self._router.remove(name)

    def _begin(self, pending_request: PendingRequest, name: str) -> None:
        self._router.sent(_pages(pending_request), name)
        self._open[pending_request.metadata.internal_request_id] = name

    def _close(self, request_id: str) -> None:
        if (name := self._open.pop(request_id, None)) is not None:
            self._router.ended(name)


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _num_pages(replica: RunningReplica) -> int:
    """How much of what was sent there to remember."""
    num_tokens: int = replica.replica_metadata.get("num_tokens", _MANY_TOKENS)
    return max(1, num_tokens * _BYTES_PER_TOKEN // PAGE_BYTES)


def _pages(pending_request: PendingRequest) -> tuple[bytes, ...]:
    """Those of the request that `Replica.answer` is called with."""
    request = pending_request.args[0]
    assert isinstance(request, Asked)
    return request.pages
