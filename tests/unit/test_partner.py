"""An engine whose partner does not come says so in one line, once; every other engine says nothing."""

import logging
from collections.abc import Callable

import pytest

from stateferry.layout.spec import Group, GroupKind
from stateferry.session import VirtualClock
from stateferry.vllm import partner
from stateferry.vllm.partner import ENOUGH, EXPIRED, LONG_S, TAKEN, PartnerWatch

BLOCK = 16
LONG = BLOCK + 1
GROUPS = (
    Group(kind=GroupKind.STATE, block_tokens=4096, layers=()),
    Group(kind=GroupKind.ATTENTION, block_tokens=BLOCK, layers=()),
)
OFFERS, TAKERS = "none brought an offer", "expired unclaimed"


def watch(
    produces: bool = False, consumes: bool = False, tp_size: int = 1, clock: VirtualClock | None = None
) -> PartnerWatch:
    return PartnerWatch(GROUPS, tp_size, 15.0, clock or VirtualClock(), produces=produces, consumes=consumes)


Scene = Callable[[], None]


def lonely_decode() -> None:
    engine = watch(consumes=True)
    for _ in range(3 * ENOUGH):
        engine.answered(LONG)


def lonely_prefill() -> None:
    engine = watch(produces=True, tp_size=2)
    for _ in range(3 * ENOUGH):
        engine.heard({EXPIRED: 2})


def early_decode() -> None:
    engine = watch(consumes=True)
    for _ in range(ENOUGH - 1):
        engine.answered(LONG)


def early_prefill() -> None:
    engine = watch(produces=True, tp_size=2)
    engine.heard({EXPIRED: 2 * ENOUGH - 1})


def short_prompts() -> None:
    engine = watch(consumes=True)
    for _ in range(3 * ENOUGH):
        engine.answered(BLOCK)


def one_offer() -> None:
    engine = watch(consumes=True)
    engine.offer_came()
    for _ in range(3 * ENOUGH):
        engine.answered(LONG)


def offers_that_stopped() -> None:
    """Symptom: a router lost its prefill leg, the decode engine computed everything, and nobody was told."""
    clock = VirtualClock()
    engine = watch(consumes=True, clock=clock)
    engine.offer_came()
    clock.advance(1.25 * LONG_S)
    for _ in range(3 * ENOUGH):
        engine.answered(LONG)
    clock.advance(100 * LONG_S)
    engine.answered(LONG)


def few_requests_for_long() -> None:
    clock = VirtualClock()
    engine = watch(consumes=True, clock=clock)
    engine.offer_came()
    for _ in range(ENOUGH - 1):
        clock.advance(LONG_S)
        engine.answered(LONG)


def an_offer_now_and_then() -> None:
    """Between them, more than enough requests without: prompts that the router finds too short for one."""
    clock = VirtualClock()
    engine = watch(consumes=True, clock=clock)
    for _ in range(10):
        engine.offer_came()
        clock.advance(0.9 * LONG_S)
        for _ in range(2 * ENOUGH):
            engine.answered(LONG)


def taken_once(how: int) -> Scene:
    def scene() -> None:
        engine = watch(produces=True)
        engine.heard({TAKEN[how]: 1, EXPIRED: 1})
        engine.heard({EXPIRED: 3 * ENOUGH})

    return scene


def takers_that_stopped() -> None:
    """Symptom: a router lost its decode leg after an hour, every offer expired, and nobody was told."""
    clock = VirtualClock()
    engine = watch(produces=True, tp_size=2, clock=clock)
    engine.heard({TAKEN[0]: 2})
    for _ in range(3 * ENOUGH):
        clock.advance(1.25 * LONG_S / ENOUGH)
        engine.heard({EXPIRED: 2})
    clock.advance(100 * LONG_S)
    engine.heard({EXPIRED: 2})


def few_offers_for_long() -> None:
    clock = VirtualClock()
    engine = watch(produces=True, clock=clock)
    engine.heard({TAKEN[0]: 1})
    for _ in range(ENOUGH - 1):
        clock.advance(LONG_S)
        engine.heard({EXPIRED: 1})


def a_taker_now_and_then() -> None:
    """Clients that leave between the legs, or a decode engine that is restarted."""
    clock = VirtualClock()
    engine = watch(produces=True, clock=clock)
    for _ in range(10):
        engine.heard({TAKEN[0]: 1})
        clock.advance(0.9 * LONG_S)
        engine.heard({EXPIRED: 2 * ENOUGH})


def both_roles_without_offers() -> None:
    engine = watch(produces=True, consumes=True)
    for _ in range(3 * ENOUGH):
        engine.answered(LONG)


