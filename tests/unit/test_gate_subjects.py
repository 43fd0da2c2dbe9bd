"""Which models the gate judges, and what it knows of them."""

import json
from pathlib import Path

import pytest

from stateferry.errors import ConfigError
from stateferry.gate import bundled, in_folder, seeded, subjects
from stateferry.gate.damages import ANY_FEATURE
from stateferry.models import FAMILIES, RECALL_GDN, recall_prompt


def test_the_bundled_model_is_asked_stories(tmp_path: Path) -> None:
    subject = bundled()
    assert subject.write(tmp_path) == RECALL_GDN
    assert subject.source(3, 200) == recall_prompt(3, 200).token_ids
    assert subject.lacking == frozenset()
    assert subject.caching
    assert subject.sizes is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_seeded_family_is_known_by_its_size_and_features(family: str) -> None:
    subject = seeded(family)
    assert subject.sizes is not None
    assert subject.lacking < ANY_FEATURE
    assert len(subject.source(1, 50)) == 50


def test_a_seeded_model_is_written_for_the_run(tmp_path: Path) -> None:
    folder = seeded("short_conv").write(tmp_path)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "lfm2"
    assert (folder / "model.safetensors").exists()


def test_what_vllm_has_no_cpu_kernels_for_is_refused_before_an_engine_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "_on_cpu", lambda: True)
    with pytest.raises(ConfigError, match="no kernels for 'kda'"):
        seeded("kda").write(tmp_path)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(subjects, "_on_cpu", lambda: False)
    assert (seeded("kda").write(tmp_path) / "model.safetensors").exists()


@pytest.mark.parametrize("on_cpu", [True, False])
def test_mamba_2_runs_without_prefix_caching_on_cpu_only(
    on_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subjects, "_on_cpu", lambda: on_cpu)
    assert seeded("mamba2").caching is not on_cpu
    assert seeded("falcon_h1").caching is not on_cpu
    assert seeded("short_conv").caching


def test_a_folder_of_an_unknown_model_may_lack_anything_and_has_no_known_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", "vocab_size": 99}))
    subject = in_folder(tmp_path)
    assert subject.name == tmp_path.name
    assert subject.lacking == ANY_FEATURE
    assert subject.sizes is None
    assert subject.write(Path("anywhere")) == tmp_path
    with pytest.raises(ConfigError):
        in_folder(tmp_path / "nowhere")
