"""The API processes that send an engine process their requests, and whose request is whose."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from paged.runtime.messages import EngineRequest, EngineStats, SequenceOutput
from paged.runtime.wire import Channel, News, ToEngine

# Seconds that a client's statistics may be old while others keep the engine busy.
_OLDEST_STATS = 0.25


@dataclass(eq=False)
class Client:
    """An API process.

    Attributes:
        num_taken: its messages that the core has heard, as `News` count them.
        told: when it got its last news, and how many messages had been taken then.
    """

    channel: Channel
    num_taken: int = 0
    told: tuple[float, int] = (0.0, 0)


@dataclass(eq=False)
class _Owner:
    """Whose request it is, and which of its sequences have not ended."""

    client: Client
    indices: set[int]


@dataclass(eq=False)
class Clients:
    """All API processes. With the first one the engine ends; others come and go.

    Args:
        channel: to the first.
        door: where others come in; listening.
        bell: a descriptor that is readable while the core has news of its own.
    """

    channel: Channel
    door: socket.socket | None = None
    bell: int | None = None
    _all: list[Client] = field(default_factory=list)
    _owners: dict[str, _Owner] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all.append(Client(self.channel))

    @property
    def first(self) -> Client:
        return self._all[0]

    @property
    def are_several(self) -> bool:
        return len(self._all) > 1

    def heard(self, *, wait: bool) -> list[Client]:
        """Those that have something to say; with `wait`, sleep until somebody has, or the core."""
        poll = select.poll()
        clients = {client.channel.fileno(): client for client in self._all}
        for descriptor, client in clients.items():
            poll.register(descriptor, client.channel.awaited)
        for other in (self.door, self.bell):
            if other is not None:
                poll.register(other, select.POLLIN)
        found = [descriptor for descriptor, _ in poll.poll(None if wait else 0)]
        if self.door is not None and self.door.fileno() in found:
            self._all.append(Client(Channel(self.door.accept()[0], ToEngine)))
        return [clients[descriptor] for descriptor in found if descriptor in clients]

    def leave(self, client: Client) -> list[str]:
        """A client has gone; the requests that it leaves behind."""
        left = [name for name, owner in self._owners.items() if owner.client is client]
        for name in left:
            del self._owners[name]
        if client is not self.first:
            self._all.remove(client)
            client.channel.close()
        return left

    def own(self, client: Client, request: EngineRequest) -> None:
        """Its news go to this client."""
        self._owners[request.request_id] = _Owner(client, set(range(request.params.n)))

    def forget(self, request_id: str, index: int | None) -> None:
        """One of its sequences has ended, or all. An id without an owner is ignored."""
        owner = self._owners.get(request_id)
        if owner is not None:
            owner.indices -= owner.indices if index is None else {index}
            if not owner.indices:
                del self._owners[request_id]

    def tell(
        self, outputs: Iterable[SequenceOutput], stats: EngineStats, *, everybody: bool
    ) -> None:
        """Give each client its share of a step's news; others hear statistics now and then.

        Args:
            everybody: whether they hear them now.
        """
        shares: dict[Client, list[SequenceOutput]] = {client: [] for client in self._all}
        for item in outputs:
            shares[self._owners[item.request_id].client].append(item)
            if item.finish_reason is not None:
                self.forget(item.request_id, item.index)
        now = time.monotonic()
        for client, share in shares.items():
            when, num_taken = client.told
            if share or everybody or num_taken < client.num_taken or now - when > _OLDEST_STATS:
                client.channel.send(News(share, stats, client.num_taken))
                client.told = (now, client.num_taken)
