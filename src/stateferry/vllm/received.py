"""What a decode leg's response says of its hand-off."""

from collections.abc import Sequence
from typing import Any

from stateferry.layout.spec import Group
from stateferry.session import Outcome, Report

OURS = "stateferry"


def received(reports: Sequence[Report], groups: Sequence[Group], ahead: bool) -> dict[str, Any]:
    """Summed over ranks. `ahead`: it was placed from the waiting room."""
    worst = next((r for r in reports if r.outcome is not Outcome.RECEIVED), None)
    if not reports:
        return {OURS: {"received": {"outcome": "unused"}}}
    bytes_by_kind: dict[str, int] = {}
    for report in reports:
        for group, size in zip(report.groups, report.bytes_by_group, strict=True):
            kind = groups[group].kind.value
            bytes_by_kind[kind] = bytes_by_kind.get(kind, 0) + size
    return {
        OURS: {
            "received": {
                "outcome": (worst or reports[0]).outcome.value,
                "reason": worst.reason if worst else "",
                "tokens": reports[0].tokens,
                **({"ahead": True} if ahead else {}),
                "bytes": bytes_by_kind,
                "pieces": sum(r.pieces for r in reports),
                "retries": sum(r.retries for r in reports),
                "milliseconds": round(max(r.total_s for r in reports) * 1e3, 3),
                "wait_milliseconds": round(max(r.waited_s for r in reports) * 1e3, 3),
                "plan_milliseconds": round(max(r.plan_s for r in reports) * 1e3, 3),
                "post_milliseconds": round(max(r.post_s for r in reports) * 1e3, 3),
                "wire_milliseconds": round(max(r.wire_s for r in reports) * 1e3, 3),
            }
        }
    }
