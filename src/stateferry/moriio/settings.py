"""MoRIIO's settings, with MoRIIO's defaults, turned into ours.

What has no meaning here is named once; what would change an answer is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from stateferry.config import Config, TransportName, parse_config
from stateferry.errors import ConfigError
from stateferry.moriio.address import Address

WHERE = "kv_connector_extra_config"
PORTS = {"handshake_port": 6301, "notify_port": 61005, "http_port": 0, "proxy_ping_port": 0}
TIMEOUTS = {"transfer_timeout": 30.0, "defer_timeout": 60.0, "recv_abort_timeout": 120.0}
RDMA = {"qp_per_transfer": 1, "post_batch_size": -1, "num_workers": 1}
BACKENDS = ("rdma", "xgmi")
KEYS = frozenset({"read_mode", "host_ip", "proxy_ip", "backend", *PORTS, *TIMEOUTS, *RDMA})
"""Everything that MoRIIO's connector reads."""
SAME = {
    "host_ip": "host",
    "handshake_port": "port",
    "defer_timeout": "lease_s",
    "transfer_timeout": "transfer_timeout_s",
    "backend": "mori_backend",
    "qp_per_transfer": "mori_qp_per_transfer",
    "post_batch_size": "mori_post_batch_size",
    "num_workers": "mori_num_workers",
}
"""MoRIIO's name and ours, where both say the same thing."""
FOR_MORI = ("backend", *RDMA)
OLD_ABORT_VARIABLE = "VLLM_MORIIO_TRANSFER_TIMEOUT_S"
OLD_VARIABLES = (
    "VLLM_MORIIO_CONNECTOR_READ_MODE",
    "VLLM_MORIIO_QP_PER_TRANSFER",
    "VLLM_MORIIO_POST_BATCH_SIZE",
    "VLLM_MORIIO_NUM_WORKERS",
)
"""Environment variables that MoRIIO itself ignores."""
MAX_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Moriio:
    """What MoRIIO's settings say beyond ours: where this engine is, and whom it tells."""

    address: Address
    """Our host, the first control port, and a port that nobody listens on."""
    http_port: int
    proxy: Address | None
    """Host and port (`handshake`) of the router that is to hear of us; None: nobody is told."""
    idle: tuple[str, ...]
    """Keys and environment variables that were set and have no effect."""

    @property
    def warning(self) -> str:
        """One line about everything that has no effect; empty: there is nothing to say."""
        return (
            f"set, as for MoRIIO, and without effect here: {', '.join(self.idle)}. Control messages have one "
            "port (handshake_port); notify_port is only told to routers. backend, qp_per_transfer, "
            "post_batch_size and num_workers are for the transport 'mori'"
            if self.idle
            else ""
        )


def speaks_moriio(extra: Mapping[str, Any]) -> bool:
    """Whether a configuration was written for MoRIIO's connector: our keys and MoRIIO's are disjoint."""
    return not KEYS.isdisjoint(extra)


