"""Bytes that are no proper request: refused, or waited for with an end, and nobody else notices."""

import contextlib
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx2
import psutil
import pytest
from starlette.applications import Starlette

from paged.http import connection
from paged.http.api import body
from tests.http.fakes import FakeEngine, serving
from tests.runtime.remote import wait_until

POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a"}'
WHOLE = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
LAST = b"GET /version HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n"


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    assert address.hostname
    return socket.create_connection((address.hostname, address.port), timeout=20)


def everything(client: socket.socket) -> bytes:
    """What comes until the server hangs up."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(2**16):
            received += data
    return received


def answers(url: str, *pieces: bytes) -> bytes:
    """What the server says to some bytes, and to a last request if it still listens."""
    with connect(url) as client:
        with contextlib.suppress(OSError):
            for piece in (*pieces, LAST):
                client.sendall(piece)
        received = everything(client)
    heard, _, reply = received.rpartition(b"HTTP/1.1 ")
    return heard if b'{"version"' in reply else received


def statuses(received: bytes) -> list[int]:
    return [int(head[:3]) for head in received.split(b"HTTP/1.1 ")[1:]]


@pytest.fixture(autouse=True)
def still_serving(url: str) -> Iterator[None]:
    """Whatever was sent, the next client gets its answer."""
    yield
    reply = httpx2.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert reply.status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 1000,
        b"hello\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\x00b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Request-Id: a\x01b\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n: a\r\n\r\n",
        b"CONNECT a:80 HTTP/1.1\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1e3\r\n\r\n",
        POST + b"Content-Length: 99999999999999999999999\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n12345",
        POST + b"Transfer-Encoding: chunked\r\n\r\nnot hex\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 20 + b"\r\n",
    ],
)
def test_no_http(url: str, sent: bytes) -> None:
    assert statuses(answers(url, sent))[:1] in ([400], [404])


@pytest.mark.parametrize(
    "path",
    [
        b"/%",
        b"/%zz",
        b"/%00",
        b"/%ff%fe",
        b"/v1/models/%2e%2e",
        b"/" + b"a" * 60_000,
        b"//",
        b"/nowhere?\\",
    ],
)
def test_odd_paths(url: str, path: bytes) -> None:
    received = answers(url, b"GET " + path + b" HTTP/1.1\r\n\r\n")
    assert statuses(received) == [404]


@pytest.mark.parametrize("value", [b"\xff\xfe", "clé".encode(), b"a\tb", b"", b"x" * 60_000])
def test_odd_header_values(url: str, value: bytes) -> None:
    names = (b"X-Request-Id", b"Authorization", b"Origin", b"Accept", b"Content-Type", b"Upgrade")
    head = b"".join(b"%b: %b\r\n" % (name, value) for name in names if len(value) < 99)
    received = answers(url, GET + head + b"X-Request-Id: " + value + b"\r\n\r\n")
    assert statuses(received) == [200]


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"deflate, gzip"])
def test_packed_bodies(url: str, encoding: bytes) -> None:
    packed = gzip.compress(BODY)
    head = b"Content-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(packed))
    received = answers(url, POST + head + packed)
    assert statuses(received) == [415]
    assert b"without a Content-Encoding" in received


def test_bodies_in_pieces(url: str) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY)
    received = answers(url, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
    assert statuses(received) == [200]


def test_requests_in_a_row(url: str) -> None:
    received = answers(url, WHOLE * 50)
    assert statuses(received) == [200] * 50
    received = answers(url, WHOLE, b"x" * 5000)
    assert statuses(received)[-1] == 400


def test_a_request_behind_a_stream(url: str, engine: FakeEngine) -> None:
    engine.pause = 0.02
    asked = b'{"prompt": "a", "stream": true}'
    stream = POST + b"Content-Length: %d\r\n\r\n" % len(asked) + asked
    received = answers(url, stream + WHOLE)
    assert statuses(received) == [200, 200]
    assert received.index(b"[DONE]") < received.rindex(b"text_completion")


@pytest.mark.parametrize("flood", [b"X-A: b\r\n", b"X: " + b"y" * 5000 + b"\r\n", b"z" * 5000])
def test_headers_without_end(url: str, flood: bytes) -> None:
    with connect(url) as client:
        client.sendall(GET)
        sent = 0
        try:
            while sent < 50 * connection.MAX_HEAD_SIZE:
                client.sendall(flood)
                sent += len(flood)
        except OSError:
            pass
        assert sent < 50 * connection.MAX_HEAD_SIZE
        assert statuses(everything(client)) in ([431], [])


@pytest.mark.parametrize(
    "flood", [b"X-A: b\r\n" * 8000, b"X: " + b"y" * 64_000 + b"\r\n", b"z" * 64_000]
)
def test_trailers_without_end(url: str, flood: bytes) -> None:
    """Headers may come behind a body, too; nobody reads them, and nobody keeps them."""
    with connect(url) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\n")
        sent, most = 0, 2**24
        with contextlib.suppress(OSError):
            while sent < most:
                client.sendall(flood)
                sent += len(flood)
        assert sent < most


def test_trailers(url: str) -> None:
    end = b"0\r\nX-Sum: 1\r\n\r\n"
    chunks = b"%x\r\n%b\r\n" % (len(BODY), BODY)
    received = answers(url, POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + end)
    assert statuses(received) == [200]


def test_long_headers_are_told_so(url: str) -> None:
    received = answers(url, GET + b"X: " + b"y" * (2 * connection.MAX_HEAD_SIZE))
    assert statuses(received) == [431]
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == 431


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 1.0)
    monkeypatch.setattr(connection, "REST_TIMEOUT", 1.0)
    monkeypatch.setattr(body, "_PATIENCE", 1.0)


def drip(client: socket.socket, sent: bytes) -> float:
    """Send a byte at a time, up to where the server hangs up; seconds that it took."""
    start = time.monotonic()
    try:
        for byte in sent:
            client.sendall(bytes([byte]))
            time.sleep(0.05)
    except OSError:
        pass
    return time.monotonic() - start


@pytest.mark.parametrize(
    ("begin", "rest", "status"),
    [
        (b"", b"", None),
        (b"", GET + b"X: " + b"y" * 1000, 408),
        (WHOLE, GET + b"X: " + b"y" * 1000, 408),
        (POST + b"Content-Length: 1000\r\n\r\n", b" " * 1000, 408),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * 1000, 408),
        (POST + b"Content-Length: 1000\r\n\r\n", b"", 408),
    ],
)
@pytest.mark.usefixtures("impatient")
def test_slow_clients_are_cut_off(url: str, begin: bytes, rest: bytes, status: int | None) -> None:
    with connect(url) as client:
        client.sendall(begin)
        took = drip(client, rest)
        received = everything(client)
    assert took < 20, "to send it all takes 50 s and more"
    assert statuses(received)[-1:] == ([] if status is None else [status])


@pytest.mark.parametrize(
    ("begin", "rest"),
    [
        (WHOLE, b"\r\n"),  # which may stand before a request, and begins none
        (POST + b"Content-Length: 9\r\nContent-Encoding: gzip\r\n\r\n", b"123456789"),
    ],
)
def test_idle_connections_are_closed(app: Starlette, begin: bytes, rest: bytes) -> None:
    """Whatever came between the last answer and the silence."""
    with serving(app, timeout_keep_alive=1) as url, connect(url) as client:
        client.sendall(begin)
        received = client.recv(2**16)
        client.sendall(rest)
        start = time.monotonic()
        assert statuses(received + everything(client)) in ([200], [415])
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("begin", "rest"), [(GET, WHOLE), (POST + b"Content-Length: 3\r\n", b"abc" + WHOLE)]
)
def test_too_many_headers(
    url: str, begin: bytes, rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    many = b"".join(b"X-%d: y\r\n" % number for number in range(300))
    assert statuses(answers(url, begin + many + b"\r\n" + rest)) == [431]
    assert "Invalid HTTP request received." not in caplog.messages


def test_whoever_takes_nothing_is_cut_off(
    app: Starlette, engine: FakeEngine, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that is not read ends with its request, and leaves nothing behind."""
    monkeypatch.setattr(connection, "SEND_TIMEOUT", 0.5)
    engine.answer, engine.max_model_len = "x" * 400_000, 10**6
    asked = b'{"prompt": "a", "stream": true, "logprobs": 5, "max_tokens": 400000}'
    with connect(url) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
        assert client.recv(100)
        deadline = time.monotonic() + 20
        while not engine.aborted and time.monotonic() < deadline:
            time.sleep(0.05)
        assert engine.aborted
    wait_until(lambda: not engine.running)
    wait_until(lambda: app.state.load.num_requests == 0)


