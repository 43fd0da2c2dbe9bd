"""Examples that need no engine run here; `tests/engines/test_examples.py` runs the others.

`test_llmd_sidecar.py` has that one before made-up engines.
"""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.programs import loaded

from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import MemoryRig
from stateferry.transport import TransferState
from stateferry.transport.memory import MemoryTransport

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_HERE = {"counting_transport.py"}
RUN_WITH_ENGINES = {"ask.py", "both_legs_at_once.py", "llmd_sidecar.py", "two_legs.py"}


@pytest.fixture(scope="module")
def counting() -> ModuleType:
    return loaded(EXAMPLES / "counting_transport.py")


def test_every_example_is_run_by_a_test_and_says_how_to_run_it() -> None:
    found = {path.name: path.read_text() for path in EXAMPLES.iterdir() if path.is_file()}
    assert set(found) == RUN_HERE | RUN_WITH_ENGINES
    for name, text in found.items():
        assert f"python examples/{name}" in (ast.get_docstring(ast.parse(text)) or ""), name
    engines = (Path(__file__).parents[1] / "engines" / "test_examples.py").read_text()
    assert all(f'"{name}"' in engines for name in RUN_WITH_ENGINES)


def test_the_counting_transport_passes_the_suite() -> None:
    command = [sys.executable, EXAMPLES / "counting_transport.py"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == [f"{name}: passed" for name in CHECKS]


def test_the_suite_would_notice_a_counting_transport_that_hurries(
    counting: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting._CountingTransfer, "poll", lambda self: TransferState.DONE)
    with (
        MemoryRig(lambda: counting.CountingTransport(MemoryTransport()), "hurries") as rig,
        pytest.raises(AssertionError),
    ):
        CHECKS["exact_bytes"](rig)


def test_what_was_read_is_counted_once(counting: ModuleType) -> None:
    with MemoryRig(lambda: counting.CountingTransport(MemoryTransport()), "counting") as rig:
        link = rig.link((4096,))
        CHECKS["one_piece"](rig)
        assert link.transport.bytes_read == 0
        from stateferry.testing.transport_reads import pieces

        transfer = link.peer.post_read(pieces([(0, 0, 0, 0, 100), (0, 200, 0, 200, 50)]))
        while transfer.poll() is TransferState.PENDING:
            pass
        transfer.poll()
        assert link.transport.bytes_read == 150
