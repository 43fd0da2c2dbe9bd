"""What the MoRI double is told and tells: enumerations, descriptors, configurations, as in `mori.io`."""

import enum

import msgspec


class BackendType(enum.Enum):
    """As MoRI numbers them."""

    XGMI = 1
    RDMA = 2


class MemoryLocationType(enum.Enum):
    """As MoRI numbers them."""

    CPU = 1
    GPU = 2


class PollCqMode(enum.Enum):
    """As MoRI numbers them."""

    POLLING = 0


class EngineDesc(msgspec.Struct, frozen=True):
    """How to reach an engine."""

    key: str
    host: str
    port: int

    def pack(self) -> bytes:
        """As bytes, for another engine."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> "EngineDesc":
        """What `pack` made."""
        return msgspec.msgpack.decode(packed, type=EngineDesc)


class MemoryDesc(msgspec.Struct, frozen=True):
    """One registered stretch of memory."""

    engine_key: str
    id: int
    data: int
    size: int

    def pack(self) -> bytes:
        """As bytes, for another engine."""
        return msgspec.msgpack.encode(self)

    @staticmethod
    def unpack(packed: bytes) -> "MemoryDesc":
        """What `pack` made."""
        return msgspec.msgpack.decode(packed, type=MemoryDesc)


class IOEngineConfig:
    """Where an engine listens."""

    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host, self.port = host, port


class RdmaBackendConfig:
    """The five that every version has, in their order."""

    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
    ) -> None:
        self.qp_per_transfer = qp_per_transfer
        self.post_batch_size = post_batch_size
        self.num_worker_threads = num_worker_threads
        self.poll_cq_mode = poll_cq_mode
        self.enable_notification = enable_notification


class XgmiBackendConfig:
    """Streams and events."""

    def __init__(self, num_streams: int = 64, num_events: int = 64) -> None:
        self.num_streams, self.num_events = num_streams, num_events
