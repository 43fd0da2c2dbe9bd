"""Every setting of the connector: name, unit, default, bounds. Parsed once, when an engine starts.

Settings come from `kv_connector_extra_config` in vLLM's `--kv-transfer-config`.
"""

import enum
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from stateferry.errors import ConfigError


class Verify(enum.Enum):
    """Which arriving bytes are compared with a digest made by the producer."""

    OFF = "off"
    STATE = "state"
    ALL = "all"


class TransportName(enum.Enum):
    """The transports that can be asked for by name."""

    AUTO = "auto"
    CMA = "cma"
    CUDAIPC = "cudaipc"
    FAULTS = "faults"
    MOONCAKE = "mooncake"
    MORI = "mori"
    NIXL = "nixl"


class MoriBackendName(enum.Enum):
    """MoRI's back ends that can be asked for."""

    RDMA = "rdma"
    XGMI = "xgmi"


class LoadMode(enum.Enum):
    """When a consumer's bytes move: after vLLM gave the request blocks, or before."""

    ASYNC = "async"
    SYNC = "sync"


class Auth(enum.Enum):
    """Who may talk to the control sockets."""

    AUTO = "auto"
    NONE = "none"


MAX_PORT = 65535

Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's settings. `docs/configuration.md` is this class as a table."""

    transport: TransportName = TransportName.AUTO
    """What moves bytes. `auto`: `cma` for CPU caches; for CUDA `cudaipc` where it reaches the peer, else
    `nixl`; for ROCm `mori`. `mooncake`, which lets everybody who reaches its port at the cache, is used only
    where it is asked for. `faults` wraps one of them and needs `testing`."""
    host: Annotated[str, msgspec.Meta(min_length=1)] = "127.0.0.1"
    """Address of this machine that peers dial. A name is looked up here, once."""
    bind_host: str = ""
    """Address that control sockets bind. Empty: the same as `host`."""
    auth_key_file: str = ""
    """File with the secret that engines know each other by; `stateferry key FILE` makes one. Nobody else
    can talk to the control sockets. Required off loopback."""
    auth: Auth = Auth.AUTO
    """`auto`: by `auth_key_file`. `none`: answer everybody, even where other machines can reach us."""
    port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    """First control port; rank r of this engine listens on `port + r`. 0: the system picks."""
    bootstrap_port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    """Where a prefill engine answers `GET /query` of routers that send both legs at once, in clear text, to
    everybody who reaches `bind_host`. They keep the answer, so `port` must be set, too. 0: nowhere."""
    lease_s: Seconds = 15.0
    """How long a producer keeps a finished request's blocks without hearing from a consumer.
    Renewed every third of it."""
    load_mode: LoadMode = LoadMode.ASYNC
    """`async`: vLLM gives a request blocks, and it waits off the step while they are read into. `sync`: it
    is read into a waiting room while it queues, and runs in the step in which it gets its blocks."""
    room_mib: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 512
    """Under `sync`: the most memory of the waiting room, in MiB, of the device that holds the cache. A
    hand-off that finds no room in it is loaded as under `async`."""
    handshake_timeout_s: Seconds = 10.0
    """A hand-shake that takes longer fails the requests that wait for it. For the part of it in which the
    transport connects, at most a quarter of `lease_s`: nothing else goes on meanwhile."""
    offer_timeout_s: Seconds = 60.0
    """Where a router sends both legs at once: how long a decode leg waits for the prefill engine to make its
    offer, queueing and computing included; past it the prompt is computed here."""
    transfer_timeout_s: Seconds = 60.0
    """From vLLM's load order to the last byte; past it the request fails."""
    retry_interval_s: Seconds = 1.0
    """First pause before a peer that could not be reached is tried again; doubles up to 30 s."""
    read_retries: Annotated[int, msgspec.Meta(ge=0, le=10)] = 2
    """How often a read that failed is tried again, within `transfer_timeout_s` and the lease, before its
    request fails; the last time over a fresh connection."""
    slow_handoff_s: Seconds = 1.0
    """A hand-off that takes longer, from vLLM's load order to its end, is logged at INFO, others at DEBUG."""
    verify: Verify = Verify.OFF
    """Compare digests of what arrived: nothing, recurrent state, or everything."""
    nixl_backends: tuple[str, ...] = ("UCX",)
    """NIXL's back ends, in the order in which they are made."""
    mori_backend: MoriBackendName = MoriBackendName.RDMA
    """MoRI's back end: `rdma`, or `xgmi` between GPUs of one host."""
    mori_qp_per_transfer: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """RDMA queue pairs that one request is spread over. Above 1, a request that found a full send queue is
    followed by `mori_quiet_s` of waiting."""
    mori_post_batch_size: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """RDMA work requests that MoRI posts at a time. -1: all of a request."""
    mori_num_workers: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    """Threads in which MoRI posts RDMA work requests."""
    mori_num_streams: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """HIP streams of the `xgmi` back end."""
    mori_num_events: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    """HIP events of the `xgmi` back end."""
    mori_quiet_s: Annotated[float, msgspec.Meta(ge=0, le=600)] = 0.0
    """How long after a failed request its bytes may still land, and its blocks are kept. 0: by back end and
    kind of failure, up to 140 s for `rdma`; `docs/mori.md`."""
    testing: bool = False
    """Let `kv_transfer_params` damage a hand-off on purpose and fill destination blocks with a
    pattern before reading (accuracy gate). Never in production."""
    faults: dict[str, Any] = {}
    """What the transport `faults` does: `transport` (which one it wraps, `auto`), `seed`, and `rules`, a
    list of `{"kind", "reads", "rate", "polls"}`; `transport/faults.py` has the kinds."""


