"""What a consumer rank says to a producer rank about one hand-off."""

from stateferry.layout.spec import CacheLayout
from stateferry.session import Handoff
from stateferry.wire import Claim, RankAddress, Release


def claim_of(handoff: Handoff, address: RankAddress, layout: CacheLayout, claimant: str) -> Claim:
    """This offer is to be `claimant`'s, by the tables that it was given."""
    return Claim(
        epoch=address.epoch,
        transfer_id=handoff.offer.transfer_id,
        claimant=claimant,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        table_digest=handoff.table_digest,
    )


def release_of(
    handoff: Handoff, address: RankAddress, layout: CacheLayout, claimant: str, received: bool
) -> Release:
    """It wants nothing (more) from the offer."""
    return Release(
        epoch=address.epoch,
        transfer_id=handoff.offer.transfer_id,
        claimant=claimant,
        tp_rank=layout.tp_rank,
        tp_size=layout.tp_size,
        received=received,
    )
