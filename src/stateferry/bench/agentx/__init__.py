"""Replay of agent sessions: long prompts that grow turn by turn, shared prefixes, pauses, subagents.

What is kept of real sessions: lengths, sharing, turn structure, closed loop. What is not, at the scale of a
small machine: absolute speed and the balance of computing and moving.
"""

from stateferry.bench.agentx.bench import Result, Settings, measure
from stateferry.bench.agentx.generate import make_session
from stateferry.bench.agentx.replay import DIALECT
from stateferry.bench.agentx.report import verdict
from stateferry.bench.agentx.trace import Session, coarsened, read_sessions, write_session

__all__ = [
    "DIALECT",
    "Result",
    "Session",
    "Settings",
    "coarsened",
    "make_session",
    "measure",
    "read_sessions",
    "verdict",
    "write_session",
]
