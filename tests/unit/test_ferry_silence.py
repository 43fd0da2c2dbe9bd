"""A producer whose process hangs: its kernel takes calls and bytes, and nobody answers."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace
from tests.unit.control_wire import ControlWire, Fate
from tests.unit.test_awaited_ends import answers, expect, grant, wait_for
from tests.unit.test_ferry_lost_peers import LOCAL, TABLES, link_of, peers

from stateferry.config import Config
from stateferry.ferry import connection as ferry_connection
from stateferry.ferry import inquiries as ferry_inquiries
from stateferry.ferry import links as ferry_links
from stateferry.ferry.asking import Asking
from stateferry.ferry.links import Links
from stateferry.testing.peers import EngineRank, small_layout, wait_until
from stateferry.wire import Offer, parse_offer

QUICK = Config(handshake_timeout_s=0.3, lease_s=600)
PATIENT = Config(handshake_timeout_s=600, lease_s=600)
NAMED = re.compile(r"127\.0\.0\.1:\d+ has not answered since \d\d:\d\d:\d\d UTC: its process hangs")
CHILD = """
import json, sys
from stateferry.config import Config
from stateferry.testing.peers import EngineRank
from stateferry.wire import offer_to_params
with EngineRank("p", config=Config(lease_s=600), transport="cma") as producer:
    for name in ("before", "meanwhile", "after"):
        print(json.dumps(offer_to_params(producer.grant(40, ((1, 2, 3), (4,)), name))), flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life are asked for a hundred times as often, and waited for a hundredth of the time."""
    quick = {option: value // 100 for option, value in ferry_connection.SIGN_OF_LIFE.items()}
    monkeypatch.setattr(ferry_connection, "SIGN_OF_LIFE", quick)
    monkeypatch.setattr(ferry_links, "LOOK_S", 0.005)
    monkeypatch.setattr(ferry_inquiries, "REPEAT_S", 0.05)


def use(rank: EngineRank, config: Config) -> None:
    """From now on it is as patient as that. Before, how quick this machine is decides nothing."""
    rank.config = config
    loop = rank.ferry._loop
    assert loop is not None
    consumer = loop._consumer
    consumer._config = consumer._links._config = consumer.inquiries._config = config
    loop._producer.ledger._lease_s = config.lease_s


@contextmanager
def wired(config: Config) -> Iterator[tuple[EngineRank, ControlWire, EngineRank]]:
    """A producer, the wire to it, and a consumer that has read from it."""
    with (
        EngineRank("p", config=PATIENT) as producer,
        ControlWire(producer.address.port if producer.address else 0, lambda message: Fate.PASS) as wire,
        EngineRank("d", config=PATIENT) as consumer,
    ):
        assert not consumer.read("met", wire.through(producer.grant(40, TABLES, "met")), LOCAL).failed
        producer.wait_sent("met")
        use(producer, config)
        use(consumer, config)
        try:
            yield producer, wire, consumer
        finally:
            wire.hangs = False  # or the end waits for what was not sent


def hang(patience_s: float = 20.0) -> None:
    with wired(QUICK) as (_, wire, consumer):
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1}, patience_s)


def refused(consumer: EngineRank, name: str, offer: Offer) -> str:
    """Open a request and wait until it is lost; its reason."""
    consumer.open(name, offer)
    assert consumer.wait_lost(name).lost == {name}
    consumer.close(name)
    (report,) = consumer.wait_idle().reports
    return report.reason


def test_a_producer_that_hangs_is_not_called_ready() -> None:
    """Symptom: `stateferry_peers` went on saying `ready` until a hand-off failed."""
    hang()


def test_a_watch_that_asks_for_no_sign_of_life_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry_connection, "SIGN_OF_LIFE", {})
    with pytest.raises(TimeoutError):
        hang(1.0)


def leave_it_and_come_back(patience_s: float = 20.0) -> None:
    """Legs for a producer that hangs fail at once, by its name; when it answers, hand-offs go again."""
    with wired(QUICK) as (producer, wire, consumer):
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1})
        use(consumer, PATIENT)
        assert NAMED.match(refused(consumer, "meanwhile", wire.through(producer.grant(40, TABLES, "old"))))
        assert peers(consumer) == {"silent": 1}
        wire.hangs = False
        wait_until(lambda: peers(consumer) == {"ready": 1}, patience_s)
        producer.wait_sent("old", patience_s)
        assert not consumer.read("after", wire.through(producer.grant(40, TABLES, "new")), LOCAL).failed
        assert producer.ferry.counters.claimed == 2


def test_a_leg_for_a_producer_that_hangs_fails_at_once_and_later_ones_go_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Symptom: each such leg waited for ten seconds before its prompt was computed."""
    leave_it_and_come_back()
    said = [message for message in caplog.messages if "127.0.0.1" in message and "answer" in message]
    assert len(said) == 2, "not once for each change"
    assert NAMED.match(said[0])
    assert said[1].endswith("answers again")


def test_a_leg_that_came_while_its_producer_was_greeted_again_fails_when_that_falls_silent() -> None:
    """Symptom: it was claimed over the silent link, and waited for a lease."""
    with wired(QUICK) as (producer, wire, consumer):
        use(consumer, PATIENT)
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"greeting": 1})
        consumer.open("waits", wire.through(producer.grant(40, TABLES, "waits")))
        wait_until(lambda: consumer.ferry.open_count == 1 and bool(link_of(consumer).requests))
        use(consumer, QUICK)
        assert consumer.wait_lost("waits").lost == {"waits"}
        assert peers(consumer) == {"silent": 1}
        assert not link_of(consumer).claims_sent_s


