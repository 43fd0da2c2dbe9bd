"""Which transport is made for which name, memory and set of installed libraries."""

import sys

import pytest

from stateferry.config import TransportName
from stateferry.errors import ConfigError, TransportUnavailable
from stateferry.transport import (
    MemoryKind,
    TransportOptions,
    choose,
    create_transport,
    transport_names,
)
from stateferry.transport.cma import CmaTransport
from stateferry.transport.memory import MemoryTransport


@pytest.mark.parametrize(
    ("name", "kind", "chosen"),
    [
        ("auto", MemoryKind.CPU, "cma"),
        ("auto", MemoryKind.CUDA, "cudaipc+nixl"),
        ("nixl", MemoryKind.CPU, "nixl"),
        ("nixl", MemoryKind.CUDA, "nixl"),
        ("cma", MemoryKind.CPU, "cma"),
        ("memory", MemoryKind.CPU, "memory"),
        ("mooncake", MemoryKind.CPU, "mooncake"),
    ],
)
def test_auto_picks_and_a_name_is_kept(name: str, kind: MemoryKind, chosen: str) -> None:
    assert choose(name, kind) == chosen


def test_a_transport_that_cannot_move_this_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'cma' cannot move cuda memory; these can: auto, cudaipc, faults, nixl"
    ):
        choose("cma", MemoryKind.CUDA)


def test_an_unknown_name_is_refused_with_all_names() -> None:
    for attempt in (
        lambda: choose("rdma", MemoryKind.CPU),
        lambda: create_transport("rdma", TransportOptions()),
    ):
        with pytest.raises(
            ConfigError,
            match="unknown transport 'rdma'; known: auto, cma, cudaipc, faults, memory, mooncake, nixl",
        ):
            attempt()


def test_every_name_that_can_be_configured_is_known() -> None:
    assert {name.value for name in TransportName} <= {"auto", *transport_names()}


def test_transports_are_made_by_name() -> None:
    with create_transport("memory", TransportOptions()) as made:
        assert isinstance(made, MemoryTransport)
    with create_transport("cma", TransportOptions()) as made:
        assert isinstance(made, CmaTransport)
        assert made.name == "cma"


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # None in sys.modules is how Python marks a module that must not be found.
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(
        TransportUnavailable, match=r"needs the nixl package .*pip install 'stateferry\[cpu\]'"
    ):
        create_transport("nixl", TransportOptions())
