"""vllm-router as a child process: one address in front of a prefill and a decode engine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from stateferry.errors import EngineError
from stateferry.stack.ports import HOST, HeldPort
from stateferry.stack.server import Server


class Router(Server):
    """vllm-router in prefill/decode mode. Made by `Stack.start_router`, which also ends it.

    Start it when the engines are ready: it looks for them once and then only every 30 s.
    """

    def __init__(
        self,
        prefill_urls: Sequence[str],
        decode_urls: Sequence[str],
        log_path: Path,
        args: Sequence[str] = (),
        name: str = "router",
        kv_connector: str = "nixl",
    ) -> None:
        """`kv_connector`: whose protocol it speaks, `nixl` or `moriio`. Without URLs it hears of engines."""
        self._prefill_urls = tuple(prefill_urls)
        self._decode_urls = tuple(decode_urls)
        self._args = tuple(args)
        self._kv_connector = kv_connector
        self._metrics_port: HeldPort | None = None
        super().__init__(name, log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        if self._metrics_port is None:
            self._metrics_port = HeldPort()
        program = Path(sys.executable).with_name("vllm-router")
        if not program.exists():
            raise EngineError(f"{program} does not exist. Install the router: pip install vllm-router")
        command = [str(program), "--vllm-pd-disaggregation", "--kv-connector", self._kv_connector]
        for url in self._prefill_urls:
            command += ["--prefill", url]
        for url in self._decode_urls:
            command += ["--decode", url]
        command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
        command += ["--prometheus-port", str(self._metrics_port.number)]
        command += ["--host", HOST, "--port", str(port), *self._args]
        return command, dict(os.environ)

    def release_ports(self) -> None:
        """Stop holding what the router has bound by now, or will never bind."""
        if self._metrics_port is not None:
            self._metrics_port.close()
            self._metrics_port = None
        super().release_ports()
