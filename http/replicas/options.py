"""What `paged.serve_app` is told: the flags of `paged serve`, and some of its own."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from paged.http.cli import parse_serve
from paged.http.config_file import flags_of
from paged.http.options import ServeOptions
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError
from paged.runtime.flags import option, read_flags

# What Ray Serve does in our place, and where it is told how.
_PROXY = "the HTTP proxy is Ray Serve's: say it in the http_options of its file"
_LOGS = "HTTP requests are logged by Ray Serve: say it in the logging_config of its file"
_RAYS = {
    "host": _PROXY,
    "port": _PROXY,
    "uds": _PROXY,
    "root_path": "Ray Serve knows the path: say route_prefix in its file",
    "timeout_keep_alive": _PROXY,
    "ssl_keyfile": _PROXY,
    "ssl_certfile": _PROXY,
    "ssl_ca_certs": _PROXY,
    "disable_uvicorn_access_log": _LOGS,
    "disable_access_log_for_endpoints": _LOGS,
    "api_server_count": "each replica has one process for HTTP: say num_replicas",
    "data_parallel_size": "each replica has one copy of the model: say num_replicas",
    "nnodes": "a replica is on one host: say tensor_parallel_size or pipeline_parallel_size",
    "headless": "a replica is on one host: drop it",
    "api_keys_file": "its limits would be counted by each replica for itself: say api_key",
}


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """How many replicas there are, what each gets, and which of them gets a request."""

    num_replicas: int = option(1, "Replicas of the model; the fewest of them with max_replicas.")
    max_replicas: int | None = option(
        None, "The most of them: there are as many as open requests ask for. Default num_replicas."
    )
    target_requests: float = option(
        32.0, "Open requests of a replica that their number is aimed at, with max_replicas."
    )
    max_requests: int = option(
        512, "Open requests of a replica at most; more wait until any replica has room."
    )
    max_waiting_requests: int = option(
        -1, "Requests that wait so at most, more being refused; -1 for any number."
    )
    gpus_per_replica: float | None = option(
        None,
        "GPUs of a replica: 0 without any, below 1 for a share of one. Default those that its "
        "model is spread over.",
    )
    cpus_per_replica: float = option(2.0, "CPU cores that Ray sets aside for a replica.")
    routing: Literal["prefix", "least_loaded", "random"] = option(
        "prefix",
        "Which replica gets a request: the one that has the longest part of its prompt in its "
        "cache, if it has room (prefix); the least_loaded; or a random one.",
    )
    num_routers: int = option(
        1, "Processes that route requests. Each knows best where the requests went that it sent."
    )

    def __post_init__(self) -> None:
        for name in ("num_replicas", "num_routers", "max_requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_replicas is not None and self.max_replicas < self.num_replicas:
            raise ConfigError(
                f"max_replicas must be at least num_replicas ({self.num_replicas}), "
                f"got {self.max_replicas}"
            )
        if not (self.target_requests > 0 and math.isfinite(self.target_requests)):
            raise ConfigError(f"target_requests must be above 0, got {self.target_requests}")
        if self.max_waiting_requests < -1:
            raise ConfigError(
                f"max_waiting_requests must be at least 0, or -1 for any number, "
                f"got {self.max_waiting_requests}"
            )
        for name in ("gpus_per_replica", "cpus_per_replica"):
            _check_share(name, getattr(self, name))


def _check_share(name: str, number: float | None) -> None:
    """Of what is whole, Ray gives out shares of one alone."""
    if number is None or 0 <= number <= 1 or (number > 1 and number.is_integer()):
        return
    raise ConfigError(f"{name} must be between 0 and 1, or a whole number, got {number}")


@dataclass(frozen=True)
class Told:
    """The arguments of an application, read.

    Attributes:
        flags: of `paged serve`, for each replica.
        options: about the replicas.
        server: what the flags say of the server.
        gpus: of each replica.
    """

    flags: tuple[str, ...]
    options: ReplicaOptions
    server: ServeOptions
    gpus: float


def read_args(args: Mapping[str, Any]) -> Told:
    """What an application is told, its names written with dashes or underscores.

    Raises:
        ConfigError: a name that is not known here, or a value out of its range.
    """
    values = {str(name).replace("-", "_"): _plain(value) for name, value in args.items()}
    own = {each.name for each in fields(ReplicaOptions)} & values.keys()
    ours = flags_of({name: values.pop(name) for name in own})
    flags = flags_of(values)
    parsed = parse_serve([*ours, *flags], ReplicaOptions)
    _check_rays(parsed)
    options = read_flags(ReplicaOptions, parsed)
    models = parsed.models or [parsed]
    each = max(one.tensor_parallel_size * one.pipeline_parallel_size for one in models)
    gpus = _num_gpus(options, each)
    return Told(tuple(flags), options, read_flags(ServeOptions, parsed), gpus)


def _plain(value: Any) -> Any:
    """`serve run` hands on what was typed; a switch is a truth value."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def _check_rays(parsed: argparse.Namespace) -> None:
    defaults = {each.name: each.default for each in (*fields(ServeOptions), *fields(EngineConfig))}
    for name, reason in _RAYS.items():
        if getattr(parsed, name) != defaults[name]:
            raise ConfigError(f"{name} is nothing for paged.serve_app: {reason}")


def _num_gpus(options: ReplicaOptions, num_devices: int) -> float:
    if options.gpus_per_replica is None:
        return float(num_devices)
    if num_devices > 1 and options.gpus_per_replica not in (0, num_devices):
        raise ConfigError(
            f"gpus_per_replica must be {num_devices}, as many as share the model, or 0 for devices "
            f"that are no GPUs; got {options.gpus_per_replica:g}"
        )
    return options.gpus_per_replica
