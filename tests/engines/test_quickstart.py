"""The README's quick start, block by block as it is printed, with real engines. Only its ports are others.

vLLM loads no plugin here, so it is also `stateferry serve` where the connector must come by its module path.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engines, pytest.mark.timeout(480)]


def test_the_quick_start_answers_shows_what_moved_and_stops() -> None:
    command = [sys.executable, ROOT / "tools" / "quickstart.py", "--free-ports"]
    environment = os.environ | {"VLLM_PLUGINS": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    logs = [ROOT / f"{name}.log" for name in ("prefill", "decode", "router")]
    ends = [path.read_text()[-3000:] for path in logs if path.exists()]
    assert result.returncode == 0, "\n".join([result.stdout, result.stderr, *ends])
    assert "what fails to arrive is computed here" in (ROOT / "decode.log").read_text()
