"""The last minutes, second by second, of one API process or several."""

import time

import pytest

from paged.http.recent import SECONDS, STEP, Recent, Second, history

NOW = 10_000.5
ENTRIES = SECONDS // STEP


def second(tokens: int = 0, firsts: tuple[float, ...] = (), gaps: tuple[float, ...] = ()) -> Second:
    made = Second(tokens)
    for seconds in firsts:
        made.add_first(seconds)
    for seconds in gaps:
        made.add_gap(seconds)
    return made


def test_nothing_has_happened() -> None:
    found = history([{}], NOW)
    assert found.tokens == [0] * ENTRIES
    assert found.first_p50 == found.gap_p95 == [None] * ENTRIES
    assert found.rate == 0


def test_entries_end_now() -> None:
    seen = {9_999: second(10), 9_997: second(5), 9_990: second(20), 9_000: second(99)}
    found = history([seen], NOW)
    assert found.tokens[-2:] == [4, 3]
    assert sum(found.tokens) == 7
    assert found.rate == 5


def test_what_goes_on_waits_for_its_end() -> None:
    assert sum(history([{10_000: second(10)}], NOW).tokens) == 0


@pytest.mark.parametrize("seconds", [0.0007, 0.02, 0.3, 40.0])
def test_percentiles_are_close(seconds: float) -> None:
    seen = {9_999: second(gaps=(seconds,) * 99 + (100 * seconds,))}
    found = history([seen], NOW)
    assert found.gap_p50[-1] == pytest.approx(1000 * seconds, rel=0.13)
    assert found.gap_p95[-1] == pytest.approx(1000 * seconds, rel=0.13)


def test_several_processes_are_one() -> None:
    fast, slow = {9_999: second(4, firsts=(0.01,) * 18)}, {9_998: second(6, firsts=(1.0,) * 2)}
    found = history([fast, slow], NOW)
    assert found.tokens[-1] == 2
    assert found.first_p50[-1] == pytest.approx(10, rel=0.13)
    assert found.first_p95[-1] == pytest.approx(1000, rel=0.13)


def test_what_is_old_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.9, 150.0, 100.0 + SECONDS])
    monkeypatch.setattr(time, "time", lambda: next(clock))
    seen = Recent()
    first = seen.now()
    assert seen.now() is first
    seen.now()
    seen.now()
    assert list(seen.seconds) == [150, 400]
