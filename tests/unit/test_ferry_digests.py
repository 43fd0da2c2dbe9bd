"""A producer rank is asked for digests only when it is known to hold the offer."""

from stateferry.config import Config, Verify
from stateferry.testing.peers import EngineRank, wait_until


def test_digests_wait_for_a_grant_that_the_read_overtook() -> None:
    """The response reaches the consumer before the producer's worker hears of it from its scheduler."""
    with EngineRank("p") as producer, EngineRank("d", config=Config(verify=Verify.ALL)) as consumer:
        producer.write_tags(seed=1)
        offer = producer.offer(40, ((1, 2, 3), (4,)))
        consumer.open("r", offer)
        consumer.load("r", offer, ((5, 6, 7), (8,)))
        wait_until(lambda: consumer.page(1, 8) == producer.page(1, 4))
        assert "r" not in consumer.ferry.take().received
        producer.submit_grant(offer)
        assert not consumer.wait_received("r").failed
