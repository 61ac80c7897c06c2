"""Where a server listens: under a path, on a Unix socket, with certificates."""

import contextlib
import resource
import socket
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from paged.http.cli import main, parse
from paged.http.listener import bound
from paged.http.options import ServeOptions
from paged.runtime.errors import ConfigError
from paged.runtime.flags import read_flags
from tests.http.servers import started

# The real command line and server around the fake engine.
PROGRAM = """
import sys
from paged.http.cli import main
from paged.runtime.async_engine import AsyncEngine
from tests.http.fakes import FakeEngine
AsyncEngine.from_config = lambda config, **how: FakeEngine()
sys.exit(main(["serve", "--host=127.0.0.1", "--port=0", "--served-model-name=a", *sys.argv[1:]]))
"""
BODY = {"prompt": "a"}


def complaint(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["serve", "no-such-model", "--port=0", *flags]) == 2
    [line] = capsys.readouterr().err.splitlines()
    return line.removeprefix("paged: error: ")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "paged.sock"
    with started(PROGRAM, f"--uds={path}", pattern=r"http://localhost/v1") as running:
        assert running.ready == f"Ready: a at http://localhost/v1 (on the Unix socket {path})\n"
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(path))) as client:
            reply = client.post(f"{running.url}/completions", json=BODY)
            assert reply.json()["choices"][0]["text"] == "Hello!"
        running.process.terminate()
        assert running.process.wait(10) == 0
    assert not path.exists()


def test_a_socket_that_a_server_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(str(path))
    with bound(ServeOptions(uds=str(path))) as listener:
        assert listener.getsockname() == str(path)


def test_other_things_are_not(tmp_path: Path) -> None:
    file, used = tmp_path / "file", tmp_path / "used.sock"
    file.write_text("mine")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(used))
        other.listen()
        for path in (file, used, tmp_path / "no/such/folder", tmp_path / ("x" * 200)):
            with pytest.raises(ConfigError, match=f"Cannot listen on --uds {path}: "):
                bound(ServeOptions(uds=str(path))).__enter__()
    assert file.read_text() == "mine"
    assert used.is_socket()


def test_under_a_path() -> None:
    """A proxy asks without it, and tells clients where they are with it."""
    with started(PROGRAM, "--root-path=/models/a", "--api-key=k") as running:
        root = running.url.removesuffix("/v1")
        assert httpx2.get(f"{root}/health").status_code == 200
        assert httpx2.get(f"{root}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer k"}
        reply = httpx2.post(f"{root}/v1/completions", json=BODY, headers=headers)
        assert reply.json()["choices"][0]["text"] == "Hello!"
        described = httpx2.get(f"{root}/openapi.json", headers=headers).json()
        assert described["servers"] == [{"url": "/models/a"}]
        counted = httpx2.get(f"{root}/metrics").text
        assert (
            'http_requests_total{handler="/v1/completions",method="POST",status="200"}' in counted
        )


def test_as_many_connections_as_the_system_allows() -> None:
    """The program is given few, as it is by many shells."""
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400))"
    with started(few + PROGRAM) as running, contextlib.ExitStack() as stack:
        assert resource.prlimit(running.process.pid, resource.RLIMIT_NOFILE) == (400, 400)
        address = urlsplit(running.url)
        for _ in range(200):
            stack.enter_context(socket.create_connection((address.hostname, address.port)))
        assert httpx2.get(f"{running.url}/models").status_code == 200


@pytest.mark.parametrize("path", ["models", "/", "/models/", "//", "/a b", "/a?b", "/a#b"])
def test_paths_that_are_none(path: str) -> None:
    with pytest.raises(ConfigError, match="--root-path must be like /models"):
        read_flags(ServeOptions, parse(["serve", f"--root-path={path}"]))


def test_https(certificate: Path) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    trust = ssl.create_default_context(cafile=cert)
    with started(PROGRAM, f"--ssl-certfile={cert}", f"--ssl-keyfile={key}") as running:
        assert running.url.startswith("https://127.0.0.1:")
        reply = httpx2.post(f"{running.url}/completions", json=BODY, verify=trust)
        assert reply.json()["choices"][0]["text"] == "Hello!"
        with pytest.raises(httpx2.ConnectError):
            httpx2.get(f"{running.url}/models")


def test_clients_with_certificates(certificate: Path) -> None:
    cert, key = certificate / "cert.pem", certificate / "key.pem"
    flags = (f"--ssl-certfile={cert}", f"--ssl-keyfile={key}", f"--ssl-ca-certs={cert}")
    trust, known = (ssl.create_default_context(cafile=cert) for _ in range(2))
    known.load_cert_chain(cert, key)
    with started(PROGRAM, *flags) as running:
        assert httpx2.get(f"{running.url}/models", verify=known).status_code == 200
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{running.url}/models", verify=trust)


def test_certificates_are_read_before_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    for path in (empty, tmp_path / "nosuch.pem"):
        line = complaint(capsys, f"--ssl-certfile={path}")
        assert line.startswith(f"Cannot use the certificates in {path}: ")
    line = complaint(capsys, f"--ssl-keyfile={empty}")
    assert line == "--ssl-keyfile and --ssl-ca-certs need --ssl-certfile"


def test_connections_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """Longer than pools of clients and proxies keep theirs, or as long as the flag says."""
    assert ServeOptions().timeout_keep_alive > 60
    assert complaint(capsys, "--timeout-keep-alive=0").startswith("--timeout-keep-alive must be")
    with started(PROGRAM, "--timeout-keep-alive=1") as running:
        address = urlsplit(running.url)
        with socket.create_connection((address.hostname, address.port), 30) as connection:
            start = time.monotonic()
            # Both at once: the second must not be late.
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: a\r\n\r\n" * 2)
            replies = b""
            while piece := connection.recv(4096):
                replies += piece
            assert replies.count(b"200 OK") == 2
            assert 0.9 < time.monotonic() - start < 30
