"""Which prompts a decode engine has computed elsewhere, and what becomes of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from paged.groups import Windows, entries_behind
from paged.hits import find_prefix
from paged.pool import PagePool, of_group
from paged.prefix import extend_hashes
from paged.runtime.config import EngineConfig
from paged.runtime.load_costs import LoadCosts
from paged.runtime.messages import EngineRequest
from paged.runtime.runner import StepRunner
from paged.runtime.scheduler import SchedulerConfig
from paged.runtime.transfer.handshake import facts_of
from paged.runtime.transfer.landing import Landing
from paged.runtime.transfer.peer import Handover, Peer

logger = logging.getLogger(__name__)

OUTCOMES = ("done", "refused", "timeout", "lost", "aborted", "unreachable", "no_room")
"""How asking for a prompt may end. All but the first leave the rest of it to this engine."""

# Of the host pages, what may be on its way: the rest is for what is to stay there.
_MOST_COMING = 0.5


class RemotePrefills:
    """Asks prefill engines for prompts, and takes in what they hand over.

    Args:
        peers: the prefill engines; with none, nothing is ever asked.
        least: tokens of a prompt, beside those that are cached, above which it is worth it.
        timeout: seconds without news of a prompt after which it is not waited for.

    Attributes:
        outcomes: how many prompts have ended in each way.
        num_pages: that were handed over.
        seconds: that prompts have been waited for, all together.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        least: int,
        timeout: float,
        pool: PagePool,
        runner: StepRunner,
        windows: Windows,
        load_costs: LoadCosts,
    ) -> None:
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.num_pages, self.seconds = 0, 0.0
        self._peers, self._least, self._timeout = peers, least, timeout
        self._pool, self._runner = pool, runner
        self._windows, self._load_costs = windows, load_costs
        self._under_way: dict[Handover, Peer] = {}

    @classmethod
    def of(
        cls, config: EngineConfig, runner: StepRunner, pool: PagePool, scheduling: SchedulerConfig
    ) -> RemotePrefills:
        """Those that a configuration asks for; they are connected to meanwhile."""
        addresses = config.prefill_servers
        facts = facts_of(runner) if addresses else {}
        peers = [Peer(each, facts, runner.page_parts, runner.host.stack) for each in addresses]
        return cls(
            peers,
            config.min_remote_prefill_tokens,
            config.remote_prefill_timeout,
            pool,
            runner,
            scheduling.windows,
            scheduling.load_costs,
        )

    @property
    def num_under_way(self) -> int:
        """Prompts that are being handed over."""
        return len(self._under_way)

    @property
    def num_connected(self) -> int:
        """Prefill engines that can be asked."""
        return sum(each.can_be_asked for each in self._peers)

    def ask(self, request: EngineRequest) -> Handover | None:
        """Have what the cache lacks of a prompt computed elsewhere; None if it is not.

        All of a prompt that is to be scored is computed here.
        """
        prompt, page_size = request.prompt_token_ids, self._pool.page_size
        scores_prompt = request.params.prompt_logprobs is not None
        if not self._peers or len(prompt) <= self._least or scores_prompt:
            return None
        hashes = list[bytes]()
        extend_hashes(hashes, prompt[:-1], page_size, request.cache_salt)
        near = find_prefix(self._pool, hashes, self._windows, on_host=True)
        num_known, num_full = len(near[0]), len(hashes)
        num_gained = (num_full - num_known) * page_size
        first = [
            max(num_known, entries_behind(window, num_full * page_size, page_size))
            for window in self._windows
        ]
        names = [
            of_group(name, group) for group, start in enumerate(first) for name in hashes[start:]
        ]
        is_long = len(prompt) - num_known * page_size > self._least
        if not is_long or not names or not self._load_costs.are_worth(len(names), num_gained):
            return None
        peer = min(
            (each for each in self._peers if each.can_be_asked),
            key=lambda each: each.num_tokens,
            default=None,
        )
        if peer is None:
            self.outcomes["unreachable"] += 1
            return None
        if (landing := self._landing(len(names))) is None:
            self.outcomes["no_room"] += 1
            return None
        handover = Handover(names, num_gained, landing)
        self._under_way[handover] = peer
        wanted = prompt[: num_full * page_size + 1]
        peer.ask(handover, wanted, request.cache_salt, request.priority, first)
        return handover

    def see_to(self, handover: Handover, *, is_wanted: bool) -> None:
        """Take in what has arrived; give it up where nobody waits for it, or it takes too long."""
        self._take_in(handover)
        if handover.outcome.done():
            return
        silence = time.monotonic() - handover.last_news
        if not is_wanted:
            self._under_way[handover].cancel(handover)
        elif silence > self._timeout:
            reason = f"nothing was heard for {silence:.1f} s"
            self._under_way[handover].give_up(handover, reason)

    def settle(self, handover: Handover) -> None:
        """Take in the last of a handover that has ended, and say how it did."""
        self._take_in(handover)
        peer, outcome = self._under_way.pop(handover), handover.outcome.result()
        self.outcomes[outcome.name] += 1
        self.seconds += time.monotonic() - handover.started
        if outcome.reason:
            logger.warning(
                "Prefill server %s: %s (%s): the rest of a prompt is computed here",
                *(peer.name, outcome.reason, outcome.name),
            )

    def close(self) -> None:
        """End all connections. Idempotent."""
        for peer in self._peers:
            peer.close()
        for handover in self._under_way:
            handover.end("aborted")
        self._under_way.clear()

    def _landing(self, num_pages: int) -> Landing | None:
        """Room for pages on their way; None if too many are."""
        num_coming = sum(len(each.names) for each in self._under_way)
        if num_coming + num_pages > _MOST_COMING * self._pool.host.num_pages:
            return None
        try:
            return Landing(self._runner.page_parts, num_pages)
        except OSError as error:
            logger.warning("No memory for pages of a prefill server: %s", error)
            return None

    def _take_in(self, handover: Handover) -> None:
        while handover.landed:
            first, stack = handover.landed.popleft()
            names = handover.names[first : first + len(stack[0])]
            self._runner.host.keep([self._pool.host.take(name) for name in names], stack)
            self._runner.host.on_save(names, stack)
            self.num_pages += len(names)
