"""How many replicas there should be, by the requests that are open: Ray Serve's rule."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class Autoscaling:
    """The rule, with the defaults of Ray Serve where it has them.

    Attributes:
        least, most: replicas.
        target: open requests that a replica is to have.
        interval: seconds between two looks.
        up_delay, down_delay: seconds for which more, or fewer, must be wanted before anything is
            done.
        start_seconds: from when a replica is wanted until it takes requests.
    """

    least: int
    most: int
    target: float = 64.0
    interval: float = 10.0
    up_delay: float = 30.0
    down_delay: float = 600.0
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(
                f"autoscaling needs at least 1 replica and no fewer at most, got {self.least} to "
                f"{self.most}"
            )
        if self.target <= 0 or self.interval <= 0:
            raise ValueError(f"the target and the interval must be above 0, got {self}")


class Autoscaler:
    """Decides; whoever asks does it."""

    def __init__(self, rule: Autoscaling) -> None:
        self.rule = rule
        self._since: float | None = None  # since when more, or fewer, have been wanted
        self._wants_more = False

    def wanted(self, now: float, num_replicas: int, num_open: int) -> int:
        """How many replicas there should be now.

        Args:
            num_replicas: as there are, those that start included.
            num_open: requests that run and wait, of all of them.
        """
        rule = self.rule
        wanted = min(max(ceil(num_open / rule.target), rule.least), rule.most)
        if wanted == num_replicas:
            self._since = None
            return num_replicas
        wants_more = wanted > num_replicas
        if self._since is None or wants_more != self._wants_more:
            self._since, self._wants_more = now, wants_more
        if now - self._since < (rule.up_delay if wants_more else rule.down_delay):
            return num_replicas
        self._since = None
        return wanted
