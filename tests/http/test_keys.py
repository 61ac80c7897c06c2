"""Keys in a file: who is let in, how much at once, and how the file is read again."""

from __future__ import annotations

import hmac
import io
import json
import signal
import socket
import threading
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
import yaml
from starlette.testclient import TestClient

from paged.http import key_limits
from paged.http import keys as keys_module
from paged.http.app import create_app
from paged.http.cli import main
from paged.http.key_limits import LocalCounts, _duration
from paged.http.keys import KeyEntry, KeyRing, read_keys
from paged.runtime.errors import ConfigError
from tests.http.fakes import FakeEngine, serving
from tests.http.test_api_processes import COUNT, model, server  # noqa: F401
from tests.runtime.remote import wait_until

COMPLETIONS = "/v1/completions"


def entry(key: str = "secret", **fields: Any) -> dict[str, Any]:
    return {"name": "alice", "sha256": sha256(key.encode()).hexdigest()} | fields


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.jsonl"


def write(file: Path, *entries: dict[str, Any]) -> None:
    file.write_text("".join(f"{json.dumps(each)}\n" for each in entries))


def client_of(engine: FakeEngine, file: Path, **door: Any) -> TestClient:
    app = create_app(engine, ["tiny"], key_ring=KeyRing(file), **door)
    return TestClient(app, raise_server_exceptions=False)


def ask(client: TestClient, key: str = "secret", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return client.post(COMPLETIONS, json={"prompt": "abc"} | body, headers=headers)


def test_metrics_may_need_a_key_of_the_file(engine: FakeEngine, file: Path) -> None:
    write(file, entry())
    headers = {"X-Api-Key": "secret"}
    assert client_of(engine, file).get("/metrics").status_code == 200
    closed = client_of(engine, file, metrics_need_key=True)
    assert closed.get("/metrics").status_code == 401
    assert closed.get("/metrics", headers=headers).status_code == 200
    assert closed.get("/ready").status_code == 200


def test_who_is_let_in(engine: FakeEngine, file: Path) -> None:
    write(file, entry(), entry("other", name="bob"))
    client = client_of(engine, file, api_keys=["plain"])
    assert [ask(client, key).status_code for key in ("secret", "other", "plain")] == [200] * 3
    digest = sha256(b"secret").hexdigest()
    for wrong in ("", "wrong", digest, "secret2", "alice"):
        assert ask(client, wrong).status_code == 401
    assert client.get("/health").status_code == 200
    assert client.get("/v1/models", headers={"X-Api-Key": "other"}).status_code == 200


def test_keys_are_compared_in_constant_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(file, *(entry(str(number), name=str(number)) for number in range(5)))
    ring, compared, compare_digest = KeyRing(file), list[bytes](), hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for key in (b"0", b"4", b"none"):
        compared.clear()
        ring.find([sha256(key).digest()])
        assert len(compared) == 5


def test_requests_at_once(engine: FakeEngine, file: Path) -> None:
    write(file, entry(max_concurrent=1), entry("other", name="bob"))
    engine.pause, engine.answer = 0.2, "x" * 60
    with serving(create_app(engine, ["tiny"], key_ring=KeyRing(file))) as url:

        def post(key: str, max_tokens: int = 1) -> httpx2.Response:
            headers = {"Authorization": f"Bearer {key}"}
            body = {"prompt": "a", "max_tokens": max_tokens}
            return httpx2.post(f"{url}{COMPLETIONS}", json=body, headers=headers)

        first: list[httpx2.Response] = []
        thread = threading.Thread(target=lambda: first.append(post("secret", 60)))
        thread.start()
        while not engine.running:
            time.sleep(0.01)
        second, other = post("secret"), post("other")
        engine.pause = 0  # it has lasted long enough
        thread.join()
        assert (first[0].status_code, second.status_code, other.status_code) == (200, 429, 200)
        assert second.headers["retry-after"] == "1"
        assert second.json()["error"]["type"] == "RateLimitError"
        assert second.headers["x-ratelimit-limit-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        assert "x-ratelimit-limit-tokens" not in second.headers
        assert post("secret").status_code == 200, "the slot came back"


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_by_the_minute(
    engine: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(key_limits, "time", SimpleNamespace(monotonic=lambda: 1000.0))
    write(file, entry(tokens_per_minute=15))
    client = client_of(engine, file)
    first = ask(client, stream=stream)  # 4 tokens in, 6 out
    assert first.status_code == 200
    assert first.headers["x-ratelimit-limit-tokens"] == "15"
    assert first.headers["x-ratelimit-remaining-tokens"] == "15"
    assert first.headers["x-ratelimit-reset-tokens"] == "0ms"
    second = ask(client, stream=stream)
    assert second.headers["x-ratelimit-remaining-tokens"] == "5"
    third = ask(client, stream=stream)
    assert third.status_code == 429
    assert int(third.headers["retry-after"]) in range(15, 26)
    assert third.headers["x-ratelimit-remaining-tokens"] == "0"
    assert "15 tokens a minute" in third.json()["error"]["message"]


def test_an_allowance_comes_back_with_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("paged.http.key_limits.time.monotonic", lambda: now)
    counts = LocalCounts()
    counts.taken("alice", None, 600)
    counts.spend("alice", 900)
    assert counts.taken("alice", None, 600).retry_after == pytest.approx(30.1)
    now += 30.5
    assert counts.taken("alice", None, 600).refusal is None
    now += 1e6
    assert counts.taken("alice", None, 600).headers["x-ratelimit-remaining-tokens"] == "600"


def test_a_refusal_takes_no_slot() -> None:
    counts = LocalCounts()
    counts.spend("alice", 100)
    for _ in range(3):
        assert counts.taken("alice", 1, 10).refusal
    assert counts.taken("alice", 1, None).refusal is None


def test_admins(engine: FakeEngine, file: Path) -> None:
    write(file, entry(), entry("root", name="root", admin=True))
    client = client_of(engine, file, api_keys=["plain"])
    found = {
        key: client.get("/debug/x", headers={"X-Api-Key": key}).status_code
        for key in ("secret", "plain", "root", "none")
    }
    assert found == {"secret": 403, "plain": 403, "root": 404, "none": 401}


@pytest.mark.parametrize("written", ["lines", "list", "yaml"])
def test_forms_of_the_file(file: Path, written: str) -> None:
    entries = [entry(max_concurrent=2), entry("other", name="bob", admin=True)]
    if written == "lines":
        file.write_text("# keys\n\n" + "\n".join(map(json.dumps, entries)))
    else:
        file.write_text(json.dumps(entries) if written == "list" else yaml.safe_dump(entries))
    alice, bob = read_keys(file)
    assert alice == KeyEntry(name="alice", sha256=entry()["sha256"], max_concurrent=2)
    assert bob.admin


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "holds no key"),
        ("[]", "holds no key"),
        ("a: 1", "a list in YAML"),
        ("[1]", "Expected `object`"),
        ("{", "keys.jsonl"),
        ('{"name": "a"}', "sha256"),
        ('{"name": "a", "sha256": "abc"}', "sha256"),
        (json.dumps(entry(name="")), "name"),
        (json.dumps(entry(max_concurrent=0)), "max_concurrent"),
        (json.dumps(entry(tokens_per_minute=-1)), "tokens_per_minute"),
        (json.dumps({**entry(), "key": "plain text"}), "unknown field `key`"),
        (json.dumps(entry()) + "\n" + json.dumps(entry(name="b")), "2 times"),
    ],
)
def test_files_that_are_refused(file: Path, text: str, expected: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected) as error:
        read_keys(file)
    assert "\n" not in str(error.value)
    assert "plain text" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none")
    assert main(["serve", f"--api-keys-file={tmp_path}/none", "--port=0"]) == 2


