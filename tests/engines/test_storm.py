"""Many requests at once through the router, half of them cancelled: the others are right, nothing leaks."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.engines.conftest import Pair

from stateferry.models import recall_prompt
from stateferry.stack import AnswerError, Client, Router, held

REQUESTS = 64
CONCURRENCY = 16
SETTLE_S = 30.0
TOKENS = 12

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


def prompt_of(index: int) -> list[int]:
    """A question that the bundled model answers rightly and surely."""
    length = random.Random(index).choice([20, 40, 200, 700, 900])
    return list(recall_prompt(index, length).token_ids)


def everything_is_free(client: Client, pair: Pair) -> str:
    """Empty when both engines hold nothing; otherwise what is still held."""
    return held(client, {"prefill": pair.prefill, "decode": pair.decode})


def assert_settles(client: Client, pair: Pair) -> None:
    deadline = time.monotonic() + SETTLE_S
    while held := everything_is_free(client, pair):
        assert time.monotonic() < deadline, f"still held after {SETTLE_S:g} s: {held}"
        time.sleep(0.2)


def test_half_of_sixty_four_cancelled(client: Client, pair: Pair, router: Router) -> None:
    prompts = [prompt_of(i) for i in range(REQUESTS)]
    rng = random.Random(99)
    cancelled = set(rng.sample(range(REQUESTS), REQUESTS // 2))
    # What one engine answers, asked one by one.
    expected = {
        i: client.complete(pair.prefill.url, prompts[i], TOKENS).token_ids
        for i in range(REQUESTS)
        if i not in cancelled
    }

    def ask(index: int) -> tuple[int, ...] | None:
        if index not in cancelled:
            return client.complete(router.url, prompts[index], TOKENS).token_ids
        try:
            if index % 4 == 0:
                # Between the legs: the prefill is done, and nobody ever asks for it.
                client.handoff(pair.prefill.url, pair.decode.url, prompts[index], TOKENS, between=_hang_up)
            client.complete(router.url, prompts[index], 400, timeout_s=rng.uniform(0.005, 1.5))
        except (AnswerError, ConnectionAbortedError):
            return None
        return None

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(ask, range(REQUESTS)))
    wrong = {i: answers[i] for i, tokens in expected.items() if answers[i] != tokens}
    assert not wrong
    assert_settles(client, pair)


def _hang_up(params: dict[str, object]) -> dict[str, object]:
    raise ConnectionAbortedError


def test_the_check_above_would_see_a_leak(client: Client, pair: Pair) -> None:
    assert_settles(client, pair)
    with pytest.raises(ConnectionAbortedError):
        client.handoff(pair.prefill.url, pair.decode.url, prompt_of(3), TOKENS, between=_hang_up)
    assert "prefill engine" in everything_is_free(client, pair)
    assert_settles(client, pair)  # its lease ends
