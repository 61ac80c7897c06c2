"""`paged bench serve` against a small server whose answers and timing are known."""

import argparse
import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest

from paged.http.cli import parse
from paged.models.loading import resolve_model
from paged.models.loading.source import embedded_model
from paged.runtime.bench import options, serve
from paged.runtime.bench.arguments import add_arguments, run
from paged.runtime.bench.results import read_result
from paged.runtime.errors import ConfigError

FIRST_AFTER, GAP, CHUNKS = 0.06, 0.02, 4
SLACK = 10  # seconds that a busy machine may add


@dataclass
class FakeServer:
    """An OpenAI server of a few lines: four chunks of one token, at known times.

    Attributes:
        bodies: of the requests it got, in order.
        num_connections: that were opened.
        in_flight, peak: requests at this moment, and at most.
        trouble: what it does wrong.
        alone: the first so many requests are answered as they come, the first try among
            them.
        together: those after them are answered when so many have been there at once.
    """

    trouble: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    num_connections: int = 0
    in_flight: int = 0
    peak: int = 0
    port: int = 0
    alone: int = 1
    together: int = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        length = int(head.lower().split("content-length: ")[1].split()[0])
        body = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            status = 401 if self.trouble == "wants a key" else 200
            await whole(writer, status, {"data": [{"id": "tiny-model"}]})
            return True
        if head.startswith("GET /metrics "):
            await whole(writer, 404, {"error": {"message": "no such page"}})
            return True
        self.bodies.append(json.loads(body))
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        is_alone = len(self.bodies) <= self.alone
        async with asyncio.timeout(30):
            while not is_alone and self.peak < self.together:
                await asyncio.sleep(0.001)
        stays = await self._generate(writer)
        self.in_flight -= 1
        return stays

    async def _generate(self, writer: asyncio.StreamWriter) -> bool:
        if self.trouble == "refuses":
            await whole(writer, 400, {"error": {"message": "prompt is too long"}})
            return True
        if self.trouble == "refuses the second" and len(self.bodies) == 2:
            await whole(writer, 500, {"error": {"message": "out of pages"}})
            return True
        if self.trouble == "hangs":
            await asyncio.sleep(5)
        if self.trouble == "hangs up":
            return False
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(FIRST_AFTER)
        for index in range(CHUNKS):
            if index:
                await asyncio.sleep(GAP)
            if self.trouble == "breaks off" and index == 2:
                return False
            if self.trouble == "stumbles" and index == 2:
                event(writer, {"error": {"message": "the device failed"}})
                break
            event(writer, {"choices": [choice(self.bodies[-1], f"w{index} ")]})
        if self.trouble != "does not count":
            event(writer, {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}})
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()
        return self.trouble != "closes"


def choice(body: dict[str, Any], text: str) -> dict[str, Any]:
    return {"delta": {"content": text}} if "messages" in body else {"text": text}


def event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


