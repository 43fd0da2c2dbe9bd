"""Which transports there are, which one fits, and how to make it without importing the others."""

import importlib
from dataclasses import dataclass
from functools import partial
from typing import cast

from stateferry.errors import ConfigError
from stateferry.transport.base import MemoryKind, Transport, TransportOptions
from stateferry.transport.preferred import PreferredTransport


@dataclass(frozen=True, slots=True)
class _Entry:
    module: str
    class_name: str
    kinds: frozenset[MemoryKind]


_CPU = frozenset({MemoryKind.CPU})
_CUDA = frozenset({MemoryKind.CUDA})
_BOTH = frozenset({MemoryKind.CPU, MemoryKind.CUDA})
_TRANSPORTS = {
    "cma": _Entry("stateferry.transport.cma", "CmaTransport", _CPU),
    "cudaipc": _Entry("stateferry.transport.cudaipc", "CudaIpcTransport", _CUDA),
    "faults": _Entry("stateferry.transport.faults", "FaultsTransport", _BOTH),
    "memory": _Entry("stateferry.transport.memory", "MemoryTransport", _CPU),
    "mooncake": _Entry("stateferry.transport.mooncake", "MooncakeTransport", _CPU),
    "nixl": _Entry("stateferry.transport.nixl", "NixlTransport", _BOTH),
}
_AUTO = {MemoryKind.CPU: "cma", MemoryKind.CUDA: "cudaipc+nixl"}
"""Names joined by `+` are tried in that order for every peer."""


def transport_names() -> tuple[str, ...]:
    """Every name that `create_transport` knows, sorted."""
    return tuple(sorted(_TRANSPORTS))


def choose(name: str, memory_kind: MemoryKind) -> str:
    """The transport to use for caches in `memory_kind`; `auto` picks. Imports nothing.

    Raises ConfigError when there is no such transport, or it cannot move that kind of memory.
    """
    if name == "auto":
        return _AUTO[memory_kind]
    if memory_kind not in _entry(name).kinds:
        able = [n for n in transport_names() if memory_kind in _TRANSPORTS[n].kinds]
        raise ConfigError(
            f"transport {name!r} cannot move {memory_kind.value} memory; these can: auto, {', '.join(able)}"
        )
    return name


def create_transport(name: str, options: TransportOptions) -> Transport:
    """Make a transport by name, or by several names joined by `+`, of which each peer is read with the
    first that reaches it (not `auto`: see `choose`). It is used and closed by one thread.

    Raises ConfigError for an unknown name, TransportUnavailable when its library is missing (the text
    names the pip extra) or does not start.
    """
    if "+" in name:
        several = name.split("+")
        return PreferredTransport({one: partial(create_transport, one, options) for one in several})
    entry = _entry(name)
    maker = getattr(importlib.import_module(entry.module), entry.class_name)
    return cast(Transport, maker(options))


def _entry(name: str) -> _Entry:
    try:
        return _TRANSPORTS[name]
    except KeyError:
        raise ConfigError(
            f"unknown transport {name!r}; known: auto, {', '.join(transport_names())}"
        ) from None
