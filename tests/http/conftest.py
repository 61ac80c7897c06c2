"""A server around the fake engine, called in this process or over a socket."""

from collections.abc import Iterator

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import FakeEngine, serving


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> Starlette:
    return create_app(engine, ["tiny", "other-name"])


@pytest.fixture
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def url(app: Starlette) -> Iterator[str]:
    """The application behind a real server on a free port of this machine."""
    with serving(app) as address:
        yield address


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[AsyncEngine]:
    """The demo model, with few shapes to compile."""
    engine = AsyncEngine(
        max_model_len=256,
        kv_cache_memory_bytes=64 * 2**20,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        compile_cache_dir="",
    )
    yield engine
    engine.shutdown()
