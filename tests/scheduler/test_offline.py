"""`lay_out` against vLLM's own classes and allocator, without building any layer, and what it refuses."""

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec
    from vllm.v1.worker.utils import allocate_kv_cache

    from stateferry.vllm import offline, offline_config, offline_ranks
    from stateferry.vllm.offline import OfflineEngine, lay_out

from stateferry.errors import ConfigError, LayoutError
from stateferry.ids import EngineId
from stateferry.layout.fingerprint import compare
from stateferry.layout.shard import check_layout
from stateferry.layout.spec import CacheLayout, GroupKind
from stateferry.models import CPU_FAMILIES, RECALL_GDN
from stateferry.models.drafting import recall_mtp_config
from stateferry.models.random_checkpoint import random_config
from stateferry.vllm.kv_cache import describe

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]

SIZES = (1, 2)
MODELS = ("recall_gdn", *CPU_FAMILIES)
RECURRENT = {"linear_attention", "conv"}
"""What the configs call their recurrent layers."""


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ, {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}):
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder per model with nothing but its config."""
    found = {"recall_gdn": RECALL_GDN}
    for family in CPU_FAMILIES:
        found[family] = tmp_path_factory.mktemp("models") / family
        found[family].mkdir()
        (found[family] / "config.json").write_text(json.dumps(random_config(family)))
    return found


def arguments(folder: Path, *more: str) -> list[str]:
    return ["--model", str(folder), *more]


def layer_kinds(config: dict[str, Any]) -> list[set[str]]:
    """What each layer of the model keeps, from its config.json alone."""
    if config["model_type"] == "falcon_h1":
        return [{"state", "attention"}] * config["num_hidden_layers"]
    return [{"state" if kind in RECURRENT else "attention"} for kind in config["layer_types"]]


def layer_number(name: str, layers: int) -> int:
    """Falcon-H1 numbers a layer's mixer after all layers' attention."""
    found = re.search(r"\.(\d+)\.", name)
    assert found, name
    return int(found[1]) % layers


def check_against_vllm(folder: Path, size: int) -> OfflineEngine:
    """Shapes, dtypes and layers, from the model class's own class methods and from config.json."""
    engine = lay_out(arguments(folder), size)
    with offline_config.kept_environment():
        config = offline_config.make_config(arguments(folder), size)
        model, _ = ModelRegistry.resolve_model_cls(config.model_config.architectures, config.model_config)
        shapes = tuple(tuple(shape) for shape in model.get_mamba_state_shape_from_config(config))
        dtypes = model.get_mamba_state_dtype_from_config(config)
        dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        kv_heads = config.model_config.get_num_kv_heads(config.parallel_config)
        head_size = config.model_config.get_head_size()
    assert [layout.tp_rank for layout in engine.layouts] == list(range(size))
    kinds = layer_kinds(json.loads((folder / "config.json").read_text()))
    found: list[set[str]] = [set() for _ in kinds]
    for group in engine.layouts[0].groups:
        for layer in group.layers:
            found[layer_number(layer.name, len(kinds))].add(group.kind.value)
            if group.kind is GroupKind.STATE:
                assert engine.shapes[layer.name] == shapes
                assert [t.dtype for t in layer.tensors] == [str(d).removeprefix("torch.") for d in dtypes]
                sizes = [torch.Size(s).numel() * d.itemsize for s, d in zip(shapes, dtypes, strict=True)]
                assert [t.block_bytes for t in layer.tensors] == sizes
            else:
                assert engine.shapes[layer.name] == ((1, kv_heads, group.block_tokens, 2 * head_size),)
                (tensor,) = layer.tensors
                assert tensor.block_bytes == kv_heads * group.block_tokens * 2 * head_size * 2
    assert found == kinds
    for layout in engine.layouts:
        check_layout(layout)
        compare(layout, engine.layouts[0])
    return engine


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_layers_states_and_heads_are_those_of_vllms_classes(
    model: str, size: int, folders: dict[str, Path]
) -> None:
    check_against_vllm(folders[model], size)


def test_a_draft_layer_lies_in_the_group_of_the_models_attention(tmp_path: Path) -> None:
    """As vLLM's own drafter builds it when an engine starts (`stateferry gate --speculate mtp` runs one)."""
    (tmp_path / "config.json").write_text(json.dumps(recall_mtp_config()))
    told = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
    plain, drafting = (
        lay_out(more).layouts[0].groups for more in (arguments(tmp_path), arguments(tmp_path, *told))
    )
    (attention,) = (group for group in drafting if group.kind is GroupKind.ATTENTION)
    assert [layer.name for layer in attention.layers] == [
        "model.layers.3.self_attn.attn",
        "mtp.layers.0.self_attn.attn",
    ]
    assert {group.scratch_slots for group in drafting if group.kind is GroupKind.STATE} == {2}
    assert {group.scratch_slots for group in plain} == {0}
    assert not any("mtp" in layer.name for group in plain for layer in group.layers)


