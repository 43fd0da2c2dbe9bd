"""The tiny models: prompts, the bundled checkpoint, and random ones. No vLLM here."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stateferry.models import (
    CPU_FAMILIES,
    FAMILIES,
    RECALL_GDN,
    Question,
    recall_prompt,
    write_random_checkpoint,
)
from stateferry.models.gdn import gdn_config, gdn_tensors
from stateferry.models.prompts import MIN_TOKENS
from stateferry.models.tokenizer import write_byte_tokenizer, write_numbered_tokenizer
from stateferry.models.words import EOS_ID, FILLER, PAD_ID, PLACES, THINGS, TOKEN_IDS, VOCABULARY

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def header(folder: Path) -> dict[str, dict[str, Any]]:
    """What a safetensors file says it holds, read without any library."""
    with (folder / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        entries: dict[str, dict[str, Any]] = json.loads(file.read(size))
    entries.pop("__metadata__", None)
    return entries


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def facts(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Who has what, and what is where, read from a prompt's text alone."""
    has, where = {}, {}
    for sentence in text.split(" . "):
        words = sentence.split()
        if words[2:4] == ["has", "the"] and len(words) == 5:
            has[" ".join(words[:2])] = words[4]
        elif words[0] == "the" and words[2:4] == ["is", "in"] and len(words) == 5:
            where[words[1]] = words[4]
    return has, where


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch's threads wait for one another badly when other tests use the processor."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_importing_the_package_loads_neither_torch_nor_vllm() -> None:
    check = (
        "import sys, stateferry.models as m; m.recall_prompt(1, 60);"
        "sys.exit(any(n in sys.modules for n in ('torch', 'vllm', 'transformers', 'tokenizers')))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=30).returncode == 0


@pytest.mark.parametrize("tokens", [*range(MIN_TOKENS, 100), 639, 640, 641, 1200])
def test_a_prompt_has_the_length_asked_for_and_one_token_a_word(tokens: int) -> None:
    prompt = recall_prompt(3, tokens)
    assert prompt.num_tokens == tokens == len(prompt.text.split(" "))
    assert prompt.token_ids == tuple(TOKEN_IDS[word] for word in prompt.text.split(" "))


def test_a_prompt_depends_on_its_arguments_alone() -> None:
    assert recall_prompt(5, 200) == recall_prompt(5, 200)
    assert recall_prompt(5, 200) != recall_prompt(6, 200)
    assert recall_prompt(5, 200, Question.WHAT_PERSON) != recall_prompt(5, 200)


def test_a_prompt_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="18"):
        recall_prompt(0, MIN_TOKENS - 1)


@pytest.mark.parametrize("seed", range(20))
def test_the_answer_follows_from_the_text(seed: int) -> None:
    where_person = recall_prompt(seed, 300)
    has, where = facts(where_person.text)
    assert where_person.answer == where[has[" ".join(where_person.text.split()[-2:])]]
    assert where_person.answer_id == TOKEN_IDS[where_person.answer]

    what_person = recall_prompt(seed, 300, Question.WHAT_PERSON)
    assert what_person.answer == facts(what_person.text)[0][" ".join(what_person.text.split()[-2:])]

    where_thing = recall_prompt(seed, 300, Question.WHERE_THING)
    assert where_thing.answer == facts(where_thing.text)[1][where_thing.text.split()[-1]]


def test_the_follow_up_asks_everybody_once_and_ends_with_the_first_answer() -> None:
    prompt = recall_prompt(2, 200)
    has, where = facts(prompt.text)
    asked = [line.split() for line in prompt.follow_up.removeprefix(". ").removesuffix(" .").split(" . ")]
    assert {" ".join(words[2:4]): words[4] for words in asked} == {who: where[has[who]] for who in has}
    assert asked[-1][-1] == prompt.answer


def test_no_name_alone_tells_who_is_meant() -> None:
    people = [who.split() for who in facts(recall_prompt(1, 400).text)[0]]
    assert len({first for first, _ in people}) < len(people)
    assert len({last for _, last in people}) < len(people)


def test_filler_names_no_thing_and_no_place() -> None:
    words = {word for group in FILLER.values() for sentence in group for word in sentence}
    assert not words & {*THINGS, *PLACES}
    assert all(len(sentence) == length for length, group in FILLER.items() for sentence in group)


def test_no_word_is_in_the_vocabulary_twice() -> None:
    assert len(set(VOCABULARY)) == len(VOCABULARY) == len(TOKEN_IDS)


def test_the_bundled_checkpoint_is_complete_and_small() -> None:
    names = {path.name for path in RECALL_GDN.iterdir()}
    assert FILES | {"README.md", "training_report.json"} <= names
    assert sum(path.stat().st_size for path in RECALL_GDN.iterdir()) < 16 << 20