def test_a_change_is_noticed(
    engine: FakeEngine, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_SECONDS_BETWEEN_LOOKS", 0.0)
    write(file, entry())
    client = client_of(engine, file)
    assert ask(client).status_code == 200
    write(file, entry("new key", name="bob"))
    assert (ask(client).status_code, ask(client, "new key").status_code) == (401, 200)
    file.write_text("not keys")
    assert ask(client, "new key").status_code == 200, "what is wrong changes nothing"
    file.unlink()
    assert ask(client, "new key").status_code == 200
    write(file, entry())
    assert ask(client).status_code == 200


def test_hash_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    assert main(["hash-key", "--name", "alice", "--max-concurrent", "4", "--admin"]) == 0
    made = capsys.readouterr()
    key = made.err.split()[-1]
    file.write_text(made.out)
    [found] = read_keys(file)
    assert found == KeyEntry(
        name="alice", sha256=sha256(key.encode()).hexdigest(), max_concurrent=4, admin=True
    )
    assert key not in made.out
    monkeypatch.setattr("sys.stdin", io.StringIO("my own key\n"))
    assert main(["hash-key", "--name=bob", "--stdin"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == entry("my own key", name="bob")
    assert told.err == ""
    assert main(["hash-key", "--name=bob", "--max-concurrent=0"]) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["hash-key", "--name=bob", "--stdin"]) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.02, "20ms"), (1.5, "1.5s"), (360, "6m0s"), (61, "1m1s")]
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


def many(url: str, count: int, key: str) -> list[int]:
    """Statuses of requests at the same moment, each over a connection of its own.

    Their answers go on until all are known.
    """
    address = urlsplit(url)
    body = json.dumps({"prompt": "a", "max_tokens": 150, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nX-Api-Key: {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    where = address.hostname or "", address.port or 0
    clients = [socket.create_connection(where, timeout=60) for _ in range(count)]
    for client in clients:
        client.sendall(f"{head}{body}".encode())
    statuses = [int(client.recv(4096).split()[1]) for client in clients]
    for client in clients:
        client.close()
    return statuses


def test_all_processes_count_together(model: Path, file: Path) -> None:  # noqa: F811
    write(file, entry(max_concurrent=3))
    with server(model, f"--api-keys-file={file}", step_time=0.2) as (running, pids):
        assert len(pids) == COUNT
        found = many(running.url, 12, "secret")
        assert (found.count(200), found.count(429)) == (3, 9)
        wait_until(lambda: many(running.url, 3, "secret") == [200] * 3)  # what was taken came back
        write(file, entry("new", name="bob"))
        running.process.send_signal(signal.SIGHUP)
        wait_until(lambda: many(running.url, 1, "new") == [200])
        assert running.process.poll() is None, "the signal did not end it"
