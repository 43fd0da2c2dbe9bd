"""The ferry as vLLM's threads see it: orders in, results out, and one thread that does everything else.

vLLM's engine thread only drops orders in and picks results up; it never waits for a peer.
"""

import logging
import threading

from stateferry.errors import ConfigError
from stateferry.ferry.desk import Desk
from stateferry.ferry.keys import ControlKey, control_key, is_loopback
from stateferry.ferry.loop import Loop
from stateferry.ferry.reading import Fence, no_fence
from stateferry.ferry.setup import FerrySetup
from stateferry.session import Counters, Orders, Results
from stateferry.telemetry import Key
from stateferry.wire import RankAddress

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 10.0


class Ferry:
    """One per worker. `start` and `stop` from one thread; `submit` and `take` from any."""

    def __init__(self, setup: FerrySetup) -> None:
        self._setup = setup
        self._desk = Desk()
        self._key: ControlKey | None = None
        self._started = threading.Event()
        self._start_error: BaseException | None = None
        self._loop: Loop | None = None
        """Set once it runs."""
        self._thread = threading.Thread(target=self._run, name="stateferry", daemon=True)

    def start(self) -> RankAddress:
        """Start the thread; wait until memory is registered and the socket is bound.

        Returns the address that peers dial. Raises ConfigError for a port that cannot be bound, an address
        that would be open to everybody or a bad key file, and TransportError for memory that cannot be
        registered.
        """
        try:
            self._key = control_key(self._setup.config, self._setup.bind_host)
        except ConfigError:
            self._desk.close()
            raise
        if self._key is None and not is_loopback(self._setup.bind_host):
            logger.warning(
                "auth is 'none': everybody who reaches %s can talk to this engine's control socket, take its "
                "offers and be sent its cache. Set 'auth_key_file'",
                self._setup.bind_host,
            )
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self._thread.join()
            self._desk.close()
            raise self._start_error
        assert self._loop is not None
        return self._loop.address

    def submit(self, orders: Orders, fence: Fence = no_fence) -> None:
        """Hand orders over; returns at once. Loads are posted once `fence` says True.

        A ferry that does not run any more refuses them, and `take` says so: nobody waits for it.
        """
        self._desk.put(orders, fence)
        if self.alive:
            self._desk.ring()

    def take(self) -> Results:
        """Everything that happened since the last call; returns at once."""
        if not self._thread.is_alive():
            self._desk.refuse_orders()
        return self._desk.outbox.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something to give. Not for vLLM's engine thread."""
        return self._desk.outbox.wait(timeout_s)

    @property
    def open_count(self) -> int:
        """Hand-offs that are open on either side: 0 once everything is over."""
        return self._desk.open_count

    @property
    def quarantined_count(self) -> int:
        """Reads past their deadline that may still write into their blocks."""
        return self._desk.quarantined_count

    @property
    def counters(self) -> Counters:
        """What happened on this rank as a producer since its start. Changes while you look."""
        return self._desk.counters

    def counts(self) -> dict[Key, int]:
        """What happened on this rank since its start, by metric and label."""
        return self._loop.counts() if self._loop is not None else {}

    def levels(self) -> dict[Key, int]:
        """How things stand on this rank, by metric and label."""
        levels = {
            ("stateferry_open_handoffs", "ferry"): self.open_count,
            ("stateferry_quarantined_transfers", ""): self.quarantined_count,
        }
        levels.update({("stateferry_peers", state.value): n for state, n in self._desk.peers.items()})
        return levels

    @property
    def alive(self) -> bool:
        """Whether orders are obeyed. It ends only by `stop`, or by a defect that is logged."""
        return self._thread.is_alive() and not self._desk.defect

    def stop(self) -> None:
        """Release what is open and end the thread. Idempotent. Waits at most `STOP_TIMEOUT_S`."""
        if self._thread.ident is None or self._desk.stopping.is_set():
            return
        self._desk.stopping.set()
        self._desk.ring()
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the ferry thread did not end within %g s", STOP_TIMEOUT_S)
            return
        self._desk.close()

    def _run(self) -> None:
        try:
            loop = Loop(self._setup, self._desk, self._key)
        except BaseException as e:  # whatever it is, `start` must not wait for ever
            self._start_error = e
            self._started.set()
            return
        self._loop = loop
        self._started.set()
        loop.run()
