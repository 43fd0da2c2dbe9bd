"""What may keep engines from handing off: this machine, and two engines that do not fit each other."""

from stateferry.doctor.engines import (
    EngineAnswer,
    ask_engine,
    far_from_loopback,
    query_url,
    why_not_told,
)
from stateferry.doctor.findings import Finding, Verdict
from stateferry.doctor.machine import examine_machine
from stateferry.doctor.roles import why_roles_do_not_fit

__all__ = [
    "EngineAnswer",
    "Finding",
    "Verdict",
    "ask_engine",
    "examine_machine",
    "far_from_loopback",
    "query_url",
    "why_not_told",
    "why_roles_do_not_fit",
]
