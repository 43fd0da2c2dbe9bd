"""Real schedulers and ferries behind a router that does half of its work: what engines log of it."""

import random
from typing import Any

import pytest
from harness import HYBRID, Pair, wait

from stateferry.vllm import partner, scheduler
from stateferry.vllm.partner import ENOUGH

pytestmark = pytest.mark.scheduler

LOGGER = "stateferry.vllm.partner"


def prompt_of(number: int, length: int = 9) -> list[int]:
    return random.Random(number).choices(range(1000), k=length)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == LOGGER]


def plain(pair: Pair, count: int, **more: Any) -> None:
    """So many requests that bring nothing."""
    for number in range(count):
        pair.consumer.add(prompt_of(number, **more), max_tokens=2)
        pair.run()


def test_a_decode_engine_that_never_gets_an_offer_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(HYBRID) as pair:
        plain(pair, ENOUGH, length=HYBRID.block)
        aborted = pair.consumer.add(prompt_of(0), max_tokens=50).request_id
        pair.step()
        pair.consumer.abort(aborted)
        plain(pair, ENOUGH - 1)
        assert said(caplog) == []
        plain(pair, 3)
        (line,) = said(caplog)
        assert "Is the router sending kv_transfer_params?" in line
        pair.check_idle()


def test_a_decode_engine_whose_offers_stop_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partner, "LONG_S", 0.0)
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(0))
        plain(pair, ENOUGH + 3)
        (line,) = said(caplog)
        assert "none brought an offer (last: 0 s ago)" in line


def test_a_decode_engine_with_one_offer_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(0))
        plain(pair, ENOUGH + 3)
        assert said(caplog) == []


def unclaimed(pair: Pair, count: int) -> None:
    """So many offers that nobody takes, until their leases are over."""
    for number in range(count):
        pair.prefill(prompt_of(number))
    wait(lambda: not pair.producer.ferry.open_count, "leases to end")
    pair.run()


def test_a_prefill_engine_whose_offers_all_expire_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(HYBRID, producer={"lease_s": 0.05}) as pair:
        unclaimed(pair, ENOUGH + 3)
        (line,) = said(caplog)
        assert "expired unclaimed" in line
        pair.check_idle()


def test_a_prefill_engine_that_was_asked_once_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(0))
        unclaimed_counts = {("stateferry_grants", "expired"): 3 * ENOUGH}
        pair.producer.half._partner.heard(unclaimed_counts)
        assert said(caplog) == []


def test_a_scheduler_half_that_does_not_tell_the_watch_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Deaf(scheduler.PartnerWatch):
        def answered(self, prompt_tokens: int) -> None: ...

    monkeypatch.setattr(scheduler, "PartnerWatch", Deaf)
    with pytest.raises(ValueError, match="not enough values"):
        test_a_decode_engine_that_never_gets_an_offer_says_so_once(caplog)
