"""Every kind of message, damaged, against a live producer and a live consumer: refused or dropped, and no
hand-off of others is harmed. `make fuzz` goes on for longer."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stateferry.errors import ProtocolError, StateFerryError
from stateferry.ferry import links
from stateferry.ids import Epoch, TransferId
from stateferry.layout.fingerprint import decode_layout, encode_layout
from stateferry.layout.plan import make_plan
from stateferry.testing.fuzz import ConsumerTarget, ProducerTarget
from stateferry.testing.junk import damaged, damaged_bytes, damaged_frame
from stateferry.testing.peers import small_layout
from stateferry.transport.base import TransportOptions
from stateferry.transport.cma import CmaTransport
from stateferry.wire import (
    Claim,
    ClaimAnswer,
    Claimed,
    DigestAnswer,
    Release,
    Renewal,
    decode_message,
    encode_message,
)

FUZZ = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


SEEDS = st.integers(0, (1 << 64) - 1)
"""Not one draw for each choice: how many there are depends on epochs and ids, which differ between runs."""


@pytest.fixture(scope="module")
def producer_target() -> Iterator[ProducerTarget]:
    with ProducerTarget() as target:
        yield target


@pytest.fixture(scope="module")
def consumer_target() -> Iterator[ConsumerTarget]:
    with (
        patch.object(links, "MAX_PAUSE_S", 0.01),
        patch.object(links, "IDLE_LINK_S", 0.01),
        ConsumerTarget() as target,
    ):
        yield target


@settings(FUZZ, max_examples=1500)
@given(seed=SEEDS)
def test_a_producer_survives_any_message(producer_target: ProducerTarget, seed: int) -> None:
    choose = Random(seed).randrange
    messages = producer_target.messages()
    picked = [messages[choose(len(messages))] for _ in range(1 + choose(4))]
    producer_target.send([damaged_frame(message, choose) for message in picked])


@settings(FUZZ, max_examples=800)
@given(seed=SEEDS)
def test_a_consumer_survives_any_answer(consumer_target: ConsumerTarget, seed: int) -> None:
    choose = Random(seed).randrange
    offer = consumer_target.offer()
    messages = consumer_target.messages(offer)
    frames = [encode_message(messages[0])] if choose(3) else []
    frames += [damaged_frame(messages[choose(len(messages))], choose) for _ in range(choose(5))]
    consumer_target.serve(offer, frames, load=bool(choose(2)))


@settings(FUZZ, max_examples=1200)
@given(seed=SEEDS)
def test_any_layout_is_planned_or_refused(seed: int) -> None:
    """Both ways round: a producer plans for its consumers' digests, a consumer for its reads."""
    choose = Random(seed).randrange
    ours = small_layout("d", tp_size=1 + choose(2))
    tree = msgspec.msgpack.decode(encode_layout(ours))
    for _ in range(1 + choose(3)):
        tree = damaged(tree, choose)
    with contextlib.suppress(StateFerryError):
        theirs = decode_layout(msgspec.msgpack.encode(tree))
        for plan in (make_plan(ours, theirs), make_plan(theirs, ours, merge=False)):
            with contextlib.suppress(ValueError):
                plan.pieces(0, [1], [1])


@settings(FUZZ, max_examples=400)
@given(seed=SEEDS)
def test_any_cma_registration_connects_or_is_refused(seed: int) -> None:
    choose = Random(seed).randrange
    transport = CmaTransport(TransportOptions())
    registration = transport.register(())
    tree = damaged(msgspec.msgpack.decode(registration), choose)
    frame = msgspec.msgpack.encode(tree) if choose(3) else damaged_bytes(registration, choose)
    with contextlib.suppress(StateFerryError):
        transport.connect(frame, 1.0)
    transport.close()


def test_good_messages_of_a_stranger_are_answered(producer_target: ProducerTarget) -> None:
    """Without this, a target that refuses everything would pass all of the above."""
    messages = producer_target.messages()
    hello, claim, renewal, digest = messages[:4]
    answers = producer_target.send([encode_message(m) for m in (hello, claim, renewal, digest)])
    assert [type(a).__name__ for a in answers] == ["Welcome", "ClaimAnswer", "RenewalAnswer", "DigestAnswer"]
    assert isinstance(answers[1], ClaimAnswer)
    assert isinstance(answers[3], DigestAnswer)
    assert not answers[1].reason
    assert len(answers[3].digests) == 2
    producer_target.send([encode_message(messages[4])])


def test_a_stranger_who_guesses_wrong_learns_nothing_of_others(producer_target: ProducerTarget) -> None:
    victim = producer_target.victim.transfer_id
    messages = producer_target.messages()
    answers = producer_target.send([encode_message(m) for m in messages])
    assert victim not in str(answers)
    assert "victim" not in str(answers)


@pytest.mark.parametrize("kind", [Claim, Release])
def test_even_who_knows_its_id_takes_no_claimed_hand_off(
    producer_target: ProducerTarget, kind: type[Claim | Release]
) -> None:
    message = next(m for m in producer_target.messages() if isinstance(m, kind))
    theirs = msgspec.structs.replace(message, transfer_id=producer_target.victim.transfer_id)
    (answer,) = producer_target.send([encode_message(theirs)])
    assert getattr(answer, "reason", "") or answer.known is False  # type: ignore[union-attr]


OWN, EPOCH = TransferId("0" * 32), Epoch(1)
MORE = (
    Renewal(epoch=EPOCH, sequence=1, claims=(Claimed(OWN, "s"),)),
    Release(epoch=EPOCH, transfer_id=OWN, claimant="s", tp_rank=0, tp_size=1, received=True),
)


def test_damage_still_reaches_the_services_of_every_kind() -> None:
    """Frames that no decoder reads try nothing behind it."""
    random = Random(1)
    with ConsumerTarget() as target:
        kinds = [*target.messages(target.offer()), *MORE]
    for message in kinds:
        frames = [damaged_frame(message, random.randrange) for _ in range(1000)]
        read = 0
        for frame in frames:
            with contextlib.suppress(ProtocolError):
                read += decode_message(frame) != message
        assert 2 < read < 990, type(message).__name__


def test_the_long_fuzzer_says_what_it_needs() -> None:
    tool = Path(__file__).parents[2] / "tools" / "fuzz_wire.py"
    code = f"import runpy, sys; sys.modules['atheris'] = None; runpy.run_path({str(tool)!r})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install atheris" in result.stderr
    assert "Traceback" not in result.stderr