def read_settings(
    extra: Mapping[str, Any], *, default_host: str, environ: Mapping[str, str], rocm: bool = False
) -> tuple[Config, Moriio]:
    """Both sides of a configuration in MoRIIO's words; keys of ours may stand beside them.

    `default_host` is used where neither `host_ip` nor `host` is set. `rocm`: on this machine the transport
    `auto` is `mori`. Raises ConfigError that names the key.
    """
    theirs = {key: value for key, value in extra.items() if key in KEYS}
    ours = {key: value for key, value in extra.items() if key not in KEYS}
    for their_key, our_key in SAME.items():
        if theirs.get(their_key) and our_key in ours:
            raise ConfigError(f"{their_key!r} and {our_key!r} in {WHERE} say the same thing: remove one")
    _refuse_write(theirs.get("read_mode", "false"))
    ports = {key: _port(theirs, key, default) for key, default in PORTS.items()}
    for key, value in _as_ours(theirs, environ).items():
        ours.setdefault(key, value)
    ours.setdefault("host", theirs.get("host_ip") or default_host)
    ours.setdefault("port", ports["handshake_port"])
    if "auth" not in ours and "auth_key_file" not in ours:
        ours["auth"] = "none"  # as MoRIIO: it has no key. The engine warns of that where others reach it.
    config = parse_config(ours)
    if not config.port:
        raise ConfigError(
            f"key 'port' = 0 in {WHERE}: in MoRIIO's words ports are computed from the first one"
        )
    proxy_ip = str(theirs.get("proxy_ip") or "")
    if proxy_ip and not (ports["proxy_ping_port"] and ports["http_port"]):
        raise ConfigError(
            f"'proxy_ip' = {proxy_ip!r} in {WHERE} needs 'proxy_ping_port', where that router hears of "
            "engines, and 'http_port', this engine's own, which it is told"
        )
    proxy = Address(proxy_ip, ports["proxy_ping_port"], 0) if proxy_ip else None
    address = Address(config.host, config.port, ports["notify_port"])
    by_mori = config.transport is TransportName.MORI or (rocm and config.transport is TransportName.AUTO)
    keys = ("notify_port", *(() if by_mori else FOR_MORI))
    idle = (*(key for key in keys if key in theirs), *(name for name in OLD_VARIABLES if name in environ))
    return config, Moriio(address, ports["http_port"], proxy, idle)


def _as_ours(theirs: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Time-outs and MoRI's options under our names, with MoRIIO's defaults."""
    timeouts = {key: _seconds(key, theirs.get(key, default)) for key, default in TIMEOUTS.items()}
    if "recv_abort_timeout" not in theirs and environ.get(OLD_ABORT_VARIABLE):
        timeouts["recv_abort_timeout"] = _seconds(OLD_ABORT_VARIABLE, environ[OLD_ABORT_VARIABLE])
    backend = str(theirs.get("backend", BACKENDS[0])).lower()
    if backend not in BACKENDS:
        raise ConfigError(f"key 'backend' = {theirs['backend']!r} in {WHERE}: expected 'rdma' or 'xgmi'")
    return {
        "lease_s": timeouts["defer_timeout"],
        # Two limits on one wait: the earlier one ends it.
        "transfer_timeout_s": min(timeouts["transfer_timeout"], timeouts["recv_abort_timeout"]),
        SAME["backend"]: backend,
        **{SAME[key]: _whole(theirs, key, default) for key, default in RDMA.items()},
    }


def _refuse_write(read_mode: Any) -> None:
    """Read as MoRIIO reads it: whatever is not yes is no."""
    if str(read_mode).lower().strip() not in ("true", "1"):
        raise ConfigError(
            f"key 'read_mode' = {read_mode!r} in {WHERE} (false where it is missing) asks for WRITE, in "
            "which the prefill engine pushes. StateFerry only reads, and recurrent groups are READ mode only "
            "in MoRIIO, too. Set 'read_mode': true on both engines; routers learn it from their registration"
        )


def _port(values: Mapping[str, Any], key: str, default: int) -> int:
    number = _whole(values, key, default)
    if not 0 <= number <= 65535:
        raise ConfigError(f"key {key!r} = {values[key]!r} in {WHERE}: expected a port, at most 65535")
    return number


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    """Launchers pass text; what is empty is not set."""
    value = values.get(key)
    if value in (None, "", 0, "0"):
        return default
    try:
        return msgspec.convert(value, int, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"key {key!r} = {value!r} in {WHERE}: expected a whole number") from e


def _seconds(key: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not math.isfinite(seconds) or seconds <= 0:
        raise ConfigError(f"{WHERE}.{key} = {value!r} must be finite and greater than zero (seconds)")
    if seconds > MAX_TIMEOUT_S:
        raise ConfigError(f"{WHERE}.{key} = {value!r}: at most {MAX_TIMEOUT_S:.0f} s")
    return seconds
