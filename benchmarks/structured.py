"""A thousand requests for answers of a form, sent to a real server; every answer is checked.

    python benchmarks/structured.py --requests 1000 --concurrency 32 [--max-num-seqs 32 ...]

The forms are those of `wishes.py`, in every way that a request can ask for them: chats and
completions, streamed and whole, one answer and several, at temperature 1, one in ten with too few
tokens to end. Whatever ended of itself must have its form; what was cut is counted. The first
requests are then sent again, with forms and without in turns, the free answers as long as those
that had a form, to tell what the forms cost. Flags that are not listed by --help go to the server,
as the model does; without any it is the demo model. The exit status is 1 if an answer is not what
was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # runs from a checkout, installed or not

from benchmarks.wishes import WISHES, Wish
from paged.runtime.bench.client import CHAT_COMPLETIONS, COMPLETIONS, error_message
from paged.runtime.bench.connection import HttpClient

QUESTION = "Make something up, in JSON if you can."
ENOUGH, TOO_FEW = 240, 5
_CUT_EVERY = 10


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        name: of its wish.
        fields: of its body, without those of the wish.
        form: the fields that ask for the form; {} to send it free.
    """

    name: str
    path: str
    fields: dict[str, Any]
    form: dict[str, Any]

    @property
    def wish(self) -> Wish:
        return WISHES[self.name]


@dataclass(frozen=True)
class Reply:
    """The texts of an answer, why each ended, and tokens of all together."""

    texts: list[str]
    reasons: list[str | None]
    num_tokens: int
    error: str = ""


def requests(count: int) -> list[Ask]:
    """So many, all different, the same ones each time."""
    names = list(WISHES)
    return [_ask(number, names[number % len(names)]) for number in range(count)]


def _ask(number: int, name: str) -> Ask:
    turn = sum(divmod(number, len(WISHES)))  # each wish comes in all ways, one after the other
    stream = turn % 2 == 0
    fields: dict[str, Any] = {
        "n": (1, 2, 1, 3)[turn // 2 % 4],
        "temperature": 1.0,
        "seed": number,
        "max_tokens": TOO_FEW if number % _CUT_EVERY == _CUT_EVERY - 1 else ENOUGH,
        "stream": stream,
    }
    if stream:
        fields["stream_options"] = {"include_usage": True}
    form = WISHES[name].fields(turn // 3)
    if turn % 3 == 0:
        return Ask(name, COMPLETIONS, fields | {"prompt": QUESTION}, form)
    messages = [{"role": "user", "content": QUESTION}]
    return Ask(name, CHAT_COMPLETIONS, fields | {"messages": messages}, form)


def set_free(ask: Ask, reply: Reply) -> Ask:
    """The same request without a form, for as many tokens as the answer had on average."""
    length = max(reply.num_tokens // ask.fields["n"], 1)
    return replace(ask, fields=ask.fields | {"max_tokens": length, "ignore_eos": True}, form={})


async def send_all(url: str, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
    """Their replies, in the same order."""
    limit = asyncio.Semaphore(concurrency)
    with closing(HttpClient(url, {})) as http:

        async def send(ask: Ask) -> Reply:
            async with limit:
                response = await http.post(ask.path, json.dumps(ask.fields | ask.form).encode())
            if response.status != 200:
                return Reply([], [], 0, f"HTTP {response.status}: {error_message(response)}")
            return read_reply(response.body, ask)

        return await asyncio.gather(*map(send, asks))


def read_reply(body: bytes, ask: Ask) -> Reply:
    """A whole reply, or all chunks of a stream."""
    chunks = (
        [json.loads(each) for each in _payloads(body)]
        if ask.fields["stream"]
        else [json.loads(body)]
    )
    reply = Reply([""] * ask.fields["n"], [None] * ask.fields["n"], 0)
    for chunk in chunks:
        if "error" in chunk:
            return replace(reply, error=chunk["error"]["message"])
        for choice in chunk["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            reply.texts[choice["index"]] += said.get("content") or said.get("text") or ""
            reply.reasons[choice["index"]] = choice["finish_reason"]
    return replace(reply, num_tokens=chunks[-1]["usage"]["completion_tokens"])


def _payloads(stream: bytes) -> Iterator[bytes]:
    for line in stream.splitlines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield line.removeprefix(b"data: ")


def judge(asks: Iterable[Ask], replies: Iterable[Reply]) -> tuple[Counter[str], list[str]]:
    """How many sequences ended in which way, and what is wrong with which."""
    ends: Counter[str] = Counter()
    wrong = []
    for ask, reply in zip(asks, replies, strict=True):
        if reply.error:
            ends["refused"] += 1
            wrong.append(f"{ask.name}: {reply.error}")
        for text, reason in zip(reply.texts, reply.reasons, strict=True):
            ends[reason or "without an end"] += 1
            if reason != "length" and not (reason == "stop" and ask.wish.fulfils(text)):
                wrong.append(f"{ask.name}, {reason}: {text!r}")
    return ends, wrong


@contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """The address of a server on this machine, for as long as it is wanted."""
    command = [sys.executable, "-m", "paged.http", "serve", "--host=127.0.0.1", "--port=0"]
    command += ["--disable-uvicorn-access-log", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        ready = re.search(r"at (http\S+)/v1", process.stdout.readline())
        assert ready, "the server did not get ready"
        yield ready[1]
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    """Read the arguments, measure, and say what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--compare", type=int, default=58, help="requests to be sent again")
    args, flags = parser.parse_known_args()
    asks = requests(args.requests)
    with server(flags) as url:
        asyncio.run(send_all(url, asks[: len(WISHES)], args.concurrency))  # compiles the grammars
        replies = _timed("all, with forms", url, asks, args.concurrency)
        ends, wrong = judge(asks, replies)
        print(f"sequences by their end: {dict(ends)}; not what was asked for: {len(wrong)}")
        print(*wrong[:20], sep="\n", flush=True)
        some = list(zip(asks, replies, strict=True))[: args.compare]
        for _ in range(2 if some else 0):
            _timed("some, with forms", url, [ask for ask, _ in some], args.concurrency)
            free = [set_free(*pair) for pair in some]
            _timed("some, without", url, free, args.concurrency)
    return 1 if wrong else 0


def _timed(what: str, url: str, asks: Sequence[Ask], concurrency: int) -> list[Reply]:
    """Send them, and tell how long it took."""
    started = time.perf_counter()
    replies = asyncio.run(send_all(url, asks, concurrency))
    seconds = time.perf_counter() - started
    tokens = sum(reply.num_tokens for reply in replies)
    print(
        f"{what}: {len(asks)} requests, {tokens} tokens in {seconds:.1f} s: "
        f"{len(asks) / seconds:.1f} requests/s, {tokens / seconds:.0f} tokens/s",
        flush=True,
    )
    return replies


if __name__ == "__main__":
    sys.exit(main())
