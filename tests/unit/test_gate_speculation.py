"""The gate over engines that speculate: what they are told, how much moves, and what it takes to pass."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.test_gate_report import report
from typer.testing import CliRunner

from stateferry.cli.app import app
from stateferry.errors import ConfigError
from stateferry.gate import Drafts, Speculation, bundled, in_folder, parse_speculation, seeded, subjects
from stateferry.gate.sizes import expected_sizes
from stateferry.gate.speculation import drafts_of
from stateferry.models import RECALL_GDN
from stateferry.models.drafting import recall_mtp_config, with_experts, write_recall_mtp
from stateferry.models.random_checkpoint import random_config
from stateferry.stack import Metrics

MTP, NGRAM = Speculation("mtp", 2), Speculation("ngram", 3)


def test_what_is_asked_for_is_what_vllm_is_told() -> None:
    assert parse_speculation("mtp") == MTP
    assert parse_speculation("ngram:3") == NGRAM
    option, value = NGRAM.arguments
    assert option == "--speculative-config"
    assert json.loads(value)["method"] == "ngram"
    assert json.loads(value)["num_speculative_tokens"] == 3
    assert str(MTP) == "mtp, 2 tokens"


@pytest.mark.parametrize("text", ["", "eagle", "mtp:0", "mtp:17", "mtp:two", "mtp:-1", ":2"])
def test_other_ways_to_speculate_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--speculate .*mtp or ngram"):
        parse_speculation(text)


@pytest.mark.parametrize(
    ("config", "speculation", "state_bytes", "token_bytes"),
    [
        # Seen on engines: three layers of (3 + drafts) x 768 numbers of a window, and 128 x 256 of a matrix.
        (recall_mtp_config(), MTP, 416_256, 4096),
        (recall_mtp_config(), NGRAM, 420_864, 2048),
        (recall_mtp_config(), None, 407_040, 2048),
    ],
)
def test_sizes_of_engines_that_speculate(
    config: dict[str, Any], speculation: Speculation | None, state_bytes: int, token_bytes: int
) -> None:
    sizes = expected_sizes(config, speculation)
    assert sizes is not None
    assert state_bytes in sizes.state_bytes
    assert sizes.token_bytes == token_bytes


@pytest.mark.parametrize("family", ["gdn", "mamba2", "falcon_h1", "short_conv", "kda"])
def test_every_kind_of_window_is_wider_by_the_drafts(family: str) -> None:
    config = random_config(family)
    plain, wide = expected_sizes(config), expected_sizes(config, NGRAM)
    assert plain is not None
    assert wide is not None
    assert plain.token_bytes == wide.token_bytes
    pairs = zip(sorted(plain.state_bytes), sorted(wide.state_bytes), strict=True)
    assert all(more > less for less, more in pairs)


def test_the_bundled_model_drafts_with_the_layer_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for on_cpu in (True, False):
        monkeypatch.setattr(subjects, "_on_cpu", lambda on_cpu=on_cpu: on_cpu)
        subject = bundled(MTP)
        assert subject.speculation == MTP
        assert subject.caching is not on_cpu
        assert subject.chunked is not on_cpu
    assert bundled(NGRAM).write(tmp_path) == RECALL_GDN
    assert bundled().caching
    assert bundled().chunked
    folder = bundled(MTP).write(tmp_path)
    assert json.loads((folder / "config.json").read_text()) == recall_mtp_config()
    assert in_folder(folder, MTP).sizes == bundled(MTP).sizes
    with pytest.raises(ConfigError, match="no draft layer"):
        seeded("gdn", MTP)


def test_what_vllm_would_end_on_cpu_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects, "_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match=r"--speculate ngram.*mtp"):
        subjects.refuse_to_start(bundled(NGRAM))
    for fine in (bundled(), bundled(MTP)):
        subjects.refuse_to_start(fine)
    monkeypatch.setattr(subjects, "_on_cpu", lambda: False)
    subjects.refuse_to_start(bundled(NGRAM))


def test_engines_that_read_ahead_do_not_speculate() -> None:
    result = CliRunner().invoke(app, ["gate", "--speculate", "mtp", "--load-mode", "sync"])
    assert isinstance(result.exception, ConfigError)
    assert "--load-mode async" in str(result.exception)


def test_a_page_of_metrics_says_how_many_drafts_were_right() -> None:
    page = Metrics(
        'vllm:spec_decode_num_draft_tokens_total{engine="0"} 30.0\n'
        'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 12.0\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9.0\n'
    )
    assert drafts_of(page) == Drafts(30, 12)
    assert drafts_of(page).since(Drafts(10, 2)) == Drafts(20, 10)


@pytest.mark.parametrize(("proposed", "accepted"), [(0, 0), (20, 0), (20, 20)])
def test_drafts_that_are_all_right_or_all_wrong_try_nothing(proposed: int, accepted: int) -> None:
    tried = report(speculation="mtp, 2 tokens", drafts={"prefill": Drafts(20, 9), "decode": Drafts(20, 9)})
    assert tried.passed
    assert json.loads(json.dumps(tried.to_json()))["models"][0]["drafts"]["decode"]["accepted"] == 9
    untried = report(drafts={"prefill": Drafts(20, 9), "decode": Drafts(proposed, accepted)})
    assert not untried.passed
    assert any(f"{accepted} of {proposed} drafts of the decode" in text for text in untried.failures())


def test_the_model_with_a_draft_layer_answers_as_without(tmp_path: Path) -> None:
    """Its first layer has experts there, as vLLM wants it."""
    import torch
    from safetensors.torch import load_file

    from stateferry.models import recall_prompt
    from stateferry.models.torch_model import TinyQwen3Next

    def logits(folder: Path, damage: float = 1.0) -> torch.Tensor:
        model = TinyQwen3Next(json.loads((folder / "config.json").read_text()))
        stored = load_file(folder / "model.safetensors")
        tensors = {name: tensor.float() for name, tensor in stored.items() if not name.startswith("mtp.")}
        name = "model.layers.0.mlp.shared_expert.down_proj.weight"
        if name in tensors:
            tensors[name] *= damage
        model.load_state_dict(tensors)
        with torch.no_grad():
            hidden, _ = model(torch.tensor([recall_prompt(1, 100).token_ids]))
            return model.logits(hidden)

    folder = write_recall_mtp(tmp_path)
    right = logits(RECALL_GDN)
    torch.testing.assert_close(logits(folder), right, rtol=1e-3, atol=1e-3)
    assert (logits(folder, damage=0.5) - right).abs().max() > 0.1, "half of the first layer went unnoticed"


def test_experts_leave_other_layers_alone() -> None:
    import torch

    tensors = {f"a.mlp.{name}_proj.weight": torch.ones(4, 4) for name in ("gate", "up", "down")}
    tensors["b.mlp.gate_proj.weight"] = torch.zeros(2)
    found = with_experts(tensors, "a.mlp", {"num_experts": 2})
    assert found["b.mlp.gate_proj.weight"] is tensors["b.mlp.gate_proj.weight"]
    assert found["a.mlp.experts.1.down_proj.weight"].shape == (4, 2)
    assert "a.mlp.gate_proj.weight" not in found