def prefill_that_answers_whole_requests() -> None:
    engine = watch(produces=True)
    for _ in range(3 * ENOUGH):
        engine.answered(LONG)
        engine.heard({("stateferry_grants", "other"): 5})


def decode_whose_counts_say_nothing() -> None:
    watch(consumes=True).heard({EXPIRED: 3 * ENOUGH})


SCENES: dict[Scene, str] = {
    lonely_decode: OFFERS,
    lonely_prefill: TAKERS,
    early_decode: "",
    early_prefill: "",
    short_prompts: "",
    one_offer: "",
    offers_that_stopped: OFFERS,
    few_requests_for_long: "",
    an_offer_now_and_then: "",
    **{taken_once(how): "" for how in range(len(TAKEN))},
    takers_that_stopped: TAKERS,
    few_offers_for_long: "",
    a_taker_now_and_then: "",
    both_roles_without_offers: "",
    prefill_that_answers_whole_requests: "",
    decode_whose_counts_say_nothing: "",
}


def wrong(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Scenes in which something else is said than should be."""
    found = []
    for scene, words in SCENES.items():
        caplog.clear()
        scene()
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        if len(said) != bool(words) or not all(words in line for line in said):
            found.append(getattr(scene, "__name__", "?"))
    return found


def test_a_lonely_engine_is_told_once_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    assert wrong(caplog) == []


def test_the_line_names_the_number_and_the_cure(caplog: pytest.LogCaptureFixture) -> None:
    lonely_decode()
    lonely_prefill()
    offers_that_stopped()
    takers_that_stopped()
    decode, prefill, stopped, untaken = caplog.messages
    assert decode.startswith(f"{ENOUGH} requests have finished")
    assert "Is the router sending kv_transfer_params?" in decode
    assert "(last: never)" in decode
    assert "(last: 75 s ago)" in stopped
    assert prefill.startswith(f"the last {ENOUGH} offers")
    assert "after 15 s" in prefill
    assert "(last: never)" in prefill
    assert untaken.startswith(f"the last {ENOUGH} offers")
    assert "(last: 75 s ago)" in untaken
    assert all("stateferry doctor" in line for line in caplog.messages)


def test_missing_offers_are_told_again_only_after_some_came(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    engine = watch(consumes=True, clock=clock)

    def plain() -> int:
        """Lines in the log after many requests without an offer."""
        for _ in range(3 * ENOUGH):
            clock.advance(LONG_S)
            engine.answered(LONG)
        return len(caplog.messages)

    assert [plain(), plain()] == [1, 1]
    engine.offer_came()
    engine.offer_came()
    assert caplog.messages[1:] == ["requests bring offers again"]
    assert [plain(), plain()] == [3, 3]


def test_offers_that_nobody_takes_are_told_again_only_after_some_were_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    engine = watch(produces=True, clock=clock)

    def unclaimed() -> int:
        """Lines in the log after many offers that expired."""
        for _ in range(3 * ENOUGH):
            clock.advance(LONG_S)
            engine.heard({EXPIRED: 1})
        return len(caplog.messages)

    assert [unclaimed(), unclaimed()] == [1, 1]
    for _ in range(2):
        engine.heard({TAKEN[0]: 1})
    assert caplog.messages[1:] == ["offers of this prefill engine are taken again"]
    assert [unclaimed(), unclaimed()] == [3, 3]


@pytest.mark.parametrize(
    ("name", "value", "noticed"),
    [
        ("LONG_S", 0.0, "one_offer"),
        ("LONG_S", 10**9, "offers_that_stopped"),
        ("ENOUGH", 0, "early_decode"),
        ("ENOUGH", 10**6, "lonely_decode"),
        ("LONG_S", 10**9, "takers_that_stopped"),
        ("LONG_S", 0.0, "a_taker_now_and_then"),
        ("TAKEN", (), "scene"),
        ("EXPIRED", ("stateferry_grants", "released"), "lonely_prefill"),
    ],
)
def test_a_wrong_number_or_count_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, value: object, noticed: str
) -> None:
    monkeypatch.setattr(partner, name, value)
    assert noticed in wrong(caplog)


@pytest.mark.parametrize(
    ("method", "noticed"),
    [("offer_came", "one_offer"), ("answered", "lonely_decode"), ("heard", "lonely_prefill")],
)
def test_a_watch_that_is_deaf_is_noticed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, method: str, noticed: str
) -> None:
    monkeypatch.setattr(PartnerWatch, method, lambda self, *args: None)
    assert noticed in wrong(caplog)
