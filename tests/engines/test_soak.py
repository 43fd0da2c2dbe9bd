"""The soak for as long as CI can wait; `make soak` is the long one."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.engines.command import STATEFERRY

MINUTES = 3

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]


def test_a_short_soak_passes(tmp_path: Path) -> None:
    command = [*STATEFERRY, "soak", "--minutes", str(MINUTES), "--json"]
    done = subprocess.run(
        [*command, "--log-folder", str(tmp_path)],
        env=os.environ | {"COLUMNS": "160"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    print(done.stderr[-6000:])
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["passed"], {key: result[key] for key in ("wrong", "errors", "held", "grown")}
    assert done.returncode == 0
    assert len(result["outcomes"]) > 5, "hardly a fault was tried"
