"""Prompts from ShareGPT's files, and what reading any file of requests takes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paged.runtime.bench.workloads import BenchRequest
from paged.runtime.errors import ConfigError

Encode = Callable[[str], list[int]]

# What the usual ShareGPT sample leaves out: empty talk, and what would not fit 2,048 tokens.
_SHORTEST, _LONGEST_PROMPT, _LONGEST_TALK = 4, 1024, 2048


def sharegpt_requests(
    path: Path, num_requests: int, *, seed: int, encode: Encode | None, output_len: int | None
) -> list[BenchRequest]:
    """First questions of conversations, to be answered at the length of the first answers.

    Args:
        encode: None if there is no tokenizer; then output_len must be given.
        output_len: tokens to generate instead.

    Raises:
        ConfigError: a file that is not ShareGPT's, or lengths that cannot be known.
    """
    if encode is None and output_len is None:
        raise ConfigError(
            "Answers have no length without a tokenizer: give --tokenizer or --output-len"
        )
    talks = [talk for talk in records(path) if len(_turns(talk, path)) >= 2]
    random.Random(seed).shuffle(talks)
    requests: list[BenchRequest] = []
    for talk in talks:
        question, answer = (str(turn["value"]) for turn in _turns(talk, path)[:2])
        num_input = len(encode(question)) if encode else 0
        num_output = output_len or len(encode(answer) if encode else ())
        if encode is None or _usual_length(num_input, num_output):
            requests.append(BenchRequest(question, num_input, num_output))
        if len(requests) == num_requests:
            break
    return enough(requests, num_requests, path)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """Objects of a JSON list or of JSON lines. Raises ConfigError if the file is neither."""
    for number, record in enumerate(_values(path), 1):
        if not isinstance(record, dict):
            raise ConfigError(f"{path}: request {number} is no JSON object: {record!r:.60}")
        yield record


def _values(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            yield from json.loads(text)
        else:
            yield from (json.loads(line) for line in text.splitlines() if line.strip())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is neither a JSON list nor JSON lines: {error}") from error


def _turns(talk: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    turns = talk.get("conversations")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise ConfigError(f'{path} is not a ShareGPT file: an entry has no "conversations"')
    if not all("value" in turn for turn in turns[:2]):
        raise ConfigError(f'{path} is not a ShareGPT file: a turn has no "value"')
    return turns


def _usual_length(num_input: int, num_output: int) -> bool:
    return (
        min(num_input, num_output) >= _SHORTEST
        and num_input <= _LONGEST_PROMPT
        and num_input + num_output <= _LONGEST_TALK
    )


def enough(requests: list[BenchRequest], wanted: int, path: Path) -> list[BenchRequest]:
    """The requests. Raises ConfigError if they are fewer than wanted."""
    if len(requests) < wanted:
        raise ConfigError(f"{path} holds {len(requests)} usable prompts, and {wanted} are needed")
    return requests
