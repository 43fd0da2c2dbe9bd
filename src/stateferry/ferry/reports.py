"""What a hand-off leaves behind on one consumer rank: for logs, metrics, spans and the response."""

from stateferry.ferry.reading import Reading
from stateferry.session import Clock, Handoff, Outcome, Report


def peer_of(handoff: Handoff) -> str:
    """Where the producer ranks of a hand-off listen."""
    addresses = (handoff.offer.ranks[rank] for rank in handoff.ranks)
    return ", ".join(f"{a.host}:{a.port}" for a in addresses)


def report_of(
    handoff: Handoff, outcome: Outcome, reading: Reading | None, tp_rank: int, clock: Clock
) -> Report:
    """The report of a hand-off that ends now. `reading` is None where it was never given blocks."""
    now_s = clock.now_s()
    groups = handoff.load.groups if handoff.load else ()
    nothing = (0,) * len(groups)
    # Without a load order the whole of it was spent in the queue.
    read = reading if reading is not None else Reading(handoff, lambda: True, now_s)
    return Report(
        request_id=handoff.request_id,
        transfer_id=handoff.offer.transfer_id,
        outcome=outcome,
        reason=reason_of(handoff, read),
        cause=handoff.cause,
        tokens=handoff.offer.num_tokens,
        groups=tuple(g.group for g in groups),
        bytes_by_group=read.bytes_by_group or nothing,
        pieces_by_group=read.pieces_by_group or nothing,
        queued_s=read.ordered_s - handoff.opened_s,
        handshake_s=handoff.met_s - handoff.opened_s,
        waited_s=(read.planned_s or now_s) - read.ordered_s,
        plan_s=read.posted_s - read.planned_s if read.posted else 0.0,
        post_s=read.post_s,
        wire_s=(read.done_s or now_s) - read.posted_s if read.posted else 0.0,
        total_s=now_s - read.ordered_s,
        retried_s=tuple(at_s - read.ordered_s for at_s in read.retried_s),
        ended_unix_s=clock.unix_s(),
        tp_rank=tp_rank,
        peer=peer_of(handoff),
        trace=handoff.trace,
    )


def reason_of(handoff: Handoff, reading: Reading) -> str:
    """Why it failed: what ended it, and what had gone wrong before that."""
    ended = handoff.failure
    before = next((part.transfer.error for part in reading.parts if part.transfer.error), "")
    return f"{ended}; its read had failed: {before}" if ended and before not in ended else ended
