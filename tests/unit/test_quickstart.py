"""The README's quick start: its blocks are found, and what they must show is looked for.

`make quickstart` and `tests/engines/test_quickstart.py` run them with real engines;
`test_documented_commands.py` looks at every command.
"""

import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from tests.programs import loaded

ROOT = Path(__file__).parents[2]
GOOD = """{"choices":[{"index":0,"text":" Kyoto","logprobs":null}]}
stateferry_handoffs_total{engine="0",model_name="model",outcome="received"} 1.0
stateferry_received_bytes_total{engine="0",kind="attention",model_name="model"} 262144.0
stateferry_received_bytes_total{engine="0",kind="state",model_name="model"} 407040.0
"""


@pytest.fixture(scope="module")
def quickstart() -> ModuleType:
    return loaded(ROOT / "tools" / "quickstart.py")


def test_it_starts_asks_shows_and_stops(quickstart: ModuleType) -> None:
    found = quickstart.blocks()
    assert len(found) == 5
    words = ("serve prefill", "vllm-router", "completions", "metrics", "kill")
    for block, word in zip(found, words, strict=True):
        assert word in block
    assert subprocess.run(["bash", "-n"], input=quickstart.script(), text=True).returncode == 0


def test_other_ports_change_nothing_else(quickstart: ModuleType) -> None:
    ports = quickstart.free_ports()
    assert len(set(ports.values())) == 3
    other = quickstart.script(ports)
    assert not any(str(port) in other for port in quickstart.PORTS)
    back = {new: old for old, new in ports.items()}
    assert quickstart.script() == quickstart.re.sub(
        r"\b(" + "|".join(map(str, back)) + r")\b", lambda m: str(back[int(m[1])]), other
    )


def test_what_it_must_show_is_looked_for(quickstart: ModuleType) -> None:
    assert quickstart.problems(GOOD) == []
    assert quickstart.problems("") == [name for _, name in quickstart.EXPECTED]


@pytest.mark.parametrize(
    ("now", "then", "missing"),
    [
        ("Kyoto", "Quito", "the answer"),
        ('"received"} 1.0', '"failed"} 1.0', "one hand-off received"),
        ("407040.0", "0.0", "bytes of recurrent"),
    ],
)
def test_a_wrong_showing_is_noticed(quickstart: ModuleType, now: str, then: str, missing: str) -> None:
    (found,) = quickstart.problems(GOOD.replace(now, then))
    assert missing in found