async def whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[FakeServer]:
    """In a thread with a loop of its own; the parameter, if any, is its trouble."""
    fake = FakeServer(trouble=getattr(request, "param", ""))
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(fake.connected, "127.0.0.1", 0))
    fake.port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    asyncio.run_coroutine_threadsafe(shut_down(listening), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


async def shut_down(listening: asyncio.Server) -> None:
    listening.close()
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def bench(server: FakeServer, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the saved result of a run."""
    parser = argparse.ArgumentParser()
    add_arguments(parser, lambda _: None)
    where = ["--port", str(server.port), "--result-dir", str(tmp_path), "--save-result"]
    small = ["--num-prompts", "6", "--random-input-len", "9", "--output-len", "7", "--disable-tqdm"]
    args = parser.parse_args(["serve", *where, *small, "--save-detailed", *flags])
    status = run(args)
    [path] = tmp_path.glob("*.json")
    return status, json.loads(path.read_text())


def test_a_folder_that_cannot_be_made_is_a_line(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--result-dir: "):
        bench(server, tmp_path, "--result-dir", str(tmp_path / "file" / "below"))


def test_times_and_counts_are_those_of_the_server(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.together = 6
    status, result = bench(server, tmp_path)
    assert (status, result["completed"], result["failed"]) == (0, 6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (54, 42)
    assert result["model_id"] == "tiny-model"
    assert FIRST_AFTER * 1000 <= result["median_ttft_ms"] < (FIRST_AFTER + SLACK) * 1000
    between = median(gap for gaps in result["itls"] for gap in gaps)
    assert result["median_itl_ms"] == pytest.approx(between * 1000)
    for first, gaps in zip(result["ttfts"], result["itls"], strict=True):
        assert FIRST_AFTER + (CHUNKS - 1) * GAP <= first + sum(gaps) < SLACK
    after_first = result["mean_e2el_ms"] - result["mean_ttft_ms"]
    assert result["mean_tpot_ms"] == pytest.approx(after_first / 6)
    assert [len(gaps) for gaps in result["itls"]] == [CHUNKS - 1] * 6
    assert result["generated_texts"] == ["w0 w1 w2 w3 "] * 6
    assert result["max_concurrent_requests"] == 6
    printed = capsys.readouterr().out
    assert "Successful requests:                     6" in printed
    assert "P99 E2EL (ms):" in printed


def test_requests_say_what_was_asked(server: FakeServer, tmp_path: Path) -> None:
    extra = ["--extra-body", '{"cache_salt": "a"}', "--header", "X-Team=blue", "--top-p", "0.9"]
    bench(server, tmp_path, *extra)
    for body in server.bodies:
        prompt = body.pop("prompt")
        assert len(prompt) == 9
        assert all(1000 <= token < 32_000 for token in prompt)
        assert body == {
            "model": "tiny-model",
            "max_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.0,
            "top_p": 0.9,
            "ignore_eos": True,
            "cache_salt": "a",
        }
    assert all("X-Team: blue\r\n" in head for head in server.heads)


def test_a_model_without_a_tokenizer_streams_ids(server: FakeServer, tmp_path: Path) -> None:
    status, _ = bench(server, tmp_path, "--skip-tokenizer-init")
    assert status == 0
    assert all(body["return_token_ids"] for body in server.bodies)


def test_the_first_try_and_warm_ups_are_neither_counted_nor_alike(
    server: FakeServer, tmp_path: Path
) -> None:
    _, result = bench(server, tmp_path, "--num-warmups", "2")
    assert len(server.bodies) == 1 + 2 + 6
    assert result["completed"] == 6
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[0] == prompts[1] == prompts[3][::-1]


def test_concurrency_is_bounded_and_connections_are_kept(
    server: FakeServer, tmp_path: Path
) -> None:
    server.together = 2
    _, result = bench(server, tmp_path, "--max-concurrency", "2")
    assert server.peak == result["max_concurrent_requests"] == 2
    assert server.num_connections == 2
    assert result["duration"] >= 3 * (FIRST_AFTER + (CHUNKS - 1) * GAP)


@pytest.mark.parametrize("server", ["closes"], indirect=True)
def test_a_connection_that_was_closed_is_opened_again(server: FakeServer, tmp_path: Path) -> None:
    status, _ = bench(server, tmp_path, "--max-concurrency", "1")
    assert status == 0
    assert server.num_connections == 1 + 6 + 1  # the last to look at its metrics


def test_a_rate_spaces_requests(server: FakeServer, tmp_path: Path) -> None:
    _, result = bench(server, tmp_path, "--request-rate", "20", "--seed", "1")
    assert result["start_times"] == sorted(set(result["start_times"]))
    assert result["duration"] >= 6 / 20
    assert result["request_rate"] == 20.0


def test_a_ramp_reports_each_stage(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "apart" / "tree.json"
    path.parent.mkdir()
    server.alone, server.together = 1 + 3, 3
    status, result = bench(
        server, tmp_path, "--concurrency-ramp", "1", "3", "--output-json", str(path)
    )
    assert (status, result["completed"], server.peak) == (0, 6, 3)
    first, second = read_result(path).runs
    assert (first.name, second.name) == ("concurrency 1", "concurrency 3")
    assert first.num_completed == second.num_completed == 3
    assert first.duration >= 3 * (FIRST_AFTER + (CHUNKS - 1) * GAP)
    assert "concurrency 3" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="leave out --max-concurrency"):
        bench(server, tmp_path, "--concurrency-ramp", "1", "2", "--max-concurrency", "1")
    with pytest.raises(ConfigError, match="has 7 stages, and there are 6 requests"):
        bench(server, tmp_path, "--concurrency-ramp", *"1234567")


def test_chats_send_texts(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Name a river."}\n' * 6)
    chat = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(path)]
    status, result = bench(server, tmp_path, *chat)
    assert status == 0
    assert result["generated_texts"] == ["w0 w1 w2 w3 "] * 6
    assert server.heads[-2].startswith("POST /v1/chat/completions ")
    assert server.bodies[-1]["messages"] == [{"role": "user", "content": "Name a river."}]
    assert server.bodies[-1]["max_completion_tokens"] == 7
    assert "ignore_eos" not in server.bodies[-1]


def test_chats_of_random_ids_need_a_tokenizer(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--backend openai-chat sends texts"):
        bench(server, tmp_path, "--backend", "openai-chat")


@pytest.mark.parametrize("server", ["does not count"], indirect=True)
def test_a_tokenizer_makes_texts_and_counts_tokens(server: FakeServer, tmp_path: Path) -> None:
    model = str(embedded_model())
    status, result = bench(server, tmp_path, "--backend", "openai-chat", "--tokenizer", model)
    assert status == 0
    prompts = {body["messages"][0]["content"] for body in server.bodies[1:]}
    assert len(prompts) == 6
    tokenizer = resolve_model(model, load_format="dummy").tokenizer()
    answer = tokenizer.encode("w0 w1 w2 w3 ", add_special_tokens=False)
    assert result["total_output_tokens"] == 6 * len(answer)


@pytest.mark.parametrize("server", ["does not count"], indirect=True)
def test_chunks_stand_in_for_a_count_and_the_report_says_so(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, result = bench(server, tmp_path)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (54, 6 * CHUNKS)
    assert "did not count the tokens of 6 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        ("refuses", "HTTP 400: prompt is too long"),
        ("hangs", "not finished after 0.2 s (--request-timeout-sec)"),
        ("hangs up", "ConnectionResetError: the server closed the connection"),
        ("breaks off", "ConnectionResetError: the server closed the connection"),
        ("stumbles", "error in the stream: the device failed"),
    ],
    indirect=["server"],
)
def test_failures_are_counted_with_their_cause(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str
) -> None:
    seconds = "0.2" if server.trouble == "hangs" else "60"
    patience = ["--ready-check-timeout-sec", "0", "--request-timeout-sec", seconds]
    status, result = bench(server, tmp_path, "--model", "m", *patience)
    assert (status, result["completed"]) == (1, 0)
    assert result["failures_by_cause"] == {cause: 6}
    assert f"      6 x {cause}" in capsys.readouterr().out


@pytest.mark.parametrize("server", ["refuses the second"], indirect=True)
def test_one_failure_does_not_stop_the_others(server: FakeServer, tmp_path: Path) -> None:
    status, result = bench(server, tmp_path)
    assert (status, result["completed"], result["failed"]) == (1, 5, 1)
    assert result["failures_by_cause"] == {"HTTP 500: out of pages": 1}


@pytest.mark.parametrize("server", ["wants a key"], indirect=True)
def test_a_server_may_want_a_key(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="OPENAI_API_KEY"):
        bench(server, tmp_path)


@pytest.mark.parametrize("server", ["refuses"], indirect=True)
def test_a_refused_first_try_ends_the_run(server: FakeServer, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="refuses the first request: HTTP 400"):
        bench(server, tmp_path)


def test_an_absent_server_is_not_awaited_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty seconds go by between two looks at the clock."""
    looks = count(step=20.0)
    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: next(looks)))
    monkeypatch.setattr(serve, "_SECONDS_BETWEEN_TRIES", 0.01)
    with pytest.raises(ConfigError, match=r"No server at http://127\.0\.0\.1:9 .*--port"):
        bench(FakeServer(port=9), tmp_path, "--ready-check-timeout-sec", "50")
    assert "#connection-refused. Trying for 30 seconds" in capsys.readouterr().err


def test_results_are_appended_line_by_line(server: FakeServer, tmp_path: Path) -> None:
    where = ["--result-filename", "all.json", "--append-result", "--metadata", "gpu=none"]
    _, result = bench(server, tmp_path, *where)
    assert result["gpu"] == "none"
    with pytest.raises(json.JSONDecodeError, match="Extra data"):
        bench(server, tmp_path, *where)
    lines = (tmp_path / "all.json").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [6, 6]


def test_an_endpoint_has_no_spaces() -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="no spaces"):
        options.path("/v1/a b")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        (["--endpoint", "v1"], "must begin with / and have no spaces, got 'v1'"),
        (["--extra-body", "[" * 100_000], "must be a JSON object"),
        (["--seed", "-1"], "must be at least 0"),
        (["--num-warmups", "-1"], "must be at least 0"),
        (["--ready-check-timeout-sec", "nan"], "must be a number such as 0.5"),
        (["--num-prompts", "99999999999"], "must be at most 16,777,216"),
    ],
)
def test_a_flag_that_cannot_be_is_a_line(
    flag: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(["bench", "serve", *flag])
    [line] = capsys.readouterr().err.splitlines()
    assert told in line
