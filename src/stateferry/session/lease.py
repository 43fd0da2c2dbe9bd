"""The consumer's view of one producer rank's promise to keep its blocks.

    |---- claim sent ---- answer ---- renewal sent ---- answer ----|
          ^ counted from here         ^ and then from here

The consumer counts from when it *sent* what the producer answered; the producer counts from when it
received it, which is later. So the consumer's idea of the end is never after the producer's, and no
two clocks are compared.
"""

from dataclasses import dataclass

RENEWALS_PER_LEASE = 3
"""A renewal is sent every third of a lease, so two may be lost without harm."""


@dataclass(slots=True)
class Lease:
    """Held from the first answered claim; extended by answered renewals."""

    ends_s: float
    lease_s: float

    @classmethod
    def from_claim(cls, sent_s: float, lease_s: float) -> "Lease":
        """The lease that a claim sent at `sent_s` began."""
        return cls(ends_s=sent_s + lease_s, lease_s=lease_s)

    def renewed(self, sent_s: float, lease_s: float) -> None:
        """A renewal sent at `sent_s` was answered. Answers that come in another order do no harm."""
        self.lease_s = lease_s
        self.ends_s = max(self.ends_s, sent_s + lease_s)

    def alive(self, now_s: float) -> bool:
        """Whether the promise still holds."""
        return now_s < self.ends_s
