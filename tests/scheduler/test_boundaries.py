"""Every prompt length around block borders, with every mix of prefix hits: right bytes in the right place."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import ATTENTION, HYBRID, HYBRID_FINE, HYBRID_SPECULATIVE, HYBRID_UNCACHED, WINDOW, Pair
from simulated_model import answer

from stateferry.layout.spec import Group, GroupKind
from stateferry.vllm import destinations, offering, taking
from stateferry.vllm.scheduler import SchedulerHalf

pytestmark = pytest.mark.scheduler

MODELS = {
    "align": HYBRID,
    "align with scratch slots": HYBRID_SPECULATIVE,
    "align, hits inside a block": HYBRID_FINE,
    "align, blocks outermost": CacheModel(states=3, layout="BLHNC"),
    "none": HYBRID_UNCACHED,
    "attention": ATTENTION,
    "window": WINDOW,
    "window and states": CacheModel(states=2, window=6),
}
HITS = ("no hit", "part on D", "all on D", "part on P", "all on P", "all on both")
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    "async D": {"consumer": {"async_scheduling": True}},
    "async P and D": {"async_scheduling": True},
    "chunked P": {"producer": {"max_batched_tokens": 8, "max_seqs": 8}},
}


def warm(pair: Pair, prompt: list[int], hits: str) -> None:
    """Have some of the prompt in the prefix caches."""
    part = prompt[: len(prompt) // 2 + 1]
    if hits in ("all on D", "all on both"):
        pair.consumer.add(prompt)
    elif hits == "part on D":
        pair.consumer.add(part)
    pair.run()
    if hits in ("all on P", "all on both"):
        pair.hand_off(prompt) if hits == "all on both" else pair.producer.add(prompt)
    elif hits == "part on P":
        pair.producer.add(part)
    pair.run()


def attention_hit(pair: Pair, prompt: list[int], hits: str) -> int:
    """How many tokens D's attention groups already have."""
    if not (pair.model.caching and hits in ("part on D", "all on D", "all on both")):
        return 0
    cached = len(prompt) // 2 + 1 if hits == "part on D" else len(prompt)
    return min(cached, len(prompt) - 1) // pair.model.block * pair.model.block


def check_hand_off(pair: Pair, prompt: list[int], hits: str) -> None:
    """One hand-off of `prompt`: what was loaded, from where, to where, and what came of it."""
    block, tokens = pair.model.block, len(prompt) - 1
    warm(pair, prompt, hits)
    params = pair.prefill(prompt)
    assert params["do_remote_prefill"] == (tokens > 0)
    request_id = pair.consumer.add(prompt, params=params, max_tokens=block + 2).request_id
    pair.run()
    assert pair.consumer.finished[request_id].tokens == answer(prompt, block + 2)
    pair.check_idle()
    loads = [load for load in pair.consumer.loads if load.request_id == request_id]
    local = attention_hit(pair, prompt, hits)
    if pair.model.hash_block is None and not pair.model.window:
        assert len(loads) == (local < tokens)
    for load in loads:
        assert pair.consumer.scheduled[request_id][0] == (tokens, 1)
        assert request_id in pair.consumer.loaded_pages, "the load failed"
        pair.check_pages(request_id, params)
        placed = {part.group: (part.first_block, len(part.local_block_ids)) for part in load.groups}
        for group in range(pair.model.states):
            assert placed[group] == ((tokens - 1) // block if pair.model.caching else 0, 1)
        first, last = load.local_tokens // block, (tokens - 1) // block
        assert placed[len(pair.consumer.worker.groups) - 1] == (first, last - first + 1)


def sweep(model: CacheModel, hits: str, lengths: range | None = None, **settings: Any) -> None:
    """Hand-offs of every length up to four blocks and two tokens."""
    numbers = random.Random(f"{model} {hits}")
    with Pair(model, **settings) as pair:
        for length in lengths or range(1, 4 * model.block + 3):
            prompt = [numbers.randrange(1000) for _ in range(length)]
            try:
                check_hand_off(pair, prompt, hits)
            except AssertionError as e:
                raise AssertionError(f"prompt of {length} tokens: {e}") from e


@pytest.mark.parametrize("hits", HITS)
@pytest.mark.parametrize("model", MODELS)
def test_every_length(model: str, hits: str) -> None:
    """F3.5, F3.6: at every border, with and without scratch slots and local hits."""
    if hits != "no hit" and not MODELS[model].caching:
        pytest.skip("vLLM has no prefix cache in this mode")
    sweep(MODELS[model], hits)


@pytest.mark.parametrize("settings", list(SETTINGS)[1:])
@pytest.mark.parametrize("hits", ["no hit", "part on D", "all on both"])
@pytest.mark.parametrize("model", ["align", "attention", "window"])
def test_every_length_under_other_settings(model: str, hits: str, settings: str) -> None:
    sweep(MODELS[model], hits, **SETTINGS[settings])


def test_every_length_with_the_prefix_cache_off_on_one_side() -> None:
    sweep(HYBRID, "no hit", producer={"caching": False})
    sweep(HYBRID, "no hit", consumer={"caching": False})


def test_a_window_group_that_hits_less_than_the_attention_group_is_loaded_too() -> None:
    """vLLM counts what the attention group hits. Tokens that only the window group lacked were garbage."""
    with Pair(MODELS["window and states"]) as pair:
        prompt = list(range(6))
        pair.consumer.add(prompt[:4])
        pair.run()
        request_id = pair.hand_off(prompt, max_tokens=3)
        (load,) = pair.consumer.loads
        assert load.local_tokens == 4
        assert [(part.group, part.first_block, len(part.local_block_ids)) for part in load.groups] == [
            (0, 1, 1),
            (1, 1, 1),
            (2, 0, 2),
            (3, 1, 1),
        ]
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 3)
        pair.check_idle()


