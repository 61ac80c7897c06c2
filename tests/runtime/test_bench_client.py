"""The client of `paged bench serve`: streams as they are cut, addresses, headers, connections."""

from __future__ import annotations

import asyncio
import gc
from contextlib import closing
from typing import Any

import pytest

from paged.runtime.bench.client import StreamReader
from paged.runtime.bench.connection import HttpClient
from paged.runtime.bench.metrics import RequestRecord
from paged.runtime.errors import ConfigError


def read(*pieces: bytes) -> RequestRecord:
    record = RequestRecord(start=0.0, num_input_tokens=1)
    ticks = iter(range(1, 100))
    reader = StreamReader(record, lambda: float(next(ticks)))
    for piece in pieces:
        reader.feed(piece)
    reader.finish()
    return record


def test_events_may_be_cut_anywhere() -> None:
    stream = b': ping\r\n\r\ndata: {"choices": [{"text": "\xc3\xa9"}]}\r\n\r\ndata: [DONE]\r\n\r\n'
    for cut in range(len(stream)):
        assert read(stream[:cut], stream[cut:]).text == "é"


def test_a_chunk_without_a_choice_is_not_the_first_token() -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}\n\n'
    record = read(usage, b'data: {"choices": [{"text": ""}]}\n\n')
    assert record.chunk_times == [2.0]


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"data: [DONE]\n\n", "the stream ended without a token"),
        (b"data: {\n\n", "a chunk that cannot be read"),
        (
            b'data: {"choices": [{"text": "", "finish_reason": "abort"}]}\n\n',
            "finish_reason 'abort'",
        ),
    ],
)
def test_streams_that_went_wrong(stream: bytes, error: str) -> None:
    record = read(stream)
    assert record.error is not None
    assert error in record.error


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "ftp://host", "http://", "http://:80", "http://[::1"),
        *("http://host:99999", "http://host:eighty", "http://host/a b"),
    ],
)
def test_a_base_url_needs_scheme_and_host(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url must look like"):
        HttpClient(url, {})


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [("X a", "b", "'X a' is no name"), ("", "b", "'' is no name"), ("X", "s3cret\nb", "header X ")],
)
def test_a_header_that_cannot_be_sent(name: str, value: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        HttpClient("http://127.0.0.1:1", {name: value})
    assert "s3cret" not in str(caught.value)


def test_a_server_that_hangs_up_early_leaves_no_failure_behind() -> None:
    """A connection that is closed when it is to be used again has nobody to tell of its end."""
    unheard: list[dict[str, Any]] = []

    async def brief(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
        writer.close()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unheard.append(what))
        async with await asyncio.start_server(brief, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with closing(HttpClient(f"http://127.0.0.1:{port}", {})) as client:
                for _ in range(2):
                    assert (await client.get("/")).body == b"abc"
                    for connection in client._idle:
                        connection.abort()  # as when the end is seen, and not yet told
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(run(), 30))
    gc.collect()
    assert unheard == []


def test_a_body_may_end_with_the_connection() -> None:
    """As servers of HTTP/1.0 do it."""

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nabc")
        writer.close()

    async def get() -> bytes:
        server = await asyncio.start_server(old, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with closing(HttpClient(f"http://127.0.0.1:{port}", {})) as client:
                return (await client.get("/")).body

    assert asyncio.run(get()) == b"abc"
