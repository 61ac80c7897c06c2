"""What is asked of all replicas, and answered as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.responses import JSONResponse, Response

from paged.http.peers import exposition_of


@dataclass(frozen=True)
class Whole:
    """A whole reply.

    Attributes:
        replica: whose it is.
    """

    replica: str
    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes


Join = Callable[[Sequence[Whole]], Response]


def _join_metrics(replies: Sequence[Whole]) -> Response:
    """Every sample of every replica, with a label that says whose it is."""
    families: dict[str, Metric] = {}
    for reply in replies:
        for family in text_string_to_metric_families(reply.body.decode()):
            labelled = [
                sample._replace(labels={**sample.labels, "replica": reply.replica})
                for sample in family.samples
            ]
            family.samples = []
            families.setdefault(family.name, family).samples += labelled
    return Response(exposition_of(families.values()), media_type=CONTENT_TYPE_LATEST)


def _join_load(replies: Sequence[Whole]) -> Response:
    """How many requests they answer together."""
    loads = [msgspec.json.decode(reply.body)["server_load"] for reply in replies]
    return JSONResponse({"server_load": sum(loads)})


def _unless_refused(join: Join) -> Join:
    """A refusal, as for want of a key, is that of all."""

    def joined(replies: Sequence[Whole]) -> Response:
        for reply in replies:
            if reply.status != 200:
                response = Response(reply.body, reply.status)
                response.raw_headers = list(reply.headers)
                return response
        return join(replies)

    return joined


JOINED: Mapping[str, Join] = {
    "/metrics": _unless_refused(_join_metrics),
    "/load": _unless_refused(_join_load),
}
"""By path of a GET."""
