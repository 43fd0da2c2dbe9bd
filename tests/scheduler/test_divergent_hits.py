"""The consumer's prefix cache has attention blocks whose recurrent state is gone."""

import random

import pytest
from harness import HYBRID, HYBRID_FINE, Pair
from simulated_model import answer
from steered_transport import TRIES

pytestmark = pytest.mark.scheduler


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


def drop_states(pair: Pair) -> None:
    """Evict what the recurrent groups have cached, as block pressure would."""
    last = len(pair.consumer.worker.groups) - 1
    states = {
        block.block_id
        for block in pair.consumer.pool.blocks
        if block.block_hash is not None and int.from_bytes(block.block_hash[-4:], "big") != last
    }
    assert states
    pair.consumer.pool.evict_blocks(states)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("length", range(10, 20))
def test_attention_is_kept_and_the_state_is_loaded(length: int, async_scheduling: bool) -> None:
    """8 tokens of attention are here; the rest, and h(N-1), come from the producer. F3.14."""
    with Pair(HYBRID, consumer={"async_scheduling": async_scheduling}) as pair:
        prompt = prompt_of(length)
        pair.consumer.add(prompt[:9])
        pair.run()
        drop_states(pair)
        request_id = pair.hand_off(prompt, max_tokens=5)
        (load,) = pair.consumer.loads
        assert load.local_tokens == 8
        assert [part.first_block for part in load.groups] == [(length - 2) // 4] * 3 + [2]
        assert pair.consumer.scheduled[request_id][0] == (length - 1, 1)
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 5)
        pair.check_idle()


@pytest.mark.parametrize("length", [9, 13, 17])
def test_attention_of_the_whole_prefix_without_its_state(length: int) -> None:
    """Nothing is left to load, and yet there is no state to go on from: vLLM takes a shorter hit.

    F3.7, F3.14: the state is read though attention needs nothing.
    """
    with Pair(HYBRID) as pair:
        prompt = prompt_of(length)
        pair.consumer.add(prompt)
        pair.run()
        drop_states(pair)
        request_id = pair.hand_off(prompt, max_tokens=5)
        assert pair.consumer.loads == []
        assert pair.consumer.scheduled[request_id][0][0] < length - 1
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 5)
        assert pair.producer.ferry.counters.released == 1
        pair.check_idle()


@pytest.mark.parametrize("length", range(10, 40, 3))
def test_hits_inside_a_block_without_their_state(length: int) -> None:
    with Pair(HYBRID_FINE) as pair:
        prompt = prompt_of(length)
        pair.consumer.add(prompt[: length // 2 + 4])
        pair.run()
        drop_states(pair)
        request_id = pair.hand_off(prompt, max_tokens=9)
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 9)
        pair.check_idle()


def test_a_failed_load_after_a_divergent_hit_starts_from_a_state_that_is_there() -> None:
    with Pair(HYBRID) as pair:
        prompt = prompt_of(14)
        pair.consumer.add(prompt[:9])
        pair.run()
        drop_states(pair)
        pair.consumer.tap.failing = TRIES
        request_id = pair.hand_off(prompt, max_tokens=5)
        assert pair.consumer.scheduled[request_id][0][0] == 0
        assert pair.consumer.finished[request_id].tokens == answer(prompt, 5)
        pair.check_idle()


def test_loaded_blocks_and_states_serve_the_next_prompt() -> None:
    """What was loaded enters the consumer's prefix cache under the right names."""
    with Pair(HYBRID) as pair:
        prompt = prompt_of(13)
        pair.hand_off(prompt)
        assert len(pair.consumer.loads) == 1
        longer = [*prompt, 1, 2, 3]
        request_id = pair.consumer.add(longer, max_tokens=5).request_id
        pair.run()
        assert pair.consumer.scheduled[request_id][0][0] == 12
        assert pair.consumer.finished[request_id].tokens == answer(longer, 5)
        pair.check_idle()
