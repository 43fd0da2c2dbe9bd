"""Engines and routers for `tools/router_table.py`: pairs that can die and come back, and their routers."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from stateferry.models import RECALL_GDN
from stateferry.stack import Engine, EngineSpec, Role, Router, Server, Stack
from stateferry.stack.ports import HOST, HeldPort
from stateferry.testing.collector import Collector

ROOT = Path(__file__).resolve().parent.parent
START_S = 300.0
LEASE_S = 8
ROLES = (Role.PREFILL, Role.DECODE)
CONTENT_ONLY = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""Chat template: the bundled model answers what is asked, and knows no roles."""


class TableEngine(Engine):
    """An engine that can be started a second time where its first life was."""

    def __init__(self, spec: EngineSpec, log_path: Path, at: int | None = None) -> None:
        self._at = at
        super().__init__(spec, log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        if self._at is not None:
            port = self.port = self._at
            self.url = f"http://{HOST}:{port}"
        if "read_mode" in self.spec.extra_config:  # MoRIIO's engines tell routers where they are
            extra = {**self.spec.extra_config, "http_port": str(port)}
            self.spec = replace(self.spec, extra_config=extra)
        return super()._command(port)


class SidecarServer(Server):
    """`examples/llmd_sidecar.py` beside a decode engine."""

    def __init__(self, decode_url: str, log_path: Path, *arguments: str) -> None:
        self._decode_url = decode_url
        self._arguments = arguments
        super().__init__(log_path.stem, log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        program = ROOT / "examples" / "llmd_sidecar.py"
        command = [sys.executable, str(program), "--decode", self._decode_url, "--port", str(port)]
        return [*command, *self._arguments], dict(os.environ)


@dataclass
class Pair:
    """A prefill and a decode engine. `prefill` is another one after `revive`."""

    stack: Stack
    prefill: TableEngine
    decode: TableEngine

    @property
    def bootstrap_port(self) -> int:
        """Where routers ask the prefill engine."""
        port: int = self.prefill.spec.extra_config["bootstrap_port"]
        return port

    def kill_prefill(self) -> None:
        """As if its host had died."""
        self.prefill.child.kill()
        self.stack.stop(self.prefill)

    def revive_prefill(self) -> None:
        """Start it again at the same address, and wait until it is healthy."""
        old = self.prefill
        self.prefill = TableEngine(old.spec, old.log_path.with_suffix(".again.log"), at=old.port)
        self.stack.add(self.prefill)
        self.prefill.wait_ready(START_S)


@dataclass(frozen=True)
class Front:
    """A router before a pair, and what its clients must say."""

    name: str
    server: Server
    headers: Mapping[str, str]

    @property
    def url(self) -> str:
        """Where clients ask."""
        return self.server.url


@contextmanager
def pair(stack: Stack, collector: Collector, specs: Sequence[EngineSpec]) -> Iterator[Pair]:
    """A prefill and a decode engine that export their traces; ended with the block."""
    engines = []
    for spec in specs:
        args = ("--chat-template", CONTENT_ONLY, *collector.arguments)
        spec = replace(spec, args=args, env=collector.environment)
        engine = TableEngine(spec, stack.log_folder / f"{spec.label}.log")
        stack.add(engine)
        engines.append(engine)
    made = Pair(stack, *engines)
    try:
        for engine in engines:
            engine.wait_ready(START_S)
        yield made
    finally:
        stack.stop(*(e for e in (made.prefill, made.decode) if e in stack.servers))


def moriio_specs(ping_port: int) -> list[EngineSpec]:
    """Engines with the settings of MoRIIO's users, which register with their router."""
    specs = []
    for role in ROLES:
        with HeldPort() as control:
            extra = {
                "read_mode": "true",
                "host_ip": HOST,
                "proxy_ip": HOST,
                "proxy_ping_port": str(ping_port),
                "handshake_port": control.number,
                "defer_timeout": str(LEASE_S),
                "testing": True,
            }
        spec = EngineSpec(
            model=RECALL_GDN,
            role=role,
            name=f"moriio-{role.name.lower()}",
            connector="MoRIIOConnector",
            connector_module="stateferry.vllm.dropin",
            extra_config=extra,
        )
        specs.append(spec)
    return specs


def asked_specs() -> list[EngineSpec]:
    """Engines with our own settings, whose first one answers routers that ask where it listens."""
    with HeldPort() as control, HeldPort() as asked:
        answers = {"port": control.number, "bootstrap_port": asked.number}
    return [
        EngineSpec(
            model=RECALL_GDN,
            role=role,
            name=f"asked-{role.name.lower()}",
            extra_config={"lease_s": LEASE_S, "testing": True} | (answers if role is Role.PREFILL else {}),
        )
        for role in ROLES
    ]


def nixl_front(made: Pair) -> Front:
    """vllm-router, told its engines."""
    router = Router(
        [made.prefill.url], [made.decode.url], made.stack.log_folder / "nixl-router.log", name="nixl-router"
    )
    return _ready(made, Front("vllm-router, nixl", router, {}))


def sidecar_front(made: Pair) -> Front:
    """Ours, after llm-d's; its clients name the prefill engine as llm-d's gateway does."""
    server = SidecarServer(made.decode.url, made.stack.log_folder / "sidecar.log")
    named = made.prefill.url.removeprefix("http://")
    return _ready(made, Front("llm-d's sidecar protocol", server, {"x-prefiller-host-port": named}))


def mooncake_front(made: Pair) -> Front:
    """vllm-router that asks the prefill engine where it listens."""
    router = Router(
        [],
        [made.decode.url],
        made.stack.log_folder / "mooncake-router.log",
        ["--prefill", made.prefill.url, str(made.bootstrap_port)],
        "mooncake-router",
        "mooncake",
    )
    return _ready(made, Front("vllm-router, mooncake", router, {}))


def mooncake_sidecar_front(made: Pair) -> Front:
    """Ours, after llm-d's for the Mooncake connector: it sends both legs at once."""
    words = ("--kv-connector", "mooncake", "--mooncake-bootstrap-port", str(made.bootstrap_port))
    server = SidecarServer(made.decode.url, made.stack.log_folder / "mooncake-sidecar.log", *words)
    named = made.prefill.url.removeprefix("http://")
    return _ready(made, Front("llm-d's, mooncake", server, {"x-prefiller-host-port": named}))


def moriio_front(made: Pair, ping_port: int) -> Front:
    """vllm-router that hears of its engines."""
    router = Router(
        [],
        [],
        made.stack.log_folder / "moriio-router.log",
        ["--vllm-discovery-address", f"{HOST}:{ping_port}"],
        "moriio-router",
        "moriio",
    )
    return _ready(made, Front("vllm-router, moriio", router, {}))


def _ready(made: Pair, front: Front) -> Front:
    made.stack.add(front.server)
    front.server.wait_ready(60.0)
    return front
