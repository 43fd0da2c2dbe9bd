"""The producer's ledger: what it promises, to whom, and that nothing stays behind."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stateferry.block_ids import BlockIds
from stateferry.ids import Epoch, RequestId, TransferId
from stateferry.layout.digest import table_digest
from stateferry.session import Grant, Ledger, releases_expected
from stateferry.session.producer import MAX_PARKED, PARK_S
from stateferry.wire import MAX_TEXT, Claim, Claimed, Release, Renewal

LEASE_S = 15.0
PREFIX = "f" * 32
TABLES = table_digest(40, ((1, 2, 3),), (0,), PREFIX)


def grant(name: str) -> Grant:
    return Grant(RequestId(f"request-{name}"), TransferId(name), 40, (BlockIds((1, 2, 3)),), (0,), PREFIX)


def claim(name: str, claimant: str = "d/r", rank: int = 0, size: int = 1, tables: str = TABLES) -> Claim:
    return Claim(
        epoch=Epoch(1),
        transfer_id=TransferId(name),
        claimant=claimant,
        tp_rank=rank,
        tp_size=size,
        table_digest=tables,
    )


def release(name: str, claimant: str = "d/r", rank: int = 0, size: int = 1) -> Release:
    return Release(
        epoch=Epoch(1),
        transfer_id=TransferId(name),
        claimant=claimant,
        tp_rank=rank,
        tp_size=size,
        received=True,
    )


def renewal(*names: str, claimant: str = "d/r") -> Renewal:
    claims = tuple(Claimed(TransferId(n), claimant) for n in names)
    return Renewal(epoch=Epoch(1), sequence=1, claims=claims)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(Epoch(1), 1, LEASE_S)


def test_a_grant_ends_once_when_its_lease_does(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    assert ledger.expire(LEASE_S - 0.001) == ([], [])
    ended, _ = ledger.expire(LEASE_S)
    assert [h.grant.transfer_id for h in ended] == ["a"]
    assert ledger.take_finished() == ["request-a"]
    assert ledger.expire(100.0) == ([], [])
    assert ledger.take_finished() == []


def test_an_expired_entry_behind_a_renewed_one_is_found(ledger: Ledger) -> None:
    ledger.grant(grant("head"), 0.0)
    ledger.claim(claim("head"), "s", 0.0)
    ledger.grant(grant("behind"), 0.0)
    ledger.renew(renewal("head"), 10.0)
    ended, _ = ledger.expire(LEASE_S)
    assert [h.grant.transfer_id for h in ended] == ["behind"]


def test_a_claim_takes_the_offer_for_one_claimant(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    first = ledger.claim(claim("a", "d/one"), "s1", 1.0)
    second = ledger.claim(claim("a", "d/two"), "s2", 1.0)
    assert first is not None
    assert (first.reason, first.lease_s) == ("", LEASE_S)
    assert second is not None
    assert "already taken by d/one" in second.reason


def test_a_rank_that_did_not_hear_that_its_claim_was_granted_claims_again_and_is_told(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    first = ledger.claim(claim("a"), "s", 1.0)
    assert ledger.claim(claim("a"), "over another connection", 2.0) == first
    assert ledger.counters.claimed == 1
    other = ledger.claim(claim("a", "d/two"), "s", 2.0)
    assert other is not None
    assert "already taken by d/r" in other.reason


@pytest.mark.parametrize("size", [1, 2], ids=["all of it", "part of it"])
def test_what_a_rank_has_released_it_cannot_claim_again(size: int) -> None:
    """An offer serves once."""
    ledger = Ledger(Epoch(1), 1, LEASE_S)
    ledger.grant(grant("a"), 0.0)
    for rank in range(size):
        ledger.claim(claim("a", rank=rank, size=size), "s", 1.0)
    ledger.release(release("a", size=size))
    again = ledger.claim(claim("a", size=size), "s", 2.0)
    assert again is not None
    assert "released" in again.reason


def test_a_claim_that_waits_for_its_grant_and_is_asked_again_is_answered_once_to_who_asked_last(
    ledger: Ledger,
) -> None:
    assert ledger.claim(claim("a"), "former connection", 0.0) is None
    assert ledger.claim(claim("a", "d/two"), "other", 0.0) is None
    assert ledger.claim(claim("a"), "connection", 4.0) is None
    assert ledger.parked_count == 2
    answers = ledger.grant(grant("a"), 4.5)
    assert [(sender, bool(answer.reason)) for sender, answer in answers] == [
        ("connection", False),
        ("other", True),
    ]


def test_asking_again_makes_nobody_wait_longer_for_an_offer_that_was_never_made(ledger: Ledger) -> None:
    ledger.claim(claim("a"), "former connection", 0.0)
    ledger.claim(claim("a"), "connection", 4.0)
    _, ((sender, answer),) = ledger.expire(PARK_S)
    assert sender == "connection"
    assert "was never made" in answer.reason


def test_a_claim_extends_the_lease(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a"), "s", 14.0)
    assert ledger.expire(20.0)[0] == []
    assert ledger.expire(14.0 + LEASE_S)[0]


def test_a_rank_that_gives_up_early_speaks_for_the_others_and_they_hear_of_it(ledger: Ledger) -> None:
    """Symptom: the other rank's claim was dropped without an answer, and its request waited a minute."""
    for rank in (0, 1):
        assert ledger.claim(claim("a", rank=rank, size=2), f"sender {rank}", 0.0) is None
    ledger.release(release("a", rank=0, size=2))
    assert ledger.grant(grant("a"), 1.0) == []
    assert ledger.take_finished() == ["request-a"]
    _, ((sender, answer),) = ledger.expire(PARK_S)
    assert sender == "sender 1"
    assert "was released" in answer.reason
    ledger.check_integrity()
    assert ledger.parked_count == 0


