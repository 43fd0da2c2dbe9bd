"""The demo with real engines."""

import json
import subprocess

from tests.engines.command import STATEFERRY


def test_the_demo_passes_and_says_what_it_saw() -> None:
    result = subprocess.run([*STATEFERRY, "demo", "--json"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    verdict = json.loads(result.stdout.splitlines()[-1])
    assert verdict["passed"] is True
    assert verdict["problems"] == []
    for asked in verdict["questions"]:
        assert asked["one_engine"]["text"] == asked["two_engines"]["text"] == asked["expected"]
        assert asked["withheld"]["text"] != asked["expected"]
        sizes = asked["two_engines"]["received"]["bytes"]
        assert sizes["state"] > 0
        assert sizes["attention"] > 0
        assert asked["withheld"]["received"]["bytes"]["state"] == 0
        assert asked["one_engine"]["first_token_s"] > 0
        assert asked["two_engines"]["first_token_s"] > 0
    assert "Passed." in result.stderr
