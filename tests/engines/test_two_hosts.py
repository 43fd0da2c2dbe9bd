"""Two engines on two hosts, with delay and loss between them. Needs root, for network namespaces."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "two_hosts.py"


@pytest.mark.by_hand
def test_hand_offs_over_a_slow_and_lossy_network_arrive_whole() -> None:
    result = subprocess.run([sys.executable, TOOL], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    run = json.loads(result.stdout.splitlines()[-1])
    assert run["passed"]
    assert min(run["packets_lost"]) > 0