# -- mistakes that the sweep must notice -------------------------------------------------------------


def _no_cut(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(offering, "cut_last_token", lambda request, block: None)
    whole = offering.Offering._offer

    def offer(self: offering.Offering, request: Any, *more: Any) -> Any:
        request.num_prompt_tokens -= 1
        return whole(self, request, *more)

    patch.setattr(offering.Offering, "_offer", offer)


def _state_of_the_next_column(patch: pytest.MonkeyPatch) -> None:
    right = offering.needed_blocks

    def needed(group: Group, local: int, total: int) -> range:
        column = total // group.block_tokens
        return range(column, column + 1) if group.kind is GroupKind.STATE else right(group, local, total)

    for module in (offering, taking, destinations):
        patch.setattr(module, "needed_blocks", needed)


def _cached_blocks_too(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(destinations, "not_cached", lambda positions, table: positions)


def _a_group_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = taking.group_loads
    patch.setattr(taking, "group_loads", lambda *more: right(*more)[1:])


def _a_block_late(patch: pytest.MonkeyPatch) -> None:
    right = destinations.pair

    def pair(group: Group, positions: range, local: Any, remote: Any, first: int) -> Any:
        ours, theirs = right(group, positions, local, remote, first)
        return ours, (theirs if len(theirs) < 2 else theirs[[*range(1, len(theirs)), 0]])

    patch.setattr(destinations, "pair", pair)


def _one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(taking.Taking, "_check_offer", lambda *_: None)
    right = SchedulerHalf.matched_tokens

    def matched(self: SchedulerHalf, request: Any, local: int) -> tuple[int, bool]:
        external, loads = right(self, request, local)
        return external + loads, loads

    patch.setattr(SchedulerHalf, "matched_tokens", matched)


MISTAKES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], CacheModel, str]] = {
    "the producer does not stop at h(N-1)": (_no_cut, HYBRID, "no hit"),
    "the state goes to the column that is written next": (_state_of_the_next_column, HYBRID, "no hit"),
    "cached blocks are read again": (_cached_blocks_too, HYBRID, "part on D"),
    "a recurrent group is forgotten": (_a_group_forgotten, HYBRID, "no hit"),
    "blocks are paired by another order": (_a_block_late, ATTENTION, "no hit"),
    "one token too many is claimed": (_one_token_too_many, ATTENTION, "no hit"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sweep_notices_when(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, model, hits = MISTAKES[mistake]
    make(monkeypatch)
    with pytest.raises(AssertionError, match="prompt of"):
        sweep(model, hits, range(2, 12))