def test_a_silent_producer_whose_answer_nobody_takes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Links.welcomed

    def deaf(links: Links, link: ferry_links.Link, answer: object) -> None:
        if link.state is not ferry_links.LinkState.SILENT:
            right(links, link, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(Links, "welcomed", deaf)
    with pytest.raises(TimeoutError):
        leave_it_and_come_back(0.5)


def test_a_hand_off_that_is_open_lives_through_a_producer_that_hangs_for_a_while() -> None:
    with wired(PATIENT) as (producer, wire, consumer):
        offer = wire.through(producer.grant(40, TABLES, "open"))
        consumer.open("open", offer)
        wait_until(lambda: producer.ferry.counters.claimed == 2 and not link_of(consumer).claims_sent_s)
        wire.hangs = True
        wait_until(lambda: link_of(consumer).broke)
        assert peers(consumer) == {"ready": 1}
        consumer.load("open", offer, LOCAL)
        # Its bytes need nobody over there.
        assert not consumer.wait_received("open").failed
        wire.hangs = False
        producer.wait_sent("open")


def test_a_silent_producer_that_died_is_called_failed_and_soon_forgotten() -> None:
    with EngineRank("d", config=PATIENT) as consumer:
        with EngineRank("p", config=PATIENT) as producer:
            assert producer.address is not None
            with ControlWire(producer.address.port, lambda message: Fate.PASS) as wire:
                assert not consumer.read("r", wire.through(producer.grant(40, TABLES)), LOCAL).failed
                use(consumer, QUICK)
                wire.hangs = True
                wait_until(lambda: peers(consumer) == {"silent": 1})
        wait_until(lambda: peers(consumer) == {"failed": 1})
        assert "cannot be dialled" in link_of(consumer).reason


def test_a_silent_producer_that_was_restarted_is_called_failed() -> None:
    with wired(QUICK) as (_, wire, consumer):
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1})
        with EngineRank("p", layout=small_layout("p")) as another:
            assert another.address is not None
            wire.port_behind = another.address.port
            wire.hangs = False
            wait_until(lambda: peers(consumer) == {"failed": 1})
            assert "it was restarted" in link_of(consumer).reason


def test_a_silent_producer_is_forgotten_when_nobody_needed_it_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with wired(QUICK) as (_, wire, consumer):
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1})
        monkeypatch.setattr(ferry_links, "IDLE_LINK_S", 0.0)
        wait_until(lambda: peers(consumer) == {})


def ask_for_an_offer_of_the_silent(patience_s: float = 20.0) -> None:
    """Both legs at once: the request is told at once, and the offer that is made later is given back."""
    with wired(QUICK) as (producer, wire, consumer):
        assert producer.address is not None
        wire.hangs = True
        wait_until(lambda: peers(consumer) == {"silent": 1})
        use(consumer, PATIENT)
        wait_for(consumer, expect("r", replace(producer.address, port=wire.port)))
        wait_until(lambda: consumer.ferry.open_count == 0, patience_s)
        reason = answers(consumer, "r")["r"].reason
        assert NAMED.search(reason)
        wire.hangs = False
        wait_until(lambda: producer.ferry._loop._producer.awaited.count == 1)  # type: ignore[union-attr]
        grant(producer, "r")
        assert producer.wait_sent("prefill r").sent == {"prefill r"}


def test_a_leg_that_awaits_an_offer_of_a_producer_that_hangs_is_told_at_once() -> None:
    ask_for_an_offer_of_the_silent()


def test_a_leg_that_waits_for_the_silent_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Links, "why_silent", lambda links, host, port: "")
    with pytest.raises(TimeoutError):
        ask_for_an_offer_of_the_silent(0.5)


def let_a_claim_go_unanswered(patience_s: float = 20.0) -> None:
    """Over there ZeroMQ lives, and the thread that answers does not: the link is doubted."""
    with wired(Config(handshake_timeout_s=0.3, lease_s=0.5)) as (producer, wire, consumer):
        service = producer.ferry._loop._producer  # type: ignore[union-attr]
        service._answer = lambda sender, message: None  # type: ignore[method-assign]
        offer = wire.through(producer.grant(40, TABLES, "r"))
        consumer.open("r", offer)
        assert consumer.wait_lost("r").lost == {"r"}
        consumer.close("r")
        wait_until(lambda: peers(consumer) == {"silent": 1}, patience_s)


def test_a_producer_that_leaves_a_claim_unanswered_is_greeted_again() -> None:
    """Symptom: every leg waited for a lease."""
    let_a_claim_go_unanswered()


def test_a_producer_that_is_trusted_whatever_it_leaves_unanswered_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Asking.unanswered

    def trusting(asking: Asking, handoff: object, now_s: float, patience_s: float) -> str:
        why = right(asking, handoff, now_s, patience_s)  # type: ignore[arg-type]
        for link in asking._links._links.values():
            link.broke = False
        return why

    monkeypatch.setattr(Asking, "unanswered", trusting)
    with pytest.raises(TimeoutError):
        let_a_claim_go_unanswered(0.5)


def test_a_process_that_is_stopped_and_goes_on() -> None:
    """The same with a real one, stopped by a signal."""
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        before, meanwhile, after = (parse_offer(json.loads(child.stdout.readline())) for _ in range(3))
        with EngineRank("d", config=PATIENT, transport="cma") as consumer:
            assert not consumer.read("before", before, LOCAL).failed
            use(consumer, QUICK)
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: peers(consumer) == {"silent": 1})
            assert NAMED.match(refused(consumer, "meanwhile", meanwhile))
            use(consumer, PATIENT)
            child.send_signal(signal.SIGCONT)
            wait_until(lambda: peers(consumer) == {"ready": 1})
            assert not consumer.read("after", after, LOCAL).failed
    finally:
        child.kill()
        child.communicate()