def test_a_claim_before_its_grant_waits_and_is_answered_with_it(ledger: Ledger) -> None:
    assert ledger.claim(claim("a"), "sender", 0.0) is None
    ((sender, answer),) = ledger.grant(grant("a"), 1.0)
    assert (sender, answer.reason) == ("sender", "")
    assert ledger.parked_count == 0


def test_a_claim_for_nothing_is_refused_after_a_while(ledger: Ledger) -> None:
    assert ledger.claim(claim("a"), "sender", 0.0) is None
    _, ((sender, answer),) = ledger.expire(PARK_S)
    assert sender == "sender"
    assert "was never made" in answer.reason


def test_parked_claims_are_bounded(ledger: Ledger) -> None:
    for i in range(MAX_PARKED):
        assert ledger.claim(claim(f"t{i}"), "s", 0.0) is None
    refused = ledger.claim(claim("one too many"), "s", 0.0)
    assert refused is not None
    assert refused.reason


def test_a_late_claim_is_told_what_became_of_the_offer(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.expire(LEASE_S)
    late = ledger.claim(claim("a"), "s", LEASE_S)
    assert late is not None
    assert "ended 15 s after" in late.reason


def test_renewal_names_what_is_lost(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a"), "s", 0.0)
    answer = ledger.renew(renewal("a", "gone"), 10.0)
    assert (answer.held, answer.lost) == (("a",), ("gone",))
    assert ledger.expire(24.0)[0] == []
    assert ledger.counters.late_renewals == 1


def test_release_of_another_claimant_frees_nothing(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a", "d/one"), "s", 0.0)
    assert not ledger.release(release("a", "d/two")).known
    assert ledger.open_count == 1
    assert ledger.release(release("a", "d/one")).known
    assert ledger.take_finished() == ["request-a"]


def test_a_release_that_comes_late_is_answered_and_counted(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.expire(LEASE_S)
    assert not ledger.release(release("a")).known
    assert ledger.counters.late_releases == 1


def test_an_offer_that_was_never_claimed_can_be_released(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    assert ledger.release(release("a")).known
    assert ledger.open_count == 0


@pytest.mark.parametrize(
    ("consumers", "producers", "expected"), [(1, 1, 1), (2, 2, 1), (8, 4, 2), (8, 1, 8), (4, 8, 1), (1, 8, 1)]
)
def test_every_producer_rank_knows_how_many_releases_come(
    consumers: int, producers: int, expected: int
) -> None:
    assert releases_expected(consumers, producers) == expected


def test_blocks_stay_until_the_last_consumer_rank_has_released() -> None:
    ledger = Ledger(Epoch(1), 1, LEASE_S)
    ledger.grant(grant("a"), 0.0)
    for rank in (0, 1):
        ledger.claim(claim("a", rank=rank, size=2), "s", 0.0)
    ledger.release(release("a", rank=1, size=2))
    ledger.release(release("a", rank=1, size=2))  # the same one twice is still one
    assert ledger.take_finished() == []
    ledger.release(release("a", rank=0, size=2))
    assert ledger.take_finished() == ["request-a"]


def test_a_claim_whose_tables_are_not_those_of_the_offer_is_refused_and_takes_nothing(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    forged = ledger.claim(claim("a", tables=table_digest(40, ((1, 2, 9),), (0,), PREFIX)), "s", 0.0)
    assert forged is not None
    assert "block tables" in forged.reason
    assert ledger.open_count == 1
    honest = ledger.claim(claim("a", "d/two"), "s", 0.0)
    assert honest is not None
    assert honest.reason == ""


def test_a_forged_claim_that_overtakes_its_grant_is_refused_with_it(ledger: Ledger) -> None:
    assert ledger.claim(claim("a", tables="0" * 32), "s", 0.0) is None
    ((_, answer),) = ledger.grant(grant("a"), 0.1)
    assert "block tables" in answer.reason


@pytest.mark.parametrize("claimant", ["d/two", "d/r/", "d/", ""])
def test_nobody_but_the_claimant_renews(ledger: Ledger, claimant: str) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a"), "s", 0.0)
    answer = ledger.renew(renewal("a", claimant=claimant), 10.0)
    assert (answer.held, answer.lost) == ((), ("a",))
    assert ledger.expire(LEASE_S)[0], "the lease was extended by another"


@pytest.mark.parametrize("claimant", ["d/r", ""])
def test_nobody_renews_what_nobody_claimed(ledger: Ledger, claimant: str) -> None:
    ledger.grant(grant("a"), 0.0)
    assert ledger.renew(renewal("a", claimant=claimant), 10.0).lost == ("a",)
    assert ledger.held_for(TransferId("a"), claimant) is None


def test_digests_are_made_for_the_claimant_alone(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a"), "s", 0.0)
    assert ledger.held_for(TransferId("a"), "d/two") is None
    assert ledger.held_for(TransferId("a"), "d/r") is not None


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (0, 1), (7, 4)])
def test_a_release_of_other_ranks_than_those_that_claimed_frees_nothing(rank: int, size: int) -> None:
    ledger = Ledger(Epoch(1), 1, LEASE_S)
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a", rank=0, size=2), "s", 0.0)
    assert not ledger.release(release("a", rank=rank, size=size)).known
    assert ledger.open_count == 1


def test_a_rank_that_its_engine_does_not_have_claims_nothing(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    answer = ledger.claim(claim("a", rank=2, size=2), "s", 0.0)
    assert answer is not None
    assert "nobody" in answer.reason


def test_a_refusal_is_short_enough_to_be_read_whatever_the_claimant_is_called(ledger: Ledger) -> None:
    ledger.grant(grant("a"), 0.0)
    ledger.claim(claim("a", "x" * MAX_TEXT), "s", 0.0)
    answer = ledger.claim(claim("a"), "s", 0.0)
    assert answer is not None
    assert 0 < len(answer.reason) <= MAX_TEXT


class LedgerMachine(RuleBasedStateMachine):
    """Any order of anything: each granted request finishes at most once, and at the end exactly once."""

    names = st.sampled_from(["a", "b", "c", "d"])
    claimants = st.sampled_from(["d/one", "d/two"])

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Epoch(1), 1, LEASE_S)
        self.now_s = 0.0
        self.lives: dict[str, int] = {}
        self.finished: list[str] = []

    @rule(name=names)
    def grant(self, name: str) -> None:
        life = self.lives[name] = self.lives.get(name, 0) + 1
        self.ledger.grant(grant(f"{name}{life}"), self.now_s)

    @rule(name=names, claimant=claimants)
    def claim(self, name: str, claimant: str) -> None:
        self.ledger.claim(claim(f"{name}{self.lives.get(name, 1)}", claimant), "s", self.now_s)

    @rule(name=names, claimant=claimants)
    def renew(self, name: str, claimant: str) -> None:
        self.ledger.renew(renewal(f"{name}{self.lives.get(name, 1)}", claimant=claimant), self.now_s)

    @rule(name=names, claimant=claimants)
    def release(self, name: str, claimant: str) -> None:
        self.ledger.release(release(f"{name}{self.lives.get(name, 1)}", claimant))

    @rule(seconds=st.sampled_from([0.1, 3.0, 16.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.ledger.expire(self.now_s)

    @invariant()
    def consistent(self) -> None:
        self.ledger.check_integrity()
        self.finished += self.ledger.take_finished()
        assert len(self.finished) == len(set(self.finished))

    def teardown(self) -> None:
        self.ledger.expire(self.now_s + LEASE_S + PARK_S)
        self.finished += self.ledger.take_finished()
        assert self.ledger.open_count == self.ledger.parked_count == 0
        granted = {f"request-{n}{i}" for n, lives in self.lives.items() for i in range(1, lives + 1)}
        assert set(self.finished) == granted


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedger = LedgerMachine.TestCase
