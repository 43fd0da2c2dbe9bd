"""A client that changes the block tables on their way: no byte of another request is ever used.

Every forgery here passes all other checks: the blocks exist, the positions fit, the prompt is the right one.
What refuses it is the producer, which compares the tables' digest with that of its grant.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
from harness import HYBRID, POISON, Pair
from simulated_model import answer
from stranger import give_back

from stateferry.session import Handoff
from stateferry.session.producer import Holding

pytestmark = pytest.mark.scheduler

PROMPT = random.Random(1).choices(range(1000), k=11)
SECRET = random.Random(2).choices(range(1000), k=11)
"""Another request's prompt, whose pages nobody but its own consumer may have."""
Forgery = Callable[[dict[str, Any], dict[str, Any]], None]


def all_tables(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"] = theirs["remote_block_ids"]


def one_state(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"][1] = theirs["remote_block_ids"][1]


def last_attention_block(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"][-1][-1] = theirs["remote_block_ids"][-1][-1]


def two_blocks_swapped(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    table = mine["remote_block_ids"][-1]
    table[0], table[1] = table[1], table[0]


def groups_swapped(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    tables = mine["remote_block_ids"]
    tables[0], tables[1] = tables[1], tables[0]


def a_longer_table(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"][-1] += theirs["remote_block_ids"][-1][:1]


def shifted_by_a_block(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    mine["remote_block_ids"][-1].insert(0, theirs["remote_block_ids"][-1][0])
    mine["stateferry"]["first_blocks"][0] -= 1
    mine["remote_block_ids"][0].insert(0, mine["remote_block_ids"][0][0])


FORGERIES = [
    all_tables,
    one_state,
    last_attention_block,
    two_blocks_swapped,
    groups_swapped,
    a_longer_table,
    shifted_by_a_block,
]


def serve_forged(pair: Pair, forge: Forgery) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Serve PROMPT with forged tables beside another prefill: the request, and both prefills' good params."""
    theirs, good = pair.prefill(SECRET), pair.prefill(PROMPT)
    forged = copy.deepcopy(good)
    forge(forged, theirs)
    assert forged != good
    request_id = pair.consumer.add(PROMPT, params=forged, max_tokens=3).request_id
    pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
    return request_id, good, theirs


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_forged_tables_are_refused_and_the_prompt_is_computed_here(forge: Forgery) -> None:
    with Pair(HYBRID, caching=False, lease_s=600) as pair:
        request_id, good, theirs = serve_forged(pair, forge)
        assert pair.consumer.finished[request_id].tokens == answer(PROMPT, 3)
        assert request_id not in pair.consumer.loaded_pages
        assert pair.consumer.computed_here(request_id) == len(PROMPT) + 2
        received = pair.consumer.finished[request_id].params
        if received is not None and "reason" in received["stateferry"]["received"]:
            assert "block tables" in received["stateferry"]["received"]["reason"]
        give_back(good)  # nobody may claim it
        # The request whose pages were reached for goes on as if nothing had been.
        other = pair.consumer.add(SECRET, params=theirs, max_tokens=3).request_id
        pair.run()
        assert pair.consumer.finished[other].tokens == answer(SECRET, 3)
        pair.check_idle()


def test_the_refusal_is_told_and_counted() -> None:
    with Pair(HYBRID, caching=False, lease_s=600) as pair:
        theirs, forged = pair.prefill(SECRET), pair.prefill(PROMPT)
        all_tables(forged, theirs)
        pair.producer.step()
        pair.consumer.tap.held = True
        request_id = pair.consumer.add(PROMPT, params=forged, max_tokens=3).request_id
        pair.run_until(lambda: pair.consumer.finished[request_id].reason is not None, "the answer")
        received = pair.consumer.finished[request_id].params["stateferry"]["received"]
        assert received["outcome"] == "failed"
        assert "block tables" in received["reason"]
        assert pair.producer.ferry.counters.refused_claims == 1
        assert pair.producer.ferry.counters.claimed == 0
        give_back(forged)
        give_back(theirs)
        pair.run()
        pair.check_idle()


def test_without_the_check_another_requests_pages_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a producer that compares nothing. The tests above must notice, and this is how."""
    monkeypatch.setattr(Holding, "table_digest", property(lambda self: "0" * 32))
    monkeypatch.setattr(Handoff, "table_digest", property(lambda self: "0" * 32))
    with Pair(HYBRID, caching=False, lease_s=600) as pair:
        request_id, _, theirs = serve_forged(pair, all_tables)
        assert pair.consumer.finished[request_id].tokens != answer(PROMPT, 3)
        stolen = pair.consumer.loaded_pages[request_id]
        assert stolen == pair.offered_pages[theirs["stateferry"]["transfer_id"]]
        assert any(page != bytes([POISON]) * len(page) for pages in stolen.values() for page in pages)