def parse_config(extra: Mapping[str, Any]) -> Config:
    """Turn vLLM's dictionary into a Config. Numbers may be strings, as some launchers pass them.

    Raises ConfigError that names the key, what was found and what is allowed.
    """
    known = {f.name for f in msgspec.structs.fields(Config)}
    unknown = sorted(set(extra) - known)
    if unknown:
        raise ConfigError(
            f"unknown key {unknown[0]!r} in kv_connector_extra_config; known keys: {', '.join(sorted(known))}"
        )
    try:
        config = msgspec.convert(dict(extra), Config, strict=False)
    except msgspec.ValidationError as e:
        raise ConfigError(f"kv_connector_extra_config: {_explain(str(e), extra)}") from e
    if config.transport is TransportName.FAULTS and not config.testing:
        raise ConfigError("key 'transport' is 'faults', which damages hand-offs: set 'testing', too")
    if config.bootstrap_port and not config.port:
        raise ConfigError(
            f"key 'bootstrap_port' = {config.bootstrap_port}, but 'port' is 0: routers ask once and keep the "
            "answer, so an engine that restarts must listen where it did. Set 'port', too"
        )
    if config.faults and config.transport is not TransportName.FAULTS:
        raise ConfigError("key 'faults' is set, but 'transport' is not 'faults': nothing would obey it")
    return config


def control_port(first: int, data_parallel_index: int, tp_size: int, tp_rank: int) -> int:
    """Where a rank's control socket binds: one port each for all ranks of all data-parallel engines that
    share `first`. 0: the system picks. Raises ConfigError past the last port there is."""
    if not first:
        return 0
    port = first + data_parallel_index * tp_size + tp_rank
    if port > MAX_PORT:
        raise ConfigError(
            f"key 'port' = {first}: rank {tp_rank} of data-parallel engine {data_parallel_index} would "
            f"listen on {port}, past {MAX_PORT}; choose a smaller one, or 0 to let the system pick"
        )
    return port


def _explain(text: str, extra: Mapping[str, Any]) -> str:
    """msgspec says "… - at `$.lease_s`"; say the key, the value that was found there and what is allowed."""
    reason, _, path = text.partition(" - at `$.")
    key = path.rstrip("`").split("[")[0].split(".")[0]
    if key not in extra:
        return text
    kind = next(f.type for f in msgspec.structs.fields(Config) if f.name == key)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        reason = f"expected one of {', '.join(sorted(str(member.value) for member in kind))}"
    return f"key {key!r} = {extra[key]!r}: {reason}"
