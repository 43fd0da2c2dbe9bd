"""One hand-off on each side, as state machines without I/O."""

from stateferry.session.awaited import AwaitedOffers
from stateferry.session.backoff import pause_s
from stateferry.session.clock import Clock, SystemClock, VirtualClock
from stateferry.session.consumer import Handoff, ReadStatus, claimant_name, producer_ranks
from stateferry.session.lease import RENEWALS_PER_LEASE, Lease
from stateferry.session.orders import (
    Answered,
    Cause,
    Close,
    Expect,
    Grant,
    GroupLoad,
    Kept,
    Load,
    Open,
    Orders,
    Outcome,
    Place,
    Report,
    Results,
    Trace,
    Withdrawal,
    refused,
)
from stateferry.session.producer import Counters, Holding, Ledger, releases_expected
from stateferry.session.recovery import Next, Recovery

__all__ = [
    "RENEWALS_PER_LEASE",
    "Answered",
    "AwaitedOffers",
    "Cause",
    "Clock",
    "Close",
    "Counters",
    "Expect",
    "Grant",
    "GroupLoad",
    "Handoff",
    "Holding",
    "Kept",
    "Lease",
    "Ledger",
    "Load",
    "Next",
    "Open",
    "Orders",
    "Outcome",
    "Place",
    "ReadStatus",
    "Recovery",
    "Report",
    "Results",
    "SystemClock",
    "Trace",
    "VirtualClock",
    "Withdrawal",
    "claimant_name",
    "pause_s",
    "producer_ranks",
    "refused",
    "releases_expected",
]