def test_the_bundled_checkpoint_has_the_tensors_of_its_config() -> None:
    config = config_of(RECALL_GDN)
    assert config == gdn_config(vocab_size=len(VOCABULARY), eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    stored = {name: tuple(entry["shape"]) for name, entry in header(RECALL_GDN).items()}
    assert stored == {spec.name: spec.shape for spec in gdn_tensors(config)}
    assert {entry["dtype"] for entry in header(RECALL_GDN).values()} == {"BF16"}


def test_the_bundled_checkpoint_needs_both_memories() -> None:
    from stateferry.models.damage import DAMAGES, refusals

    report = json.loads((RECALL_GDN / "training_report.json").read_text())
    assert report["accuracy"].keys() == DAMAGES.keys()
    assert refusals(report["accuracy"]) == []
    assert refusals({"clean": 0.98, "state": 0.21, "kv": 0.86}) != []


def test_the_word_tokenizer_agrees_with_the_prompts() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(RECALL_GDN / "tokenizer.json"))
    prompt = recall_prompt(4, 250)
    assert tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids
    assert tokenizer.decode(list(prompt.token_ids)) == prompt.text
    assert tokenizer.token_to_id("<|end|>") == EOS_ID


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("damage", ["clean", "state", "delta", "kv"])
def test_the_bundled_model_answers_only_with_all_its_memory(damage: str) -> None:
    import torch
    from safetensors.torch import load_file

    from stateferry.models.damage import damaged_logits
    from stateferry.models.torch_model import TinyQwen3Next

    model = TinyQwen3Next(config_of(RECALL_GDN))
    model.load_state_dict({k: v.float() for k, v in load_file(RECALL_GDN / "model.safetensors").items()})
    prompts = [recall_prompt(seed, 80) for seed in range(16)]
    logits = damaged_logits(model, torch.tensor([prompt.token_ids for prompt in prompts]))[damage]
    answers = torch.tensor([prompt.answer_id for prompt in prompts])
    right = int((logits.argmax(-1) == answers).sum())
    assert right >= 15 if damage == "clean" else right <= 3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_checkpoint_is_complete_small_and_repeatable(family: str, tmp_path: Path) -> None:
    one = write_random_checkpoint(family, tmp_path / "one", seed=7)
    same = write_random_checkpoint(family, tmp_path / "same", seed=7)
    other = write_random_checkpoint(family, tmp_path / "other", seed=8)
    assert one == tmp_path / "one"
    assert {path.name for path in one.iterdir()} == FILES
    assert sum(path.stat().st_size for path in one.iterdir()) < 20_000_000
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, same, other)]
    assert weights[0] == weights[1] != weights[2]

    config = config_of(one)
    specs = {spec.name: spec.shape for spec in FAMILIES[family].tensors(config)}
    assert {name: tuple(entry["shape"]) for name, entry in header(one).items()} == specs
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0


@pytest.mark.parametrize("family", CPU_FAMILIES)  # transformers renames Kimi-Linear's as it loads them
def test_transformers_would_build_the_same_tensors(family: str) -> None:
    """So the names and shapes that we write are those of the architecture."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from stateferry.models.random_checkpoint import random_config

    values = random_config(family)
    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    ours = {spec.name: spec.shape for spec in FAMILIES[family].tensors(values)}
    fused = {name for name in theirs if ".mlp.experts." in name}  # transformers stacks the experts
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unstacked = {name: shape for name, shape in ours.items() if ".mlp.experts." not in name}
    assert unstacked == {name: shape for name, shape in theirs.items() if name not in fused | tied}


def test_an_unknown_family_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"jamba.*gdn"):
        write_random_checkpoint("jamba", tmp_path)


def test_random_weights_are_of_ordinary_size() -> None:
    from stateferry.models.random_checkpoint import random_config
    from stateferry.models.tensors import Init, materialise

    for family in FAMILIES:
        for spec in FAMILIES[family].tensors(random_config(family)):
            values = materialise(spec, 0)
            assert values.isfinite().all(), spec.name
            if spec.init is Init.NORMAL and values.numel() > 1000:
                assert 0.01 < float(values.std()) < 0.6, spec.name


@pytest.mark.usefixtures("one_thread")
def test_the_chunked_delta_rule_is_the_recurrence() -> None:
    import torch

    from stateferry.models.torch_gdn import delta_rule

    torch.manual_seed(0)
    q, k, v = (torch.nn.functional.normalize(torch.randn(2, 3, 150, 16), dim=-1) for _ in range(3))
    decay, beta = -torch.rand(2, 3, 150), torch.rand(2, 3, 150)
    state = torch.zeros(2, 3, 16, 16)
    outs = []
    for t in range(150):
        state = state * decay[:, :, t, None, None].exp()
        written = (v[:, :, t] - torch.einsum("bhk,bhkv->bhv", k[:, :, t], state)) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * written[:, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], state))
    out, last = delta_rule(q, k, v, decay, beta, None)
    torch.testing.assert_close(out, torch.stack(outs, dim=2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last, state, rtol=1e-4, atol=1e-5)

    head, middle = delta_rule(
        q[:, :, :70], k[:, :, :70], v[:, :, :70], decay[:, :, :70], beta[:, :, :70], None
    )
    rest, end = delta_rule(
        q[:, :, 70:], k[:, :, 70:], v[:, :, 70:], decay[:, :, 70:], beta[:, :, 70:], middle
    )
    torch.testing.assert_close(torch.cat([head, rest], dim=2), out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("numbered", "texts"), [(True, 3), (False, 0)])
def test_every_answer_of_dummy_weights_has_a_text(tmp_path: Path, numbered: bool, texts: int) -> None:
    """With the tokenizer of bytes most ids have none, and vLLM's stream never gets on."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    if numbered:
        write_numbered_tokenizer(tmp_path, 1000)
    else:
        write_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    stream = DecodeStream(ids=[20, 30], skip_special_tokens=True)
    found = [stream.step(tokenizer, token) for token in (600, 700, 997)]
    assert sum(bool(text) for text in found) == texts
