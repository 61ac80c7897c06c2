"""Ray Serve asks here which replica gets a request; `paged.runtime.routing` knows."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from paged.http.replicas.request import PAGE_BYTES, Asked
from paged.runtime.routing import Policy, Router

_BYTES_PER_TOKEN = 4
# Until a replica has said how much it holds: more than any, so that nothing is forgotten.
_MANY_TOKENS = 2**24


class ReplicaRouter(RequestRouter):
    """A router of Serve's, which tells ours what happens and asks it.

    Serve calls it on one event loop. A request counts for a replica from its choice on, lest many
    that come together all choose the same; what a replica says itself when it takes one corrects
    the count, which may be off by what was given up meanwhile, or came by way of other routers.
    """

    def initialize_state(self, policy: Policy) -> None:
        self._router = Router(policy)
        self._num_tokens: dict[str, int] = {}  # of each replica that takes requests

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        told = {_name(each.replica_id): _num_tokens(each) for each in replicas}
        for name in self._num_tokens.keys() - told.keys():
            self._forget(name)
        for name, num_tokens in told.items():
            if self._num_tokens.get(name) != num_tokens:
                self._forget(name)
                self._router.add(name, max(1, num_tokens * _BYTES_PER_TOKEN // PAGE_BYTES))
                self._num_tokens[name] = num_tokens
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The choice, and behind it all others, for when it has no room."""
        known = {_name(each.replica_id): each for each in candidate_replicas}
        among = known.keys() & self._num_tokens.keys()
        if pending_request is None:
            return [candidate_replicas]
        # Else Serve would ask again without a pause while none has room.
        pending_request.routing_context.should_backoff = True
        if not among:
            return [candidate_replicas]
        pages = _pages(pending_request)
        self._take_back(pending_request)
        name = self._router.choose(pages, among)
        self._router.sent(pages, name)
        pending_request.routing_context.chosen = name
        others = [each for other, each in known.items() if other != name]
        return [[known[name]], others]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        name = _name(replica_id)
        if _chosen(pending_request) != name and name in self._num_tokens:
            self._take_back(pending_request)
            self._router.sent(_pages(pending_request), name)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        if _name(replica_id) in self._num_tokens:
            self._router.report(_name(replica_id), num_ongoing_requests)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._router.ended(_name(replica_id))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._forget(_name(replica_id))

    def _take_back(self, pending_request: PendingRequest) -> None:
        if name := _chosen(pending_request):
            self._router.ended(name)

    def _forget(self, name: str) -> None:
        if self._num_tokens.pop(name, None) is not None:
            self._router.remove(name)


def _name(replica_id: ReplicaID) -> str:
    name: str = replica_id.unique_id
    return name


def _chosen(pending_request: PendingRequest) -> str | None:
    """The last choice for a request, which is noted where Serve notes how far its own has got."""
    return getattr(pending_request.routing_context, "chosen", None)


def _num_tokens(replica: RunningReplica) -> int:
    stats: dict[str, Any] = replica.routing_stats
    return int(stats.get("num_tokens", _MANY_TOKENS))


def _pages(pending_request: PendingRequest) -> tuple[bytes, ...]:
    """Those of the request that `Replica.answer` is called with."""
    request = pending_request.args[0]
    assert isinstance(request, Asked)
    return request.pages
