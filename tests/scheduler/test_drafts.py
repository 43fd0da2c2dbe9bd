"""Both engines draft: vLLM's real scheduler fills up a loaded request's first step, verifies, takes back.

F7: every state that a step makes on the way lies in a slot of its own, and the next one starts from the slot
of the last accepted token. One that was loaded into another column or slot shows in the first token.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from engine_parts import CacheModel
from harness import HYBRID_DRAFTING, Pair
from simulated_model import answer
from test_boundaries import warm

from stateferry.layout.spec import Group, GroupKind
from stateferry.vllm import destinations, offering, taking

pytestmark = pytest.mark.scheduler

TOKENS = 20
"""Of an answer: several blocks, so that drafts cross borders."""
MODELS = {
    "align": HYBRID_DRAFTING,
    "align, one draft": replace(HYBRID_DRAFTING, scratch=1),
    "align, nearly a block of drafts": replace(HYBRID_DRAFTING, scratch=3),
    "align, layers draft": replace(HYBRID_DRAFTING, drafting="mtp"),
    "none": replace(HYBRID_DRAFTING, mode="none"),
}
HITS = ("no hit", "part on D", "all on D", "part on P", "all on P", "all on both")


def sweep(model: CacheModel, hits: str, lengths: range = range(2, 15), **settings: Any) -> Pair:
    """Hand-offs of every length; the answers must be those of an engine that never drafts."""
    numbers = random.Random(f"{model} {hits}")
    with Pair(model, **settings) as pair:
        for length in lengths:
            prompt = [numbers.randrange(1000) for _ in range(length)]
            warm(pair, prompt, hits)
            request_id = pair.hand_off(prompt, max_tokens=TOKENS)
            found = pair.consumer.finished[request_id].tokens
            assert found == answer(prompt, TOKENS), f"prompt of {length} tokens: {found}"
            pair.check_idle()
        assert 0 < pair.consumer.worker.accepted < pair.consumer.worker.drafted
        if hits == "no hit":
            assert len(pair.consumer.loads) == len(lengths)
    return pair


@pytest.mark.parametrize("hits", HITS)
@pytest.mark.parametrize("model", MODELS)
def test_every_length(model: str, hits: str) -> None:
    if hits != "no hit" and not MODELS[model].caching:
        pytest.skip("vLLM has no prefix cache in this mode")
    sweep(MODELS[model], hits)


def test_the_first_step_after_a_load_is_filled_up_but_not_across_a_block() -> None:
    """So that the sweep tries both of vLLM's ways to begin."""
    pair = sweep(HYBRID_DRAFTING, "no hit")
    loaded = {load.request_id for load in pair.consumer.loads}
    first = {pair.consumer.scheduled[request_id][0] for request_id in loaded}
    drafts, block = HYBRID_DRAFTING.scratch, HYBRID_DRAFTING.block
    assert {count for _, count in first} == {1, 1 + drafts}
    for computed, count in first:
        crosses = computed // block < (computed + drafts) // block
        assert count == (1 if crosses and (computed + 1 + drafts) % block else 1 + drafts), computed


@pytest.mark.parametrize(("drafting", "dropped"), [("ngram", 0), ("mtp", 1)])
def test_a_hit_of_an_engine_whose_layers_draft_is_a_block_shorter_and_the_rest_is_loaded(
    drafting: str, dropped: int
) -> None:
    """The drafter needs what the model made of the tokens before; `stateferry gate` goes by the same."""
    model = replace(HYBRID_DRAFTING, drafting=drafting)
    with Pair(model) as pair:
        prompt = list(range(4 * model.block + 2))
        pair.consumer.add(prompt[: 3 * model.block + 1])
        pair.run()
        pair.hand_off(prompt, max_tokens=TOKENS)
        (load,) = pair.consumer.loads
        assert load.local_tokens == (3 - dropped) * model.block
        pair.check_idle()


def test_a_hand_off_beside_requests_that_draft_already() -> None:
    with Pair(HYBRID_DRAFTING) as pair:
        running = [pair.consumer.add([n, n + 1, n + 2], max_tokens=TOKENS) for n in (10, 20, 30)]
        pair.run_until(lambda: all(len(r.output_token_ids) > 2 for r in running), "neighbours to decode")
        prompts = [[7, 8, 9, 10, length] * 2 for length in range(5)]
        asked = [pair.consumer.add(p, params=pair.prefill(p), max_tokens=TOKENS).request_id for p in prompts]
        pair.run()
        for request_id, prompt in zip(asked, prompts, strict=True):
            assert pair.consumer.finished[request_id].tokens == answer(prompt, TOKENS)
        for request, n in zip(running, (10, 20, 30), strict=True):
            assert pair.consumer.finished[request.request_id].tokens == answer([n, n + 1, n + 2], TOKENS)
        assert len(pair.consumer.loads) == len(prompts)
        pair.check_idle()


# -- mistakes that the sweep must notice -------------------------------------------------------------


def _scratch_slots(patch: pytest.MonkeyPatch) -> None:
    """As if the last block of a table were the one that counts."""
    right = offering.needed_blocks

    def needed(group: Group, local: int, total: int) -> range:
        found = right(group, local, total)
        return range(found.start + 1, found.stop + 1) if group.kind is GroupKind.STATE else found

    for module in (offering, taking, destinations):
        patch.setattr(module, "needed_blocks", needed)


def _into_the_next_slot(patch: pytest.MonkeyPatch) -> None:
    right = destinations.pair

    def pair(group: Group, positions: range, local: Any, remote: Any, first: int) -> Any:
        if group.kind is GroupKind.STATE:
            local = [*local[1:], local[0]]
        return right(group, positions, local, remote, first)

    patch.setattr(destinations, "pair", pair)


def _a_group_forgotten(patch: pytest.MonkeyPatch) -> None:
    right = taking.group_loads
    patch.setattr(taking, "group_loads", lambda *more: right(*more)[1:])


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a scratch slot is taken for the state": _scratch_slots,
    "the state goes into a scratch slot": _into_the_next_slot,
    "a recurrent group is forgotten": _a_group_forgotten,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_sweep_notices_when(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[mistake](monkeypatch)
    with pytest.raises(AssertionError, match=r"prompt of|was written while|load goes to"):
        sweep(HYBRID_DRAFTING, "no hit", range(3, 8))
