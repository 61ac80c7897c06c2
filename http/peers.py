"""What several API processes count, added up: whichever of them is asked answers for all."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_SECONDS_TO_ANSWER = 5
# Of these each process has its own, and they do not add up.
_NOT_ADDED = ("process_start_time_seconds", "python_info")


@dataclass(frozen=True)
class Peers:
    """The ports, on this machine alone, at which API processes ask each other.

    Attributes:
        own: of this process.
        others: of the others.
    """

    own: int
    others: tuple[int, ...]

    async def expositions(self) -> Sequence[str]:
        """What each of the others counts. Raises OSError or TimeoutError if one does not say."""
        async with asyncio.timeout(_SECONDS_TO_ANSWER):
            return await asyncio.gather(*map(_ask, self.others))


async def _ask(port: int) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        answer = await reader.read(-1)
    finally:
        writer.close()
    return answer.partition(b"\r\n\r\n")[2].decode()


def added(own: str, others: Iterable[str], shared: Collection[str]) -> bytes:
    """One exposition of them all.

    Args:
        own: the exposition of the process that was asked.
        others: those of the others.
        shared: names of what all say alike, because it is about the engine.
    """
    families: dict[str, Metric] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for number, exposition in enumerate([own, *others]):
        for family in text_string_to_metric_families(exposition):
            if number and (family.name in shared or family.name in _NOT_ADDED):
                continue
            families.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                before = found.get(key)
                adds = before is not None and not sample.name.endswith("_created")
                value = sample.value + (before.value if adds and before else 0)
                if before is None or adds:
                    found[key] = sample._replace(value=value)
    for name, family in families.items():
        family.samples = list(values[name].values())
    registry = CollectorRegistry()
    registry.register(_Fixed(families.values()))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
