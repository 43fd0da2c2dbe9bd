"""`stateferry inspect` as a person meets it; in this process, because importing vLLM takes a while."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest

from command import Result, Run, command_here

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm.offline import lay_out

from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import survey
from stateferry.models import RECALL_GDN

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with command_here(capsys) as run:
        yield run


def inspect(run: Run, *arguments: str) -> Result:
    return run("inspect", str(RECALL_GDN), *arguments)


def test_people_see_groups_states_pages_and_moves(run: Run) -> None:
    result = inspect(run, "--tp", "1", "--tp", "2", "--tokens", "1024")
    assert result.code == 0
    for words in (
        "Qwen3NextForCausalLM",
        "model.layers.0.linear_attn",
        "model.layers.3.self_attn.attn",
        "Q 256 | K 256 | V 256",
        "3 x 768",
        "2 x 128 x 128",
        "One block of groups 0, 1, 2 (state)",
        "matrix        131,072 bytes   50.0 %",
        "1 → 2",
        "0→0, 0→1",
        "397.5 KiB",
        "2.0 MiB",
        "1, 1, 1, 8",
    ):
        assert words in result.out, words


def test_json_is_one_line_and_says_what_the_layouts_say(run: Run) -> None:
    result = inspect(run, "--tp", "2", "--tp", "1", "--tokens", "1024", "--tokens", "100", "--json")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    assert "One block of" in result.err
    value = result.value
    assert value["architecture"] == "Qwen3NextForCausalLM"
    layouts = {size: lay_out(["--model", str(RECALL_GDN)], size).layouts for size in (1, 2)}
    assert [engine["tp"] for engine in value["engines"]] == [1, 2]
    for engine in value["engines"]:
        read = msgspec.convert(engine["layouts"], tuple[CacheLayout, ...])
        assert read == layouts[engine["tp"]]
    assert len(value["handoffs"]) == 4
    for handoff in value["handoffs"]:
        found = survey(layouts[handoff["producer_tp"]], layouts[handoff["consumer_tp"]], [100, 1024])
        assert handoff["refused"] is None
        assert [length["prompt_tokens"] for length in handoff["lengths"]] == [100, 1024]
        assert handoff["lengths"] == json.loads(msgspec.json.encode(found.lengths))
        assert handoff["pairs"] == json.loads(msgspec.json.encode(found.pairs))


def test_other_options_go_to_vllm(run: Run) -> None:
    plain = inspect(run, "--json").value
    for more in (["--max-model-len", "512"], ["--", "--max-model-len=512"]):
        value = inspect(run, "--json", "--block-size", "256", *more).value
        assert value["max_model_len"] == 512 != plain["max_model_len"]
        groups = value["engines"][0]["layouts"][0]["groups"]
        assert {group["block_tokens"] for group in groups} == {256}
        lengths = [length["prompt_tokens"] for length in value["handoffs"][0]["lengths"]]
        assert lengths == [128]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["inspect", str(RECALL_GDN), "--tokens", "100000"], "32768"),
        (["inspect", str(RECALL_GDN), "--tp", "3"], "divisible"),
        (["inspect", str(RECALL_GDN), "--no-such-flag", "3"], "--no-such-flag"),
        (["inspect", "--max-model-len", "512", str(RECALL_GDN)], "MODEL"),
        (["inspect", "no/such/folder"], "config.json"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence_and_an_exit_code(
    run: Run, arguments: list[str], words: str
) -> None:
    result = run(*arguments)
    assert result.code == 2
    assert result.out == ""
    assert words in result.err
    assert "Traceback" not in result.err
    assert len([line for line in result.err.splitlines() if line.startswith("stateferry: ")]) == 1


def test_an_unsupported_model_is_one_sentence_and_an_exit_code(run: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["NoSuchModel"]})
    )
    result = run("inspect", str(tmp_path))
    assert result.code == 2
    assert "NoSuchModel" in result.err
    assert "Traceback" not in result.err


def test_sizes_that_cannot_hand_off_to_each_other_are_said_so(run: Run, tmp_path: Path) -> None:
    """Pages whose inside is not known go between equal sizes only."""
    from stateferry.vllm import kv_tables

    with patch.object(kv_tables, "HEAD_PACKED", frozenset()):
        value = inspect(run, "--tp", "1", "--tp", "2", "--json").value
    refused = {(h["producer_tp"], h["consumer_tp"]): h["refused"] for h in value["handoffs"]}
    assert refused[1, 1] is None
    assert refused[2, 2] is None
    assert "--tensor-parallel-size" in refused[1, 2]
    assert "--tensor-parallel-size" in refused[2, 1]
