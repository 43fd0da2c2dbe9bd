"""What the fuzz tests must notice: a service that trips over a message, and harm to another's hand-off.

In a file of its own, so that what goes wrong here on purpose is not counted there.
"""

import contextlib
from unittest.mock import patch

import msgspec
import pytest

from stateferry.ferry import links, producer
from stateferry.testing.fuzz import ConsumerTarget, ProducerTarget
from stateferry.wire import Release, encode_message


class Careless(Exception):
    pass


def test_an_exception_out_of_an_answer_is_noticed() -> None:
    """The mutant: a service that does not expect what a message makes it raise."""

    def raises(*_: object) -> None:
        raise Careless

    with (
        pytest.raises(AssertionError, match="Careless"),
        ProducerTarget() as target,
        patch.object(producer.ProducerService, "_greet", raises),
    ):
        target.send([encode_message(target.messages()[0])])


def test_a_consumer_that_trips_over_a_message_is_noticed() -> None:
    def raises(*_: object) -> None:
        raise Careless

    with (  # noqa: PT012
        pytest.raises(AssertionError, match="Careless"),
        ConsumerTarget() as target,
        patch.object(links.Links, "welcomed", raises),
    ):
        offer = target.offer()
        with contextlib.suppress(TimeoutError), patch("stateferry.testing.peers.EngineRank.wait_lost"):
            target.serve(offer, [encode_message(target.messages(offer)[0])], load=False)


def test_harm_to_the_others_hand_off_is_noticed() -> None:
    with pytest.raises(AssertionError, match="victim"), ProducerTarget() as target:  # noqa: PT012
        release = next(m for m in target.messages() if isinstance(m, Release))
        theirs = msgspec.structs.replace(release, transfer_id=target.victim.transfer_id, claimant="d/victim")
        target.send([encode_message(theirs)])
