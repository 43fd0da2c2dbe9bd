"""One thing that was looked at, and what it means."""

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """What a finding means for hand-offs."""

    OK = "ok"
    WARNING = "warning"
    """Some hand-offs, or the fast ones, will not work."""
    PROBLEM = "problem"
    """No hand-off will work before this is mended."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do where it is not right."""

    name: str
    verdict: Verdict
    found: str
    cure: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, Verdict.OK, found)


def warning(name: str, found: str, cure: str) -> Finding:
    return Finding(name, Verdict.WARNING, found, cure)


def problem(name: str, found: str, cure: str) -> Finding:
    return Finding(name, Verdict.PROBLEM, found, cure)
