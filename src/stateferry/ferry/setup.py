"""What a ferry is made of."""

from collections.abc import Callable
from dataclasses import dataclass, field

from stateferry.config import Config
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.reading import Tamper
from stateferry.layout.spec import CacheLayout
from stateferry.session import Clock, SystemClock
from stateferry.transport.base import MemoryRegion, Transport


@dataclass(frozen=True, slots=True)
class FerrySetup:
    """Everything a ferry needs. The memory must outlive the ferry."""

    config: Config
    layout: CacheLayout
    regions: tuple[MemoryRegion, ...]
    memory: LocalMemory
    make_transport: Callable[[], Transport]
    """Called on the ferry thread."""
    host: str
    """What peers dial."""
    bind_host: str
    port: int
    """0: the system picks."""
    software: str
    tamper: Tamper | None = None
    room: CacheLayout | None = None
    """Where hand-offs wait under `load_mode: sync`; its region is the last of `regions`."""
    clock: Clock = field(default_factory=SystemClock)
