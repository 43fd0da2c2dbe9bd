"""Faults of peers in the log: the first few in full, all others counted and told together."""

from dataclasses import dataclass, field

INTERVAL_S = 10.0
SHOWN = 5
"""Faults of one peer within `INTERVAL_S` that have a line of their own."""
MAX_PEERS = 256
OTHERS = "others"
"""Name of all peers past `MAX_PEERS`: a client may name as many as it likes."""


@dataclass(slots=True)
class _Faults:
    until_s: float
    count: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    last: str = ""


class PeerLog:
    """One thread. Holds nothing of a peer whose last fault is told."""

    def __init__(self) -> None:
        self._faults: dict[str, _Faults] = {}

    def may_show(self, peer: str, kind: str, what: str, now_s: float) -> bool:
        """Note a fault of `peer`: its kind in a word, and in full. True: it gets a line of its own."""
        if peer not in self._faults and len(self._faults) >= MAX_PEERS:
            peer = OTHERS
        faults = self._faults.setdefault(peer, _Faults(now_s + INTERVAL_S))
        faults.count += 1
        faults.kinds[kind] = faults.kinds.get(kind, 0) + 1
        faults.last = what
        return faults.count <= SHOWN

    def summaries(self, now_s: float) -> list[str]:
        """A line for each peer that had more faults than were shown, once its interval is over."""
        over = [peer for peer, faults in self._faults.items() if now_s >= faults.until_s]
        lines = []
        for peer in over:
            faults = self._faults.pop(peer)
            if faults.count > SHOWN:
                kinds = ",".join(f"{kind}:{count}" for kind, count in faults.kinds.items())
                lines.append(
                    f"peer={peer} faults={faults.count} within_s={INTERVAL_S:g} kinds={kinds} "
                    f"not_shown={faults.count - SHOWN} last={faults.last}"
                )
        return lines
