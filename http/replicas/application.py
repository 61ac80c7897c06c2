"""`paged.serve_app`: an application for `serve run`, and for the files of `serve deploy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paged.http.replicas.options import read_args
from paged.runtime.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application


def serve_app(args: Mapping[str, Any]) -> Application:
    """What Ray Serve deploys: routers that have replicas of `paged serve` answer.

    serve run paged:serve_app model=path/to/model num_replicas=2

    Args:
        args: flags of `paged serve` and fields of `ReplicaOptions`, by name.

    Raises:
        ConfigError: an argument that is not known or out of its range, or no Ray Serve.
    """
    told = read_args(args)
    try:
        from paged.http.replicas.deployments import application
    except ImportError as error:
        raise ConfigError(
            f"paged.serve_app needs Ray Serve: pip install 'paged[ray]' ({error})"
        ) from error
    return application(told)