def test_ranks_of_another_size_are_noticed(folders: dict[str, Path]) -> None:
    """By vLLM itself, whose config and layers then do not agree."""
    real = offline_ranks._group
    with (
        patch.object(offline_ranks, "_group", lambda size: real(1)),
        pytest.raises(ConfigError, match="AssertionError"),
    ):
        check_against_vllm(folders["recall_gdn"], 2)


def test_a_state_of_another_type_is_noticed(folders: dict[str, Path]) -> None:
    real = offline.get_kv_cache_spec

    def narrower(config: Any) -> Any:
        return {
            name: dataclasses.replace(spec, dtypes=(spec.dtypes[0], torch.bfloat16))
            if isinstance(spec, MambaSpec)
            else spec
            for name, spec in real(config).items()
        }

    with patch.object(offline, "get_kv_cache_spec", narrower), pytest.raises(AssertionError):
        check_against_vllm(folders["recall_gdn"], 2)


def test_a_layer_that_was_left_out_is_noticed(folders: dict[str, Path]) -> None:
    real = offline.get_kv_cache_spec

    def one_less(config: Any) -> Any:
        specs = real(config)
        specs.popitem()
        return specs

    with patch.object(offline, "get_kv_cache_spec", one_less), pytest.raises(AssertionError):
        check_against_vllm(folders["recall_gdn"], 1)


def test_the_layout_is_that_of_memory_that_vllm_allocates(folders: dict[str, Path]) -> None:
    """The same cache config with real tensors in place of stand-ins, described as a worker does it."""
    seen: dict[str, Any] = {}
    real = offline._cache

    def spy(config: Any, num_blocks: int) -> Any:
        cache, tensors = real(config, num_blocks)
        seen.update(config=config, cache=cache)
        return cache, tensors

    for model in MODELS:
        with patch.object(offline, "_cache", spy):
            (layout,) = lay_out(arguments(folders[model]), 1, num_blocks=3).layouts
        config = seen["config"]
        kind = config.cache_config.get_resolved_kv_cache_layout()
        tensors = allocate_kv_cache(seen["cache"], torch.device("cpu"), kind)
        ours, memory = describe(
            seen["cache"],
            config,
            tensors,
            engine_id=layout.engine_id,
            epoch=layout.epoch,
            tp_rank=0,
            tp_size=1,
        )
        assert layout == ours
        assert [region.size_bytes for region in memory] == list(layout.region_sizes_bytes)


@pytest.mark.parametrize(
    "flag", [["--block-size", "256"], ["--no-enable-prefix-caching"], ["--max-model-len", "512"]]
)
def test_what_flags_change_is_changed(flag: list[str], folders: dict[str, Path]) -> None:
    plain = lay_out(arguments(folders["recall_gdn"])).layouts[0]
    changed = lay_out(arguments(folders["recall_gdn"], "--no-enable-prefix-caching", *flag)).layouts[0]
    assert plain.facts["mamba_cache_mode"] == "align"
    assert changed.facts["mamba_cache_mode"] == "none"
    state, attention = changed.groups[0], changed.groups[-1]
    assert state.block_tokens == (512 if "512" in flag else 32768)
    assert attention.block_tokens == (256 if "256" in flag else 128)
    with pytest.raises(LayoutError, match="mamba_cache_mode"):
        compare(plain, changed)


def test_more_blocks_change_nothing_but_places(folders: dict[str, Path]) -> None:
    few, many = (lay_out(arguments(folders["falcon_h1"]), 1, n).layouts[0] for n in (4, 1 << 20))
    assert few != many
    assert without_places(few) == without_places(many)


def without_places(layout: CacheLayout) -> CacheLayout:
    """The layout without what follows from the number of blocks."""
    groups = tuple(
        msgspec.structs.replace(
            group,
            layers=tuple(
                msgspec.structs.replace(
                    layer,
                    tensors=tuple(
                        msgspec.structs.replace(t, offset_bytes=0, block_count=0) for t in layer.tensors
                    ),
                )
                for layer in group.layers
            ),
        )
        for group in layout.groups
    )
    return msgspec.structs.replace(layout, groups=groups, region_sizes_bytes=())


def test_nothing_stays_behind(folders: dict[str, Path]) -> None:
    from vllm.distributed import parallel_state

    before = dict(os.environ)
    lay_out(arguments(folders["recall_gdn"]), 2)
    assert dict(os.environ) == before
    assert parallel_state._TP is None
    assert parallel_state._WORLD is None


