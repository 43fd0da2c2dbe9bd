"""What a run says at its end: JSON, tables, and the exit code."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stateferry.cli import gate as command
from stateferry.cli.app import app
from stateferry.errors import EngineError
from stateferry.gate.engines import Facts, facts_of
from stateferry.gate.judge import Judgement, Tally, Verdict, tally
from stateferry.gate.report import CleanSummary, GateReport, ModelReport, PlainSummary
from stateferry.stack import Metrics
from stateferry.stack.host import commit, host_facts

STRUCTURE = {"passed": True, "plans": 3, "bytes": 1000, "faults": []}


def tallied(caught: int = 16, name: str = "state withheld") -> Tally:
    missed = [Judgement(Verdict.MISSED)] * (16 - caught)
    return tally(name, [Judgement(Verdict.CAUGHT, math.inf)] * caught + missed)


def clean(right: int = 64, state_bytes: int = 500) -> CleanSummary:
    return CleanSummary(
        prompts=64,
        tokens=16,
        exact=right,
        same_tokens=right,
        right=right,
        kinds={"block border": 64},
        hits={"none": 64},
        max_logprob_difference=0.0,
        hand_offs=64,
        state_bytes=state_bytes,
        attention_block_bytes=10,
        moved_bytes=99_999,
        failures=() if right == 64 else ("case 3: tokens differ",),
    )


def report(**changes: Any) -> GateReport:
    model = {
        "model": "tiny",
        "transport": "cma",
        "facts": Facts(128, True, 1024, 4096),
        "clean": clean(),
        "plain": PlainSummary(63, 7, 63, 0.03),
        "mutants": (tallied(),),
        "digests": (tallied(),),
        "leak": "",
        "seconds": {"clean": 1.0},
        "speculation": "none",
        "drafts": None,
    }
    run = {
        "full": False,
        "date": "2026-11-29T23:00:00+00:00",
        "commit": "abc",
        "host": {"cores": 2},
        "structure": STRUCTURE,
        "seconds": 5.0,
    }
    model |= {key: value for key, value in changes.items() if key in model}
    run |= {key: value for key, value in changes.items() if key in run}
    models = (ModelReport(**model),) if changes.get("models", True) else ()
    return GateReport(models=models, **run)


def test_all_right_passes_and_is_one_json_object() -> None:
    value = json.loads(json.dumps(report().to_json(), allow_nan=False))
    assert value["passed"] is True
    assert value["failures"] == []
    assert value["models"][0]["passed"] is True
    assert value["models"][0]["clean"]["exact"] == 64
    assert value["models"][0]["mutants"]["state withheld"]["caught"] == 16
    assert value["models"][0]["mutants"]["state withheld"]["smallest_difference"] == "inf"
    assert value["models"][0]["facts"]["block_tokens"] == 128


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clean": clean(right=63)}, "case 3"),
        ({"leak": "d holds blocks"}, "d holds blocks"),
        ({"mutants": (tallied(12),)}, "answers: would go unnoticed"),
        ({"digests": (tallied(12),)}, "digests: would go unnoticed"),
        ({"structure": {**STRUCTURE, "passed": False, "faults": ["a byte"]}}, "a byte"),
        ({"mutants": (tally("m", [Judgement(Verdict.NOT_JUDGED, reason="late")] * 2),)}, "2 times late"),
    ],
)
def test_any_part_that_fails_fails_the_run_and_says_why(changes: dict[str, Any], words: str) -> None:
    found = report(**changes)
    assert not found.passed
    assert any(words in text for text in found.failures())


def test_a_run_that_tried_nothing_does_not_pass() -> None:
    assert not report(models=False).passed
    assert not report(mutants=(), digests=()).passed
    assert not report(clean=clean(state_bytes=0)).passed
    assert not report(structure={}).passed


def run(monkeypatch: pytest.MonkeyPatch, outcome: GateReport, *arguments: str) -> Any:
    """The command line, with a run that ends in `outcome`."""
    monkeypatch.setattr(command, "bundled", lambda *_: "bundled")
    monkeypatch.setattr(command, "run_gate", lambda *args, **settings: outcome)
    return CliRunner().invoke(app, ["gate", *arguments])


@pytest.mark.parametrize(("outcome", "code"), [(report(), 0), (report(mutants=(tallied(0),)), 1)])
def test_the_last_line_is_json_and_the_exit_code_is_the_verdict(
    monkeypatch: pytest.MonkeyPatch, outcome: GateReport, code: int
) -> None:
    result = run(monkeypatch, outcome, "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout.splitlines()[-1])["passed"] is (code == 0)
    assert len(result.stdout.splitlines()) == 1
    assert "state withheld" in result.stderr


def test_a_folder_with_brackets_is_named_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Symptom: rich took them for markup: the name lost a part, or the gate ended with a traceback."""
    result = run(monkeypatch, report(model="tiny[/v1]"), "--full", "--output", str(tmp_path / "[bold]"))
    assert result.exit_code == 0, result.output
    assert "tiny[/v1] over cma" in result.stdout
    assert "[bold]/gate-full-cma-" in result.stdout.replace("\n", "")


def test_engines_that_do_not_start_are_told_in_json_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **settings: Any) -> GateReport:
        raise EngineError("prefill ended with exit code 1")

    monkeypatch.setattr(command, "bundled", lambda *_: "bundled")
    monkeypatch.setattr(command, "run_gate", fails)
    result = CliRunner().invoke(app, ["gate", "--json"])
    assert isinstance(result.exception, EngineError)
    assert json.loads(result.stdout) == {"passed": False, "failures": ["prefill ended with exit code 1"]}


def test_people_get_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, report(mutants=(tallied(12),)))
    assert "state withheld" in result.stdout
    assert "would go unnoticed" in result.stdout
    assert "Failed" in result.stdout


def test_a_full_run_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = run(
        monkeypatch, report(full=True), "--full", "--model", "gdn", "--output", str(tmp_path / "a" / "b")
    )
    assert result.exit_code == 0
    kept = json.loads((tmp_path / "a" / "b" / "gate-full-cma-async-2026-11-29.json").read_text())
    assert kept["passed"] is True
    assert kept["host"] == {"cores": 2}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill-url", "http://h:1"], "belong together"),
        (["--transport", "pigeon"], "pigeon"),
        (["--model", "nowhere"], "nowhere"),
        (["--prefill-url", "u", "--decode-url", "u", "--model", "gdn", "--model", "gdn"], "once"),
        (["--prefill-url", "u", "--decode-url", "u", "--transport", "nixl"], "--transport is for"),
    ],
)
def test_bad_arguments_are_named(monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    result = run(monkeypatch, report(), *arguments)
    assert result.exit_code != 0
    assert words in str(result.exception)


def test_the_block_size_comes_from_the_metrics_page() -> None:
    page = 'vllm:cache_config_info{block_size="640",enable_prefix_caching="True",engine="0"} 1.0'
    assert facts_of(Metrics(page), 1024, 4096) == Facts(640, True, 1024, 4096)
    assert not facts_of(Metrics(page.replace("True", "False")), 1024, 4096).caching
    for broken in ("", page.replace("640", "many"), page.replace("block_size", "size")):
        with pytest.raises(EngineError, match="cache_config_info"):
            facts_of(Metrics(broken), 1024, 4096)


def test_a_result_says_where_it_was_made() -> None:
    facts = host_facts()
    assert facts["cores"] >= 1
    assert facts["processor"]
    assert {"stateferry", "python"} <= facts["versions"].keys()
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert commit().removesuffix("+") == head.stdout.strip()
