"""`stateferry doctor` on two config files: what engines would say to each other, before any is started."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from command import Run, command_here

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm.offline import lay_out

from stateferry.cli import doctor as module
from stateferry.errors import LayoutMismatch
from stateferry.layout.fingerprint import compare
from stateferry.models import RECALL_GDN

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with patch.object(module, "examine_machine", list), command_here(capsys) as run:
        yield run


def written(path: Path, **settings: Any) -> Path:
    """A config file as `vllm serve --config` takes it."""
    lines = [f"{key.replace('_', '-')}: {json.dumps(value)}" for key, value in settings.items()]
    path.write_text(json.dumps(settings) if path.suffix == ".json" else "\n".join(lines))
    return path


def doctor(run: Run, prefill: Path, decode: Path, *more: str) -> Any:
    return run("doctor", "--prefill-config", str(prefill), "--decode-config", str(decode), *more)


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_two_files_that_fit(run: Run, suffix: str, tmp_path: Path) -> None:
    prefill = written(tmp_path / f"prefill{suffix}", model=str(RECALL_GDN), port=8100)
    decode = written(tmp_path / f"decode{suffix}", model=str(RECALL_GDN), tensor_parallel_size=2)
    if suffix == ".json":
        decode = written(decode, **{"model": str(RECALL_GDN), "tensor-parallel-size": 2})
    result = doctor(run, prefill, decode, "--json")
    assert result.code == 0, result.err
    engines = result.value["engines"]
    assert engines["can_exchange"] is True
    assert {length["state_bytes"] for length in engines["lengths"]} == {407040}
    assert [(p["producer_rank"], p["consumer_rank"]) for p in engines["pairs"]] == [(0, 0), (0, 1)]
    result = doctor(run, prefill, decode)
    for words in ("They can exchange", "not running", "1 → 2", "397.5 KiB", "No problem found"):
        assert words in result.out


def test_two_files_that_do_not_fit_are_refused_in_the_words_of_the_hand_shake(
    run: Run, tmp_path: Path
) -> None:
    flags = ["--no-enable-prefix-caching"]
    prefill = written(tmp_path / "prefill.yaml", model=str(RECALL_GDN))
    decode = written(tmp_path / "decode.yaml", model=str(RECALL_GDN), enable_prefix_caching=False)
    theirs = lay_out(["--model", str(RECALL_GDN)]).layouts[0]
    ours = lay_out(["--model", str(RECALL_GDN), *flags]).layouts[0]
    with pytest.raises(LayoutMismatch) as refusal:
        compare(ours, theirs)
    result = doctor(run, prefill, decode, "--json")
    assert result.code == 1
    assert result.value["problems"] == [str(refusal.value)]
    assert "mamba_cache_mode" in str(refusal.value)
    assert result.value["engines"]["can_exchange"] is False


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": str(RECALL_GDN), "no_such_setting": 1}, "--no-such-setting"),
        ({"model": str(RECALL_GDN), "tensor_parallel_size": 3}, "divisible"),
        ({"model": str(RECALL_GDN), "pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ],
)
def test_an_engine_that_would_not_start_is_a_problem(
    run: Run, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    prefill = written(tmp_path / "prefill.yaml", model=str(RECALL_GDN))
    result = doctor(run, prefill, written(tmp_path / "decode.yaml", **settings), "--json")
    assert result.code == 1
    (problem,) = result.value["problems"]
    assert words in problem


def test_two_files_of_one_role_are_told_so(run: Run, tmp_path: Path) -> None:
    transfer = {"kv_connector": "StateFerryConnector", "kv_role": "kv_consumer"}
    files = [
        written(tmp_path / f"{side}.json", **{"model": str(RECALL_GDN), "kv-transfer-config": transfer})
        for side in ("prefill", "decode")
    ]
    result = doctor(run, *files, "--json")
    assert result.code == 1
    (problem,) = result.value["problems"]
    assert problem.startswith("both engines have kv_role 'kv_consumer'")


def test_a_file_that_is_not_there_is_a_problem(run: Run, tmp_path: Path) -> None:
    prefill = written(tmp_path / "prefill.yaml", model=str(RECALL_GDN))
    result = doctor(run, prefill, tmp_path / "decode.yaml", "--json")
    assert result.code == 1
    assert "decode.yaml does not exist" in result.value["problems"][0]
