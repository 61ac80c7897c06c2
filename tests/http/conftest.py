"""A server around the fake engine, called in this process or over a socket."""

import shutil
import subprocess
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from paged.http.app import create_app
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import FakeEngine, serving


@pytest.fixture(autouse=True, scope="session")
def patient_clients() -> None:
    """A busy machine may take longer to answer than the five seconds that clients wait."""
    shared = signature(httpx2.get).parameters["timeout"].default
    for part in ("connect", "read", "write", "pool"):
        setattr(shared, part, 60.0)
    assert httpx2.Client().timeout.read == 60.0


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
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a certificate that vouches for itself, and its key."""
    if not shutil.which("openssl"):
        pytest.skip("needs the program openssl, to make a certificate")
    folder = tmp_path_factory.mktemp("certificate")
    made = "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=a"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *made.split(), *names], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def demo_engine() -> Iterator[AsyncEngine]:
    """The demo model, with few shapes to compile."""
    engine = AsyncEngine(
        max_model_len=384,
        kv_cache_memory_bytes=64 * 2**20,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        compile_cache_dir="",
    )
    yield engine
    engine.shutdown()