def written(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("config", "more", "error", "words"),
    [
        ({"model_type": "no-such-type"}, [], ConfigError, "no-such-type"),
        ({}, [], ConfigError, "model_type"),
        (LLAMA | {"architectures": ["NoSuchForCausalLM"]}, [], ConfigError, "NoSuchForCausalLM"),
        (random_config("gdn"), ["--no-such-flag"], ConfigError, "--no-such-flag"),
        (random_config("gdn"), ["--tensor-parallel-size", "3"], ConfigError, "3"),
        (random_config("gdn"), ["--pipeline-parallel-size", "2"], LayoutError, "--pipeline-parallel-size"),
    ],
    ids=["type", "no type", "architecture", "flag", "heads", "pipeline"],
)
def test_what_cannot_be_laid_out_is_refused_in_one_sentence(
    config: dict[str, Any], more: list[str], error: type[Exception], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        lay_out(arguments(written(tmp_path / "model", **config), *more))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_layers_that_cannot_be_built_are_refused(folders: dict[str, Path]) -> None:
    def build(config: Any) -> None:
        raise RuntimeError("Cannot copy out of meta tensor. Nothing more is said.")

    with (
        patch.object(offline, "initialize_model", build),
        pytest.raises(
            LayoutError, match=r"build the layers of Qwen3NextForCausalLM here: Cannot copy out of meta"
        ),
    ):
        lay_out(arguments(folders["recall_gdn"]))


def test_settings_that_vllm_cannot_bring_together_are_no_fault_of_the_layers(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "BLHNC")  # CPU attention has heads outside of tokens
    with pytest.raises(ConfigError, match=r"would not start like this: VLLM_KV_CACHE_LAYOUT=BLHNC"):
        lay_out(arguments(folders["recall_gdn"]))


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_config_file_is_read_as_vllm_reads_it(
    suffix: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / f"decode{suffix}"
    settings = {
        "model": str(folders["recall_gdn"]),
        "port": 8200,
        "tensor-parallel-size": 2,
        "enable-prefix-caching": False,
        "max-model-len": 512,
        "kv-transfer-config": {"kv_connector": "StateFerryConnector", "kv_role": "kv_consumer"},
    }
    path.write_text(json.dumps(settings))  # JSON is YAML
    with offline_config.arguments_of_file(path) as found:
        engine = lay_out(found)
    flags = ["--no-enable-prefix-caching", "--max-model-len", "512"]
    assert engine.layouts == lay_out(arguments(folders["recall_gdn"], *flags), 2).layouts


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gone.yaml", None),
        ("gone.json", None),
        ("list.json", "[1]"),
        ("bad.json", "{"),
        ("notes.txt", "port"),
    ],
)
def test_a_file_that_holds_no_settings_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with (
        pytest.raises(ConfigError, match=name.replace(".", r"\.")),
        offline_config.arguments_of_file(path),
    ):
        pass


def test_long_messages_are_cut_to_their_first_sentences() -> None:
    short = offline_config.short_reason
    framed = "1 validation error for ModelConfig\n  Value error, No. Not this. [type=value_error]\n    For"
    assert short(ValueError(framed)) == "No. Not this"
    assert short(ValueError("One. " + "Two " * 100)) == "One"
    assert short(ValueError("x" * 1000)) == "x" * offline_config.MAX_REASON + " …"
    assert short(ValueError()) == "ValueError"
    assert (
        short(ValueError("In field 'heads':\n    TypeError: a number\nMore"))
        == "In field 'heads': TypeError: a number"
    )


def test_the_engines_name_and_epoch_are_no_real_ones(folders: dict[str, Path]) -> None:
    (layout,) = lay_out(arguments(folders["short_conv"])).layouts
    assert layout.engine_id == EngineId("offline")


def test_attention_groups_are_split_by_backend_and_spec(folders: dict[str, Path]) -> None:
    """What kernel block sizes are chosen by: every layer of a group, once."""
    with offline_config.kept_environment():
        config = offline_config.make_config(arguments(folders["falcon_h1"]))
        cache, _ = offline._cache(config, 4)
    for number, group in enumerate(cache.kv_cache_groups):
        found = offline._attention_groups(config, cache, number)
        assert sorted(n for one in found for n in one.layer_names) == sorted(group.layer_names)
        assert all(isinstance(one.kv_cache_spec, FullAttentionSpec | MambaSpec) for one in found)
    assert all(isinstance(group, KVCacheGroupSpec) for group in cache.kv_cache_groups)
