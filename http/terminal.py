"""`paged generate` and `paged chat`: an engine of one's own, and its answers as they come."""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import asdict, replace

from paged.http.engine import ChatMessage, Engine, Tokenizer
from paged.http.logs import configure_logging
from paged.http.options import SamplingOptions
from paged.runtime.async_engine import AsyncEngine
from paged.runtime.config import EngineConfig
from paged.runtime.errors import ConfigError, InvalidRequest
from paged.runtime.flags import read_flags
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams

Read = Callable[[str], str]
Write = Callable[[str], object]

# A model that was not taught to stop would fill its whole context.
_MAX_TOKENS = 256
_FAREWELLS = ("exit", "quit")
_GREETING = 'Ctrl-C cuts an answer short; Ctrl-D or "exit" ends the conversation.\n'

_ASKS_FOR_PROMPT = "Type a prompt; Enter and then Ctrl-D ends it.\n"


def generate(args: argparse.Namespace) -> int:
    """Continue each prompt, one after the other; standard input without any."""
    prompts = args.prompt or [_typed_prompt()]
    with _engine(args) as engine:
        continue_all(engine, read_flags(SamplingOptions, args), prompts, _write)
    return 0


def _typed_prompt() -> str:
    """Standard input to its end.

    Raises:
        ConfigError: there is nothing in it.
    """
    if sys.stdin.isatty():
        sys.stderr.write(_ASKS_FOR_PROMPT)
    prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("There is no prompt: give --prompt TEXT, or a text on standard input")
    return prompt


def chat(args: argparse.Namespace) -> int:
    """Talk until Ctrl-D or "exit"; Ctrl-C cuts an answer short."""
    with suppress(ImportError):  # not part of every Python
        import readline  # noqa: F401  gives `input` its arrow keys and history
    with _engine(args) as engine:
        if sys.stdin.isatty():
            _write(_GREETING)
        converse(engine, read_flags(SamplingOptions, args), args.system_prompt, input, _write)
    return 0


def continue_all(
    engine: Engine, options: SamplingOptions, prompts: Sequence[str], write: Write
) -> None:
    """Write the continuation of every prompt, and a newline after each."""
    tokenizer, params = _tokenizer(engine), _params(engine, options)
    with asyncio.Runner() as runner:
        for prompt in prompts:
            token_ids = tokenizer.encode(prompt)
            room = max(engine.max_model_len - len(token_ids), 1)
            limit = options.max_tokens or min(_MAX_TOKENS, room)
            runner.run(_stream(engine, token_ids, replace(params, max_tokens=limit), write))
            write("\n")


def converse(
    engine: Engine, options: SamplingOptions, system_prompt: str | None, read: Read, write: Write
) -> None:
    """Answer what `read` returns until it is at its end."""
    tokenizer, params = _tokenizer(engine), _params(engine, options)
    messages: list[ChatMessage] = []
    if system_prompt:
        messages.append({"role": "system", "content": system_prompt})
    with asyncio.Runner() as runner:
        for line in _lines(read, write):
            asked = [*messages, {"role": "user", "content": line}]
            text = tokenizer.apply_chat_template(asked)
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            answer: list[str] = []
            try:
                runner.run(_stream(engine, token_ids, params, _tee(write, answer)))
            except InvalidRequest as error:
                write(f"({error})\n")
                continue
            except KeyboardInterrupt:
                write(" ...")
            write("\n")
            messages = [*asked, {"role": "assistant", "content": "".join(answer)}]


def _lines(read: Read, write: Write) -> Iterator[str]:
    while True:
        try:
            line = read("> ").strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")  # after the prompt, which nothing was typed behind
            return
        if line in _FAREWELLS:
            return
        if line:
            yield line


async def _stream(
    engine: Engine, token_ids: list[int], params: SamplingParams, write: Write
) -> None:
    request_id = f"terminal-{uuid.uuid4().hex}"
    async with aclosing(engine.generate(token_ids, params, request_id)) as outputs:
        async for output in outputs:
            write(output.outputs[0].text)


def _tee(write: Write, copy: list[str]) -> Write:
    def both(text: str) -> None:
        copy.append(text)
        write(text)

    return both


def _params(engine: Engine, options: SamplingOptions) -> SamplingParams:
    """What was given over the model's defaults, without a limit unless one was given."""
    given = {name: value for name, value in asdict(options).items() if value not in (None, ())}
    if options.stop:
        given["stop"] = list(options.stop)
    unlimited = replace(engine.default_sampling_params, max_tokens=None)
    return replace(unlimited, **given, output_kind=RequestOutputKind.DELTA)


def _tokenizer(engine: Engine) -> Tokenizer:
    if engine.tokenizer is None:
        raise ConfigError("Text needs a tokenizer: leave out --skip-tokenizer-init")
    return engine.tokenizer


@contextmanager
def _engine(args: argparse.Namespace) -> Iterator[Engine]:
    configure_logging("warning")
    engine = AsyncEngine.from_config(read_flags(EngineConfig, args))
    try:
        yield engine
    finally:
        engine.shutdown()


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
