"""Who is told of an offer that was not made when it was asked for, and what a router's name for it is."""

from typing import Any

import pytest

from stateferry.block_ids import BlockIds
from stateferry.errors import ProtocolError
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.session import AwaitedOffers, Grant, Ledger
from stateferry.session import awaited as session_awaited
from stateferry.wire import (
    Await,
    AwaitAnswer,
    Claim,
    RankAddress,
    Release,
    engine_place,
    parse_promise,
    promised_to,
    transfer_of,
)

EPOCH = Epoch(7)
NAME = transfer_of("a name")


def grant(params: bytes = b"params", transfer_id: TransferId = NAME) -> Grant:
    tables = (BlockIds([1, 2]),)
    return Grant(RequestId("r"), transfer_id, 20, tables, (0,), "0" * 32, params=params)


class Producer:
    """A ledger, and who waits for what."""

    def __init__(self) -> None:
        self.ledger = Ledger(EPOCH, 1, 15.0)
        self.awaited = AwaitedOffers(EPOCH, self.ledger)

    def ask(self, sender: str = "d", now_s: float = 0.0, transfer_id: TransferId = NAME) -> AwaitAnswer:
        return self.awaited.ask(Await(transfer_id=transfer_id), sender, now_s)

    def grant(self, offered: Grant) -> list[tuple[Any, AwaitAnswer]]:
        self.ledger.grant(offered, 0.0)
        return self.awaited.settled(offered.transfer_id)


def told(params: bytes = b"", reason: str = "") -> AwaitAnswer:
    return AwaitAnswer(epoch=EPOCH, transfer_id=NAME, params=params, reason=reason)


def test_who_asks_first_is_told_when_it_is_made() -> None:
    producer = Producer()
    assert producer.ask() == told()
    assert producer.grant(grant()) == [("d", told(b"params"))]
    assert producer.awaited.count == 0


def test_who_asks_later_is_told_at_once_and_may_ask_again() -> None:
    producer = Producer()
    assert producer.grant(grant()) == []
    assert producer.ask() == producer.ask() == told(b"params")
    assert producer.awaited.count == 0


def test_who_asks_twice_is_told_once() -> None:
    producer = Producer()
    producer.ask(now_s=0.0)
    producer.ask(now_s=2.0)
    assert producer.grant(grant()) == [("d", told(b"params"))]


def test_an_offer_that_will_never_be_made_is_told_too() -> None:
    producer = Producer()
    producer.ask()
    producer.ledger.withdraw(NAME, "will not be made: aborted")
    reason = told(reason="the offer will not be made: aborted")
    assert producer.awaited.settled(NAME) == [("d", reason)]
    assert producer.ask() == reason


def test_an_offer_that_is_made_cannot_be_withdrawn() -> None:
    producer = Producer()
    producer.grant(grant())
    producer.ledger.withdraw(NAME, "a defect")
    assert producer.ask() == told(b"params")
    producer.ledger.check_integrity()


def test_what_its_consumer_gave_back_to_another_rank_goes_unless_it_is_claimed() -> None:
    producer = Producer()
    producer.grant(grant())
    producer.ledger.withdraw(NAME, "was given back", renounced=True)
    assert producer.ledger.take_finished() == ["r"]
    producer.ledger.check_integrity()
    claimed = Producer()
    claimed.grant(grant())
    (holding,) = claimed.ledger._holdings.values()
    digest = holding.table_digest
    claim = Claim(epoch=EPOCH, transfer_id=NAME, claimant="d/r", tp_rank=0, tp_size=1, table_digest=digest)
    claimed.ledger.claim(claim, "d", 0.0)
    claimed.ledger.withdraw(NAME, "was given back", renounced=True)
    assert claimed.ledger.open_count == 1


def test_a_rank_says_of_what_was_given_back_unclaimed_and_of_nothing_else() -> None:
    producer = Producer()
    release = Release(epoch=EPOCH, transfer_id=NAME, claimant="d/r", tp_rank=0, tp_size=1, received=False)
    producer.ledger.release(release)
    assert producer.ledger.take_renounced() == [NAME]
    made = Producer()
    made.grant(grant())
    made.ledger.release(release)
    assert made.ledger.take_renounced() == [NAME]
    assert made.ledger.take_renounced() == []
    used = Producer()
    used.grant(grant())
    (holding,) = used.ledger._holdings.values()
    digest = holding.table_digest
    claim = Claim(epoch=EPOCH, transfer_id=NAME, claimant="d/r", tp_rank=0, tp_size=1, table_digest=digest)
    used.ledger.claim(claim, "d", 0.0)
    used.ledger.release(release)
    assert used.ledger.take_finished() == ["r"]
    assert used.ledger.take_renounced() == []


