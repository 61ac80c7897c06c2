"""What a check says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        check: what it is called.
        status: whether it is as it should be; "wrong" keeps a server from starting or serving.
        found: what was found, with the numbers.
        remedy: what to do; empty for what is ok.
    """

    check: str
    status: Status
    found: str
    remedy: str = ""


def ok(check: str, found: str) -> Finding:
    """Nothing is to be done."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """It works, and might be better."""
    return Finding(check, "warning", found, remedy)


def wrong(check: str, found: str, remedy: str) -> Finding:
    """It will not work."""
    return Finding(check, "wrong", found, remedy)


def report(findings: Sequence[Finding]) -> str:
    """For people: a line for each, and a second one where something is to be done."""
    width = max(len(each.check) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.status:7}  {each.check.ljust(width)}  {each.found}")
        if each.remedy:
            lines.append(f"{' ' * (width + 11)}-> {each.remedy}")
    counts = [sum(each.status == status for each in findings) for status in ("wrong", "warning")]
    return "\n".join([*lines, f"{counts[0]} wrong, {counts[1]} to look at"])


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """For programs."""
    return {"ok": not any_wrong(findings), "findings": [asdict(each) for each in findings]}


def any_wrong(findings: Sequence[Finding]) -> bool:
    """Whether something keeps a server from working."""
    return any(each.status == "wrong" for each in findings)
