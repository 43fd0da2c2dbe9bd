"""CUDA IPC over a double of the driver, and its kernel in Triton's interpreter; tools/gpu_transports.py does
the rest on devices."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from stateferry.errors import ProtocolError, TransportError, TransportUnavailable
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_reads import pieces
from stateferry.transport import TransferState, TransportOptions, create_transport

gather = pytest.importorskip("stateferry.transport.cuda_gather", reason="needs torch and triton")
from tests.unit import cuda_double  # noqa: E402 - needs what was just asked for
from tests.unit.cuda_double import (  # noqa: E402
    Double,
    DoubleLocal,
    DoubleRig,
    DoubleTarget,
    copiers,
    make_transport,
)


@pytest.fixture
def double() -> Iterator[Double]:
    with cuda_double.driver() as found:
        yield found


@pytest.fixture(scope="module")
def rig() -> Iterator[DoubleRig]:
    with cuda_double.driver() as found, DoubleRig(found) as made:
        yield made


@pytest.mark.parametrize("check", CHECKS)
def test_conformance(rig: DoubleRig, check: str) -> None:
    CHECKS[check](rig)


def gathered(
    double: Double, rows: list[tuple[int, int, int]], gatherer: "gather.Gatherer | None" = None
) -> None:
    """Copy rows of (target offset, source offset, size) between arrays, and see that nothing else changed."""
    source, target = cuda_double.numbers(1 << 20), np.zeros(1 << 20, np.uint8)
    expected = target.copy()
    there, here = source.ctypes.data, target.ctypes.data
    gatherer = gatherer or gather.Gatherer(0, copiers)
    launched = gatherer.launch(gather._spans([(here + a, there + b, n) for a, b, n in rows]), there, 32)
    for a, b, n in rows:
        expected[a : a + n] = source[b : b + n]
    looks = 0
    while not launched.done():
        looks += 1
        assert looks < 100
    assert looks, "done before anything ran"
    assert (target == expected).all()
    assert launched.seal() == source[:32].tobytes()
    gatherer.retire(launched)


@pytest.mark.parametrize(
    "rows",
    [
        [(0, 8, 64)],
        [(0, 8, 200_000)],
        [(1, 0, 24), (104, 36, 24), (200, 208, 23)],
        [(8, 16, 70_001), (100_000, 200_000, 65_536), (300_003, 3, 1)],
        [(16 * i, 16 * (9000 - i), 8) for i in range(9000)],
        [(16 * i, 16 * (100 - i), 7) for i in range(100)],
    ],
    ids=["one", "large", "odd in each of three ways", "mixed", "more words than rows", "more odd than rows"],
)
def test_every_byte_arrives_and_no_other(double: Double, rows: list[tuple[int, int, int]]) -> None:
    gathered(double, rows)


def test_what_a_gather_used_is_used_again_and_given_back_at_the_end(double: Double) -> None:
    gatherer = gather.Gatherer(0, copiers)
    gathered(double, [(0, 0, 8)], gatherer)
    kept = set(double.allocations)
    for _ in range(5):
        gathered(double, [(0, 0, 8)], gatherer)
    assert set(double.allocations) == kept
    source, target = cuda_double.numbers(64), np.zeros(64, np.uint8)
    row = (target.ctypes.data, source.ctypes.data, 64)
    late = gatherer.launch(gather._spans([row]), source.ctypes.data, 8)
    late.wait()
    assert (target == source).all()
    gatherer.close()
    gatherer.close()
    gatherer.retire(late)
    assert not double.allocations
    assert not double.events
    assert set(double.streams) == {0}


@pytest.mark.parametrize("piece_bytes", [8, 8 << 20, 1 << 34])
@pytest.mark.parametrize("count", [1, 90, 5000])
def test_a_grid_has_a_program_for_every_piece_and_not_too_many(count: int, piece_bytes: int) -> None:
    for copier in copiers(0):
        pieces_axis, chunks_axis = copier.grid(count, piece_bytes)
        assert pieces_axis == count
        assert 1 <= chunks_axis <= max(1, gather.PROGRAMS // count)
        assert chunks_axis * copier.chunk_bytes < piece_bytes + copier.chunk_bytes


def test_a_kernel_that_does_not_copy_is_noticed_at_the_start(double: Double) -> None:
    double.copies = False
    with pytest.raises(TransportError, match="did not copy what it was told to"):
        gather.Gatherer(0, copiers)


def test_without_a_compiler_another_transport_may_be_tried(double: Double) -> None:
    def compile_for(index: int) -> "tuple[gather.Copier, gather.Copier]":
        raise RuntimeError("Failed to find C compiler")

    with pytest.raises(TransportUnavailable, match=r"could not be compiled .*Failed to find C compiler"):
        gather.Gatherer(0, compile_for)


def test_a_kernel_that_counts_in_other_units_is_noticed_at_the_start(double: Double) -> None:
    words, odd = copiers(0)
    half = dataclasses.replace(words, kernel=dataclasses.replace(words.kernel, function=4))
    with pytest.raises(TransportError, match="did not copy what it was told to"):
        gather.Gatherer(0, lambda index: (half, odd))


@pytest.mark.parametrize("succeed", [0, 1], ids=["words", "seal"])
def test_a_launch_that_fails_half_way_is_quiet_when_it_has_failed(double: Double, succeed: int) -> None:
    target = DoubleTarget([4096], 1, double)
    local = DoubleLocal([4096], double)
    with make_transport() as reader:
        reader.register(local.regions())
        peer = reader.connect(target.registration, 1.0)
        double.fail["cuLaunchKernel"] = succeed
        transfer = peer.post_read(pieces([(0, 0, 0, 0, 4096)]))
        assert transfer.poll() is TransferState.FAILED
        assert transfer.quiet
        assert not double.pending
        assert "could not launch: cudaipc: launching the copy: invalid (CUDA error 400)" in transfer.error
        assert len(reader.gatherer._free) == 1, "its memory is not used again"  # type: ignore[attr-defined]
        del double.fail["cuLaunchKernel"]
        peer.close()
    assert not double.mapped
    target.end()


def test_a_region_that_cannot_be_memory_is_refused_and_nothing_stays_mapped(double: Double) -> None:
    target = DoubleTarget([4096], 1, double)
    said = msgspec.msgpack.decode(target.registration)
    said["allocations"][0][1], said["regions"][0][2] = 1 << 60, 1 << 59
    with make_transport() as reader:
        reader.register(DoubleLocal([4096], double).regions())
        with pytest.raises(ProtocolError, match="cannot be memory"):
            reader.connect(msgspec.msgpack.encode(said), 1.0)
        assert not double.mapped
    target.end()


def test_a_device_that_fails_fails_the_read(double: Double) -> None:
    target = DoubleTarget([4096], 1, double)
    local = DoubleLocal([4096], double)
    with make_transport() as reader:
        reader.register(local.regions())
        peer = reader.connect(target.registration, 1.0)
        transfer = peer.post_read(pieces([(0, 0, 0, 0, 4096)]))
        double.fail["cuEventQuery"] = 1
        assert transfer.poll() is TransferState.PENDING
        assert transfer.poll() is TransferState.FAILED
        assert "the device failed: invalid (CUDA error 400)" in transfer.error
        peer.close()
    target.end()


def test_without_a_device_it_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(TransportUnavailable, match="needs an NVIDIA device"):
        create_transport("cudaipc", TransportOptions())


KERNEL = """
import numpy as np, torch
from stateferry.transport import cuda_gather as gather

source = np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8)
target = np.zeros_like(source)
expected = target.copy()
here, there = target.ctypes.data, source.ctypes.data
for unit, rows in ((8, [(0, 8, 3000), (40_000, 64_000, 17)]), (1, [(3, 100_001, 3001)])):
    table = np.array([(there + a, here + b, count) for a, b, count in rows], np.int64)
    # Two programs a piece, of which one may find nothing to do and one several chunks.
    gather._gather[(len(rows), 2)](torch.from_numpy(table), unit, 1100, gather.LANES)
    for a, b, count in rows:
        expected[b : b + count * unit] = source[a : a + count * unit]
assert expected.any() and (target == expected).all(), np.flatnonzero(target != expected)[:10]
"""


def test_the_kernel_copies_whole_words_and_single_bytes() -> None:
    """In Triton's interpreter, which must be chosen before triton is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL], env=environment, capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
