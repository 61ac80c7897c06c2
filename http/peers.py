"""Several API processes that answer as one: what each is asked by the others, and metrics added up.

They ask at Unix sockets in a folder of their own, which nobody else can enter.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from paged.http.api.errors import ApiError

_SECONDS_TO_ANSWER = 5
# Of these each process has its own, and they do not add up.
_NOT_ADDED = ("process_start_time_seconds", "python_info")

Answers = Mapping[str, Callable[..., Any]]
"""What a process can be asked, about values of JSON's types, and what it says then, in these."""


@dataclass(frozen=True)
class Peers:
    """The other API processes of a server.

    Attributes:
        paths: of their sockets; that of the first process stands first, if it is another.
        is_first: whether this is the first process.
    """

    paths: tuple[str, ...] = ()
    is_first: bool = True

    async def ask[T](self, question: str, kind: type[T]) -> list[T]:
        """What each of them says, a value of `kind`. Raises ApiError (503) if one does not."""
        return await self._ask(self.paths, question, kind)

    async def ask_first[T](self, question: str, kind: type[T], *about: Any) -> T:
        """What the first process says about values of JSON's types. Raises as `ask`."""
        line = f"{question} {msgspec.json.encode(about).decode()}"
        [answer] = await self._ask(self.paths[:1], line, kind)
        return answer

    async def _ask[T](self, paths: Iterable[str], question: str, kind: type[T]) -> list[T]:
        try:
            async with asyncio.timeout(_SECONDS_TO_ANSWER):
                replies = await asyncio.gather(*(_ask(path, question) for path in paths))
            return [msgspec.json.decode(reply, type=kind) for reply in replies]
        except (TimeoutError, msgspec.DecodeError) as error:
            message = "One of this server's API processes does not answer the others"
            raise ApiError(503, message, "ServiceUnavailableError") from error


@asynccontextmanager
async def answering(listener: socket.socket, answers: Answers) -> AsyncIterator[None]:
    """Answer what the others ask meanwhile."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if question := (await reader.readline()).decode().strip():
                name, _, about = question.partition(" ")
                values = msgspec.json.decode(about) if about else ()
                writer.write(msgspec.json.encode(answers[name](*values)))
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, sock=listener)
    try:
        yield
    finally:
        server.close()


async def _ask(path: str, question: str) -> bytes:
    """The answer of one, which is nothing if it has ended."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError:
        return b""
    try:
        writer.write(f"{question}\n".encode())
        return await reader.read(-1)
    except OSError:
        return b""
    finally:
        writer.close()


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
    return exposition_of(families.values())


def exposition_of(families: Iterable[Metric]) -> bytes:
    """Metrics in Prometheus' words."""
    registry = CollectorRegistry()
    registry.register(_Fixed(families))
    return generate_latest(registry)


class _Fixed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
