"""Whatever a client puts into kv_transfer_params: right answers, living engines, nothing held."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.engines.conftest import Pair
from tests.engines.test_storm import assert_settles, prompt_of

from stateferry.stack import Client

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
Params = dict[str, Any]
PREFILL: Params = {"do_remote_decode": True, "do_remote_prefill": False}


def _ours(**changes: Any) -> Callable[[Params], Params]:
    return lambda p: {**p, "stateferry": {**p["stateferry"], **changes}}


def _top(**changes: Any) -> Callable[[Params], Params]:
    return lambda p: {**p, **changes}


DAMAGES: dict[str, Callable[[Params], Params]] = {
    "no stateferry part": lambda p: {k: v for k, v in p.items() if k != "stateferry"},
    "short table": lambda p: {**p, "remote_block_ids": [t[:-1] for t in p["remote_block_ids"]]},
    "missing group": lambda p: {
        **p,
        "remote_block_ids": p["remote_block_ids"][:-1],
        "stateferry": {**p["stateferry"], "first_blocks": p["stateferry"]["first_blocks"][:-1]},
    },
    "flat table": _top(remote_block_ids=[1, 2, 3]),
    "text for numbers": _top(remote_block_ids="1,2,3"),
    "nothing for tables": _top(remote_block_ids=None),
    "block out of range": lambda p: {
        **p,
        "remote_block_ids": [[10**6 for _ in t] for t in p["remote_block_ids"]],
    },
    "null blocks": lambda p: {**p, "remote_block_ids": [[0 for _ in t] for t in p["remote_block_ids"]]},
    "another prompt's digest": _ours(prefix_digest="0" * 32),
    "too many tokens": _ours(num_tokens=10**6),
    "unknown transfer": _ours(transfer_id="0" * 32),
    "of a dead engine": lambda p: _ours(ranks=[[h, 1, e] for h, _, e in p["stateferry"]["ranks"]])(p),
    "of a former life": lambda p: _ours(ranks=[[h, n, 1] for h, n, _ in p["stateferry"]["ranks"]])(p),
    "another version": _ours(version=99),
    "a future lease": _ours(lease_s=1e9),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_the_prompt_is_computed_here(client: Client, pair: Pair, damage: Callable[[Params], Params]) -> None:
    prompt = prompt_of(2)
    expected = client.complete(pair.decode.url, prompt, 8)
    client.reset_prefix_cache(pair.decode.url)
    kept: list[Params] = []

    def keep_and_damage(params: Params) -> Params:
        kept.append(params)
        return damage(params)

    answer = client.handoff(pair.prefill.url, pair.decode.url, prompt, 8, between=keep_and_damage)
    assert answer.decode.token_ids == expected.token_ids
    assert answer.received.get("outcome") != "received"
    # Take the real offer, so that the next case need not wait for its lease.
    client.complete(pair.decode.url, prompt, 1, kv_transfer_params=kept[0])
    assert_settles(client, pair)


def test_params_used_twice_serve_one_request_and_harm_none(client: Client, pair: Pair) -> None:
    prompt = prompt_of(4)
    expected = client.complete(pair.prefill.url, prompt, 8).token_ids
    kept: list[Params] = []
    first = client.handoff(
        pair.prefill.url, pair.decode.url, prompt, 8, between=lambda p: kept.append(p) or p
    )
    assert first.received["outcome"] == "received"
    client.reset_prefix_cache(pair.decode.url)
    second = client.complete(pair.decode.url, prompt, 8, kv_transfer_params=kept[0])
    assert first.decode.token_ids == second.token_ids == expected
    assert_settles(client, pair)


def test_params_of_another_prompt_are_not_used(client: Client, pair: Pair) -> None:
    mine, other = prompt_of(5), prompt_of(6)
    expected = client.complete(pair.decode.url, mine, 8).token_ids
    client.reset_prefix_cache(pair.decode.url)
    answer = client.handoff(pair.prefill.url, pair.decode.url, other, 8, decode_prompt=mine)
    assert answer.decode.token_ids == expected
    assert answer.received == {}
    assert_settles(client, pair)


def test_two_prompts_in_one_call_share_one_dictionary_and_both_are_right(client: Client, pair: Pair) -> None:
    first, second = prompt_of(7), prompt_of(8)
    expected = [client.complete(pair.prefill.url, p, 8).text for p in (first, second)]
    client.reset_prefix_cache(pair.prefill.url)
    params = ask(pair.prefill.url, [first, second], 1, kv_transfer_params=PREFILL)["kv_transfer_params"]
    answer = ask(pair.decode.url, [first, second], 8, kv_transfer_params=params)
    assert [c["text"] for c in answer["choices"]] == expected
    assert_settles(client, pair)


def test_several_samples_are_computed_here_and_hold_nothing(client: Client, pair: Pair) -> None:
    prompt = prompt_of(9)
    sampled = {"n": 2, "temperature": 1.0}
    params = ask(pair.prefill.url, prompt, 1, **sampled, kv_transfer_params=PREFILL)["kv_transfer_params"]
    assert "n > 1" in params["stateferry"]["not_offered"]
    answer = ask(pair.decode.url, prompt, 8, **sampled, kv_transfer_params=params)
    assert len(answer["choices"]) == 2
    assert_settles(client, pair)


def ask(url: str, prompt: object, max_tokens: int, **body: Any) -> dict[str, Any]:
    """One call as a client would write it, with whatever it likes in the body."""
    body = {"temperature": 0.0, **body, "model": "model", "prompt": prompt, "max_tokens": max_tokens}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0, trust_env=False)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())