def test_an_offer_of_a_router_that_waits_is_not_told_to_others() -> None:
    producer = Producer()
    producer.grant(grant(params=b""))
    assert "waits for the answer" in producer.ask().reason
    assert producer.ask().params == b""


def test_an_offer_whose_lease_ended_says_so() -> None:
    producer = Producer()
    producer.grant(grant())
    producer.ledger.expire(16.0)
    assert "ended" in producer.ask().reason


def test_who_gave_up_first_frees_the_blocks_as_soon_as_they_come() -> None:
    producer = Producer()
    producer.ask()
    release = Release(epoch=EPOCH, transfer_id=NAME, claimant="d/r", tp_rank=0, tp_size=1, received=False)
    producer.ledger.release(release)
    producer.grant(grant())
    assert producer.ledger.take_finished() == ["r"]


def test_one_name_given_to_two_prefills_keeps_the_blocks_of_one() -> None:
    """Without it the first request's blocks would be kept for ever."""
    producer = Producer()
    producer.grant(grant())
    producer.ledger.grant(
        Grant(RequestId("second"), NAME, 20, (BlockIds([3, 4]),), (0,), "0" * 32, params=b"x"), 0.0
    )
    assert producer.ledger.take_finished() == ["second"]
    assert producer.ledger.open_count == 1
    assert producer.ask() == told(b"params")


def test_who_does_not_ask_again_is_forgotten() -> None:
    producer = Producer()
    producer.ask("gone", now_s=0.0)
    producer.ask("here", now_s=10.0)
    producer.awaited.expire(session_awaited.REMEMBER_S + 1.0)
    assert producer.grant(grant()) == [("here", told(b"params"))]


def test_nobody_can_make_it_remember_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_awaited, "MAX_AWAITED", 10)
    producer = Producer()
    for number in range(50):
        producer.ask(transfer_id=transfer_of(str(number)))
    assert producer.awaited.count == 10
    for number in range(50):
        producer.ask(f"asker {number}")
    assert len(producer.grant(grant())) == session_awaited.MAX_ASKERS


# -- what routers say ----------------------------------------------------------------------------


ADDRESS = RankAddress("10.0.0.7", 5600, Epoch(99))


def decode_leg(**changes: Any) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_engine_id": engine_place("any@thing", ADDRESS),
        "transfer_id": "a name",
        **changes,
    }


def test_both_legs_read_the_same_id_out_of_a_name() -> None:
    promise = parse_promise(decode_leg())
    assert promise is not None
    assert promise.transfer_id == promised_to({"do_remote_decode": True, "transfer_id": "a name"}) == NAME
    assert (promise.address.host, promise.address.port) == ("10.0.0.7", 5600)
    assert promised_to({"transfer_id": "another"}) != NAME


def test_an_ipv6_address_is_read() -> None:
    for host in ("fe80::1", "fe80::1%br-lan", "fe80::1%veth_0"):
        for place in (engine_place("p", RankAddress(host, 1, EPOCH)), f"p@[{host}]:1"):
            promise = parse_promise(decode_leg(remote_engine_id=place))
            assert promise is not None
            assert (promise.address.host, promise.address.port) == (host, 1)


def test_a_router_that_waits_names_nothing() -> None:
    assert promised_to({"do_remote_decode": True}) is None
    assert promised_to({"do_remote_decode": True, "transfer_id": None}) is None
    assert promised_to({"transfer_id": 5}) is None
    assert promised_to({"transfer_id": ""}) is None
    assert promised_to({"transfer_id": "x" * 513}) is None


@pytest.mark.parametrize("changes", [{"remote_block_ids": [[1]]}, {"transfer_id": None}, {"transfer_id": 3}])
def test_a_leg_that_has_its_offer_waits_for_nothing(changes: dict[str, Any]) -> None:
    assert parse_promise(decode_leg(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"transfer_id": ""}, "0 characters"),
        ({"transfer_id": "x" * 513}, "513 characters"),
        ({"remote_engine_id": None}, "NAME@IP:PORT"),
        ({"remote_engine_id": 5}, "NAME@IP:PORT"),
        ({"remote_engine_id": "p"}, "NAME@IP:PORT"),
        ({"remote_engine_id": "p@1.2.3.4:5\n"}, "NAME@IP:PORT"),
        ({"remote_engine_id": "p@example.org:5"}, "no address"),
        ({"remote_engine_id": "p@[::1:5"}, "NAME@IP:PORT"),
        ({"remote_engine_id": "p@::1]:5"}, "NAME@IP:PORT"),
        ({"remote_engine_id": "p@1.2.3.4:0"}, "port 0"),
        ({"remote_engine_id": "p@1.2.3.4:65536"}, "port 65536"),
    ],
)
def test_what_cannot_be_read_is_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        parse_promise(decode_leg(**changes))
