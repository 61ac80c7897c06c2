"""What a server's log leaves out."""

import logging
from collections.abc import Iterator

import pytest

from paged.http.logs import configure_logging, leave_out

ACCESS, ERROR = logging.getLogger("uvicorn.access"), logging.getLogger("uvicorn.error")


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("paged", "uvicorn")]
    levels = [logger.level for logger in loggers]
    filters = [list(logger.filters) for logger in (ACCESS, ERROR)]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    for logger, before in zip((ACCESS, ERROR), filters, strict=True):
        logger.filters[:] = before


def test_uvicorn_tells_only_of_trouble(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    ERROR.info("Started server process")
    ERROR.error("Exception in ASGI application")
    ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", "/v1/models", "1.1", 200)
    assert caplog.messages == [
        "Exception in ASGI application",
        '127.0.0.1:5 - "GET /v1/models HTTP/1.1" 200',
    ]


def test_paths_can_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    configure_logging("info")
    leave_out("/health, /metrics")
    for path in ("/health", "/metrics?name=a", "/healthy"):
        ACCESS.info('%s - "%s %s HTTP/%s" %d', "127.0.0.1:5", "GET", path, "1.1", 200)
    assert caplog.messages == ['127.0.0.1:5 - "GET /healthy HTTP/1.1" 200']
