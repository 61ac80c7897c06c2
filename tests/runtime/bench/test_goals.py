"""Goals of requests are told to every command in the same words."""

import pytest

from paged.http.cli import parse

COMMANDS = (("bench", "serve"), ("bench", "prefix"), ("bench", "mixed"), ("simulate",), ("tune",))
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@each_command
@pytest.mark.parametrize(
    "told",
    [
        ("ttft:500", "tpot:30", "e2el:5000"),
        ("ttft=500ms,tpot=30ms,e2el=5s",),
        ("ttft:.5s", "tpot:30.0,e2el=5s"),
        ("ttft:1", "ttft:500", "tpot:30", "e2el:5s"),  # the last one counts
    ],
    ids=" ".join,
)
def test_goals_are_read_as_people_write_them(
    command: tuple[str, ...], told: tuple[str, ...]
) -> None:
    goals = parse([*command, "--goodput", *told]).goodput
    assert goals == (("ttft", 500.0), ("tpot", 30.0), ("e2el", 5000.0))


def test_tune_knows_them_by_another_name() -> None:
    assert parse(["tune", "--slo=ttft=500ms"]).goodput == (("ttft", 500.0),)


@each_command
@pytest.mark.parametrize(
    "text", ["ttft", "ttft=fast", "ttft:nan", "p99=3ms", "ttft=5h", "ttft:0", "ttft:-1", ""]
)
def test_goals_that_are_none(
    command: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*command, f"--goodput={text}"])
    assert f"ttft=500ms,e2el=5s, got {text!r}" in capsys.readouterr().err
