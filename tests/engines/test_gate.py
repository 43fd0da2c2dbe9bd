"""The accuracy gate as its users run it: engines of its own, the bundled model, one line of JSON."""

import json
import subprocess
from pathlib import Path

import pytest
from tests.engines.command import STATEFERRY

TIMEOUT_S = 900


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize("load_mode", ["async", "sync"])
def test_the_gate_passes(tmp_path: Path, load_mode: str) -> None:
    command = [*STATEFERRY, "gate", "--json", "--load-mode", load_mode, "--log-folder", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S - 30)
    assert result.stdout, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["failures"] == []
    assert found["passed"] is True
    assert result.returncode == 0
    assert found["load_mode"] == load_mode
    (model,) = found["models"]
    assert model["clean"]["exact"] == model["clean"]["prompts"] == 64
    assert {name for name, tally in model["mutants"].items() if tally["caught"] + tally["errors"]} == (
        model["mutants"].keys() - {"none"}
    )
    assert model["digests"].keys() > model["mutants"].keys()