def has_peer(port: int) -> bool:
    """Whether the server, in this process, still has the descriptor of a client's connection."""
    connections = psutil.Process().net_connections("tcp")
    return any(each.raddr and each.raddr.port == port for each in connections)


@pytest.mark.parametrize("how", [b"keep-alive", b"close"])
def test_whoever_leaves_the_end_of_an_answer_is_cut_off(
    engine: FakeEngine, url: str, monkeypatch: pytest.MonkeyPatch, how: bytes
) -> None:
    """Though the server has written all of it, as it does where it is small."""
    monkeypatch.setattr(connection, "SEND_TIMEOUT", 0.5)
    monkeypatch.setattr(connection.Connection, "pause_writing", lambda self: None)
    engine.max_model_len = 10**8
    asked = b'{"prompt": "%b", "echo": true, "max_tokens": 1}' % (b"x" * 8 * 2**20)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", urlsplit(url).port))
        head = POST + b"Connection: %b\r\nContent-Length: %d\r\n\r\n" % (how, len(asked))
        client.sendall(head + asked)
        assert client.recv(100)
        wait_until(lambda: not has_peer(client.getsockname()[1]))


def test_a_slow_upload_that_is_fast_enough(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_PATIENCE", 0.2)
    monkeypatch.setattr(body, "_LEAST_RATE", 0.1)
    with connect(url) as client:
        head = POST + b"Connection: close\r\nContent-Length: 15\r\n\r\n"
        client.sendall(head + BODY[:1])  # which gives it ten seconds for the next
        assert drip(client, BODY[1:]) > 0.2
        assert statuses(everything(client)) == [200]


@pytest.mark.usefixtures("impatient")
def test_a_body_without_end(url: str) -> None:
    """It is answered as soon as it is too large, and then not listened to for ever."""
    piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    start = time.monotonic()
    with connect(url) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while time.monotonic() - start < 60:
                client.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
    assert time.monotonic() - start < 60


@pytest.mark.usefixtures("impatient")
def test_answers_may_take_longer_than_that(url: str, engine: FakeEngine) -> None:
    engine.answer, engine.pause = "x" * 16, 0.1
    assert httpx2.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 200


def test_many_idle_connections(url: str) -> None:
    clients = [connect(url) for _ in range(200)]
    for client in clients[::2]:
        client.sendall(b"GET /v1/mod")
    try:
        assert httpx2.get(f"{url}/health").status_code == 200
    finally:
        for client in clients:
            client.close()


class Stream(threading.Thread):
    """A client's stream.

    Attributes:
        gap: the most that this process computed between two of its tokens; seconds of a processor,
            to which others on the machine add nothing.
    """

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url, self.gap, self.ended = url, 0.0, False

    def run(self) -> None:
        asked: dict[str, Any] = {"prompt": "a", "stream": True, "max_tokens": 10**5}
        last = None
        with httpx2.stream("POST", f"{self.url}/v1/completions", json=asked, timeout=30) as reply:
            for _ in reply.iter_lines():
                now = time.process_time()
                self.gap = max(self.gap, now - (last or now))
                last = now
                if self.ended:
                    break


SIZE = 30 * 2**20
MANY = {
    "lists": b"[],",
    "numbers": b"1,",
    "quotes": b'"\\"\\\\",',
}


@pytest.mark.parametrize("kind", MANY)
def test_bodies_of_millions_of_values_hold_up_nobody(
    url: str, engine: FakeEngine, kind: str
) -> None:
    engine.answer, engine.max_model_len, engine.pause = "x" * 10**5, 2 * 10**5, 0.02
    stream = Stream(url)
    stream.start()
    wait_until(lambda: engine.num_tokens > 3)
    try:
        for field in (b"prompt", b"unknown", b"stop"):
            value = (MANY[kind] * (SIZE // len(MANY[kind])))[:-1]
            asked = b'{"prompt": "a", "%b": [%b]}' % (field, value)
            headers = {"Content-Type": "application/json"}
            reply = httpx2.post(f"{url}/v1/completions", content=asked, headers=headers, timeout=60)
            assert reply.status_code == 413
    finally:
        stream.ended = True
        stream.join()
        engine.answer, engine.max_model_len, engine.pause = "Hello!", 64, 0
    assert stream.gap < 2
