"""One vLLM OpenAI server as a child process: what to start, and the running thing."""

import enum
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateferry.pause import PAUSE_US
from stateferry.stack.host import engine_pause_us
from stateferry.stack.ports import HOST, HeldPort
from stateferry.stack.server import Server

STATEFERRY = "StateFerryConnector"
STATEFERRY_MODULE = "stateferry.vllm.connector"
NIXL = "NixlConnector"

CPU_ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What engines on a small machine need: threads that share cores, and no network."""


class Role(enum.Enum):
    """What an engine does in a hand-off; the value is vLLM's `kv_role`."""

    PREFILL = "kv_producer"
    DECODE = "kv_consumer"
    BOTH = "kv_both"


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """What to start. Everything that is not said here is vLLM's default."""

    model: Path | str
    """A folder with a checkpoint."""
    role: Role = Role.BOTH
    name: str = ""
    """For log files and progress; empty: the role's name."""
    connector: str | None = STATEFERRY
    """None: a plain engine without a KV connector."""
    connector_module: str | None = None
    """Load the connector from this module instead of by its plugin entry point."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """`kv_connector_extra_config`. `host` is added for StateFerry where it is missing."""
    load_failure_policy: str = "recompute"
    served_model_name: str = "model"
    tp_size: int = 1
    prefix_caching: bool = True
    max_model_len: int | None = None
    enforce_eager: bool = True
    """Compile nothing. A tiny model gains half a millisecond a token from compiling, which takes a C++
    compiler and, the first time on a machine, a minute."""
    cache_gib: int = 1
    """Size of the KV cache (CPU engines)."""
    development_mode: bool = True
    """Serve vLLM's development endpoints (`/reset_prefix_cache`). Not for production."""
    args: tuple[str, ...] = ()
    """More arguments for vLLM's server, passed unchanged."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; these win over everything else."""

    @property
    def label(self) -> str:
        """The name in log files and progress."""
        return self.name or self.role.name.lower()

    def kv_transfer_config(self) -> dict[str, Any] | None:
        """The value of `--kv-transfer-config`; None without a connector."""
        if self.connector is None:
            return None
        extra = dict(self.extra_config)
        if self.connector == STATEFERRY:
            extra.setdefault("host", HOST)
        value: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.role.value,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": extra,
        }
        if self.connector_module is not None:
            value["kv_connector_module_path"] = self.connector_module
        return value

    def command(self, port: int) -> list[str]:
        """The command line of the server on a port of this machine."""
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", self.served_model_name]
        command += ["--host", HOST, "--port", str(port), "--disable-uvicorn-access-log"]
        command.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.enforce_eager:
            command.append("--enforce-eager")
        if self.tp_size != 1:
            command += ["--tensor-parallel-size", str(self.tp_size)]
        if self.max_model_len is not None:
            command += ["--max-model-len", str(self.max_model_len)]
        config = self.kv_transfer_config()
        if config is not None:
            command += ["--kv-transfer-config", json.dumps(config)]
        return command + list(self.args)

    def environment(self, side_port: int | None = None) -> dict[str, str]:
        """The environment of the server: ours, what CPU engines need, then `env`."""
        env = {**os.environ, **CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(self.cache_gib)}
        env[PAUSE_US] = str(engine_pause_us())
        env["VLLM_SERVER_DEV_MODE"] = "1" if self.development_mode else "0"
        if side_port is not None:
            env["VLLM_NIXL_SIDE_CHANNEL_HOST"] = HOST
            env["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(side_port)
        return {**env, **self.env}


class Engine(Server):
    """A vLLM server that was started here. Made by `Stack.start`, which also ends it."""

    def __init__(self, spec: EngineSpec, log_path: Path) -> None:
        self.spec = spec
        self._side_port: HeldPort | None = None
        super().__init__(spec.label, log_path)

    def _command(self, port: int) -> tuple[list[str], dict[str, str]]:
        if self.spec.connector == NIXL and self._side_port is None:
            self._side_port = HeldPort()  # vLLM's NIXL connector binds it beside ours
        side = self._side_port.number if self._side_port is not None else None
        return self.spec.command(port), self.spec.environment(side)

    def release_ports(self) -> None:
        """Stop holding what the engine has bound by now, or will never bind."""
        if self._side_port is not None:
            self._side_port.close()
            self._side_port = None
        super().release_ports()
