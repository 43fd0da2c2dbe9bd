"""Real servers as child processes, and a client for them. Used by demo, gate, benches and tests.

with Stack() as stack, Client() as client:
    p = stack.start(EngineSpec(model=folder, role=Role.PREFILL))
    d = stack.start(EngineSpec(model=folder, role=Role.DECODE))
    stack.wait_ready()
    answer = client.handoff(p.url, d.url, "Who has the lamp ?")
"""

from stateferry.stack.answers import AnswerError, Completion, Handoff, Logprobs
from stateferry.stack.at_once import AtOnce, handoff_at_once
from stateferry.stack.client import PREFILL_PARAMS, Client, Prompt
from stateferry.stack.engine import NIXL, STATEFERRY, STATEFERRY_MODULE, Engine, EngineSpec, Role
from stateferry.stack.held import held
from stateferry.stack.host import commit, host_facts
from stateferry.stack.metrics import Metrics, Sample
from stateferry.stack.router import Router
from stateferry.stack.server import START_TIMEOUT_S, Progress, ProgressCallback, Server
from stateferry.stack.stack import ServersCallback, Stack

__all__ = [
    "NIXL",
    "PREFILL_PARAMS",
    "START_TIMEOUT_S",
    "STATEFERRY",
    "STATEFERRY_MODULE",
    "AnswerError",
    "AtOnce",
    "Client",
    "Completion",
    "Engine",
    "EngineSpec",
    "Handoff",
    "Logprobs",
    "Metrics",
    "Progress",
    "ProgressCallback",
    "Prompt",
    "Role",
    "Router",
    "Sample",
    "Server",
    "ServersCallback",
    "Stack",
    "commit",
    "handoff_at_once",
    "held",
    "host_facts",
]
