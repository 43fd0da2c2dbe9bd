"""What `serve` gives an engine on CPU that the operator did not say, and that it says so."""

import os
from typing import Any

import pytest

from stateferry.cli import serve
from stateferry.cli.serve import CACHE_GIB, _serve
from stateferry.config import Config
from stateferry.errors import ConfigError
from stateferry.models import RECALL_GDN
from stateferry.pause import PAUSE_US
from stateferry.stack import EngineSpec, Role, host_facts


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment that vLLM's server would start with; it is not started."""
    for name in (PAUSE_US, CACHE_GIB):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    given: dict[str, str] = {}
    monkeypatch.setattr(os, "execv", lambda path, arguments: given.update(os.environ))
    return given


def start(dry_run: bool = False) -> None:
    _serve(Role.PREFILL, str(RECALL_GDN), {}, Config(), ["--port", "0"], dry_run=dry_run)


def for_cpu(monkeypatch: pytest.MonkeyPatch, yes: bool) -> None:
    for module in (serve, "stateferry.stack.host"):
        target = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{target}.is_for_cpu", lambda: yes)


def test_an_engine_on_cpu_gets_a_pause_and_a_small_cache(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for_cpu(monkeypatch, True)
    start()
    assert (environment[PAUSE_US], environment[CACHE_GIB]) == ("50", "4")
    said = capsys.readouterr().err
    assert f"{PAUSE_US}=0" in said
    assert CACHE_GIB in said


def test_what_the_operator_says_stays(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for_cpu(monkeypatch, True)
    monkeypatch.setenv(PAUSE_US, "0")
    monkeypatch.setenv(CACHE_GIB, "7")
    start()
    assert (environment[PAUSE_US], environment[CACHE_GIB]) == ("0", "7")
    said = capsys.readouterr().err
    assert PAUSE_US not in said
    assert CACHE_GIB not in said


def test_an_engine_on_a_gpu_is_left_as_it_is(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for_cpu(monkeypatch, False)
    start()
    assert PAUSE_US not in environment
    assert CACHE_GIB not in environment


@pytest.mark.parametrize("dry_run", [False, True], ids=["start", "dry run"])
def test_a_pause_that_cannot_be_read_is_named_before_vllm_is_loaded(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, dry_run: bool
) -> None:
    monkeypatch.setenv(PAUSE_US, "soon")
    with pytest.raises(ConfigError, match=f"{PAUSE_US}: expected .* found 'soon'"):
        start(dry_run)
    assert environment == {}


@pytest.mark.parametrize(
    ("cpu", "said", "expected"), [(True, None, 50), (False, None, 0), (True, "0", 0), (False, "200", 200)]
)
def test_engines_that_are_started_here_wait_alike_and_results_say_how(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, cpu: bool, said: Any, expected: int
) -> None:
    for_cpu(monkeypatch, cpu)
    if said is not None:
        monkeypatch.setenv(PAUSE_US, said)
    assert host_facts()["vllm_pause_us"] == expected
    for connector in ("StateFerryConnector", "NixlConnector", None):
        assert EngineSpec(model="m", connector=connector).environment()[PAUSE_US] == str(expected)
