"""Workloads that are kept in files, and what is read of a server's log."""

import json
from pathlib import Path

import numpy as np
import pytest

from paged.http.cli import main
from paged.runtime.bench.load import moments
from paged.runtime.bench.options import ArrivalOptions
from paged.runtime.bench.workload_file import read_log, read_workload, write_workload
from paged.runtime.bench.workloads import BenchRequest, IdRange
from paged.runtime.errors import ConfigError

REQUESTS = [
    BenchRequest([7, 8, 9], 3, 5, arrival=0.25, kind="short"),
    BenchRequest("a b", 2, 6, arrival=1.5, kind="long", priority=2),
    BenchRequest([1], 1, 1),
]


def words(text: str) -> list[int]:
    return [0] * len(text.split())


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    write_workload(path, REQUESTS)
    assert read_workload(path, encode=words) == REQUESTS
    assert read_workload(path, 2, encode=words) == REQUESTS[:2]
    assert json.loads(path.read_text().splitlines()[2]) == {"prompt": [1], "output_tokens": 1}


def test_a_length_alone_becomes_random_ids(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text('{"input_tokens": 30, "output_tokens": 2}\n' * 2)
    first, second = read_workload(path, ids=IdRange(10, 20), seed=3)
    assert first.num_input_tokens == len(first.prompt) == 30
    assert set(first.prompt) <= set(range(10, 20))
    assert first.prompt != second.prompt
    assert read_workload(path, ids=IdRange(10, 20), seed=3) == [first, second]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('{"output_tokens": 2}', 'request 1 needs "prompt"'),
        ('{"prompt": ["a", 2], "output_tokens": 2}', 'request 1 needs "prompt"'),
        ('{"prompt": [1, -2], "output_tokens": 2}', 'request 1 needs "prompt"'),
        (r'{"prompt": "\ud800", "output_tokens": 2}', 'request 1 needs "prompt"'),
        ('{"prompt": "a"}', 'request 1 needs "output_tokens"'),
        ('{"prompt": "a", "output_tokens": 2, "arrival": -1}', 'needs an "arrival" .* got -1'),
        ('{"prompt": "a", "output_tokens": 2, "priority": "x"}', "whole number .* got 'x'"),
        ('{"prompt": "a", "output_tokens": true}', 'needs "output_tokens" .* got True'),
        ('{"prompt": "a", "output_tokens": 99999999999}', "from 1 to 16,777,216"),
        ('{"input_tokens": 99999999999, "output_tokens": 2}', "at most 16,777,216 tokens"),
        ("5", "request 1 is no JSON object: 5"),
        ("[[1]]", "request 1 is no JSON object"),
        ("[" * 100_000, "neither a JSON list nor JSON lines"),
        ("1" * 5000, "neither a JSON list nor JSON lines"),
        ("", "holds 0 usable prompts"),
    ],
)
def test_a_line_that_is_no_request_is_named(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "load.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=told):
        read_workload(path)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "load.jsonl"
    path.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(ConfigError, match="neither a JSON list nor JSON lines"):
        read_workload(path)


def logged(second: float, prompt: int, cached: int, generated: int) -> str:
    """A line of a request that ended at so many seconds, having taken half a second."""
    line = {"time": f"2026-01-01T00:00:{second:06.3f}Z", "total_ms": 500.0}
    counts = {"prompt_tokens": prompt, "cached_tokens": cached, "generated_tokens": [generated]}
    return json.dumps(line | counts)


def test_a_log_tells_when_requests_came_and_what_they_shared(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    other = ['{"time": "x", "message": "ready"}', "a library's line", logged(5, 9, 0, 0)]
    other += [logged(1, 9, 0, 3).replace("[3]", "3"), logged(1, 9, 0, 3).replace("500.0", '"slow"')]
    other += [logged(1, 9, 0, 3).replace("2026-", "noon "), logged(1, 9, 0, 3).replace("-01T", "")]
    path.write_text("\n".join([logged(4, 40, 32, 8), *other, logged(2.5, 32, 0, 3)]))
    first, second = read_log(path, ids=IdRange(), seed=0)
    assert (first.arrival, first.num_input_tokens, first.num_output_tokens) == (0.0, 32, 3)
    assert (second.arrival, len(second.prompt), second.num_output_tokens) == (1.5, 40, 8)
    assert first.prompt[:8] != second.prompt[:8]
    with pytest.raises(ConfigError, match="holds 2 usable prompts, and 3 are needed"):
        read_log(path, 3, ids=IdRange(), seed=0)


@pytest.mark.parametrize(
    "argv",
    [
        ("simulate", "--trace=log", "--trace-path"),
        ("simulate", "--trace=file", "--trace-path"),
        ("tune", "--load-format=dummy", "--skip-tokenizer-init", "--workload"),
        ("bench", "serve", "--dataset-name=log", "--dataset-path"),
    ],
)
def test_a_file_that_is_not_there_is_named_and_no_flag_of_another_command(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nowhere"
    assert main([*argv, str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"paged: error: {path} cannot be read: No such file or directory"


def test_a_log_without_requests_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    impossible = [logged(4, 9, 10, 8), logged(4, -9, -10, 8)]
    impossible.append(logged(4, 9, 0, 8).replace("500.0", "NaN"))
    path.write_text("\n".join(["INFO ready", "[" * 100_000, *impossible]))
    with pytest.raises(ConfigError, match="--enable-log-requests and --log-format json"):
        read_log(path, ids=IdRange(), seed=0)


def test_requests_come_when_their_file_says_unless_there_is_a_rate() -> None:
    assert moments(REQUESTS, ArrivalOptions(), 0).tolist() == [0.25, 1.5, 0.0]
    rated = moments(REQUESTS, ArrivalOptions(request_rate=3.0), 0)
    assert rated[-1] == pytest.approx(1.0)
    assert np.all(np.diff(rated) >= 0)
    with pytest.raises(ConfigError, match="--burstiness 1e-09 leaves no time between requests"):
        moments(REQUESTS, ArrivalOptions(request_rate=3.0, burstiness=1e-9), 0)
