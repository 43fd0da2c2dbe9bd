"""The thread that runs hand-offs: owner of the control sockets, the transport and every deadline.

vLLM's engine thread only drops orders in and picks results up. A fully idle engine takes no steps, so
nothing here may need one: leases end and renewals go out whatever the engine does.
"""

import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from stateferry.config import Config
from stateferry.errors import ConfigError
from stateferry.ferry.consumer import ConsumerService
from stateferry.ferry.guard import Guard
from stateferry.ferry.handoff_log import HandoffLog
from stateferry.ferry.keys import ControlKey, control_key, is_loopback, numeric
from stateferry.ferry.link import LinkState
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.outbox import Outbox
from stateferry.ferry.producer import ProducerService
from stateferry.ferry.reading import Fence, Tamper, no_fence
from stateferry.layout.fingerprint import encode_layout
from stateferry.layout.spec import CacheLayout
from stateferry.session import Clock, Counters, Orders, Results, SystemClock, refused
from stateferry.telemetry import Key
from stateferry.transport.base import MemoryRegion, Transport
from stateferry.wire import MAX_MESSAGE_BYTES, RankAddress

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
"""Longest sleep while anything is open: how late a deadline may be noticed."""
QUICK_POLLS = 50
"""Looks without sleeping after a post, before looks every millisecond: most reads end within them."""
MAX_FAILED_TURNS = 20
"""So many turns of the thread in a row end in an error before it gives up: what fails every time will not
pass."""
WIND_DOWN_LOOK_S = 0.02
STOP_TIMEOUT_S = 10.0
HANDSHAKE_MS = 10_000
"""A connection that has not shown who it is by then is closed."""
MAX_SOCKETS = 2048
"""More than all links and what watches the listener."""


@dataclass(frozen=True, slots=True)
class FerrySetup:
    """Everything a ferry needs. The memory must outlive the ferry."""

    config: Config
    layout: CacheLayout
    regions: tuple[MemoryRegion, ...]
    memory: LocalMemory
    make_transport: Callable[[], Transport]
    """Called on the ferry thread."""
    host: str
    """What peers dial."""
    bind_host: str
    port: int
    """0: the system picks."""
    software: str
    tamper: Tamper | None = None
    room: CacheLayout | None = None
    """Where hand-offs wait under `load_mode: sync`; its region is the last of `regions`."""
    clock: Clock = field(default_factory=SystemClock)


class Ferry:
    """One per worker. `start` and `stop` from one thread; `submit` and `take` from any."""

    def __init__(self, setup: FerrySetup) -> None:
        self._setup = setup
        self._inbox: deque[tuple[Orders, Fence]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._key: ControlKey | None = None
        self._start_error: Exception | None = None
        self._address: RankAddress | None = None
        self._outbox = Outbox()
        self._log = HandoffLog(setup.clock, setup.config.slow_handoff_s)
        self._defect = ""
        """Why this ferry takes no more orders, although nobody stopped it."""
        self._quick_polls = 0
        self._open_count = 0
        self._in_hand = 0
        """Orders that this turn took and has not counted as open yet."""
        self._quarantined_count = 0
        self._counters = Counters()
        self._peers: dict[LinkState, int] = {}
        self._producer: ProducerService | None = None
        self._consumer: ConsumerService | None = None
        """Set once they run, for who wants to count."""
        self._thread = threading.Thread(target=self._run, name="stateferry", daemon=True)

    # -- any thread ------------------------------------------------------------------------------

    def start(self) -> RankAddress:
        """Start the thread; wait until memory is registered and the socket is bound.

        Returns the address that peers dial. Raises ConfigError for a port that cannot be bound, an address
        that would be open to everybody or a bad key file, and TransportError for memory that cannot be
        registered.
        """
        try:
            self._key = control_key(self._setup.config, self._setup.bind_host)
        except ConfigError:
            os.close(self._wake)
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
            os.close(self._wake)
            raise self._start_error
        assert self._address is not None
        return self._address

    def submit(self, orders: Orders, fence: Fence = no_fence) -> None:
        """Hand orders over; returns at once. Loads are posted once `fence` says True.

        A ferry that does not run any more refuses them, and `take` says so: nobody waits for it.
        """
        self._inbox.append((orders, fence))
        if self.alive:
            os.eventfd_write(self._wake, 1)

    def take(self) -> Results:
        """Everything that happened since the last call; returns at once."""
        if not self._thread.is_alive():
            self._refuse_orders()
        return self._outbox.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `take` has something to give. Not for vLLM's engine thread."""
        return self._outbox.wait(timeout_s)

    @property
    def open_count(self) -> int:
        """Hand-offs that are open on either side: 0 once everything is over."""
        # In this order: orders move from the inbox into hand and then count as open, and each is counted
        # where it goes before it is taken from where it was.
        return len(self._inbox) + self._in_hand + self._open_count

    @property
    def quarantined_count(self) -> int:
        """Reads past their deadline that may still write into their blocks."""
        return self._quarantined_count

    @property
    def counters(self) -> Counters:
        """What happened on this rank as a producer since its start. Changes while you look."""
        return self._counters

    def counts(self) -> dict[Key, int]:
        """What happened on this rank since its start, by metric and label."""
        if self._producer is None or self._consumer is None:
            return {}
        return self._producer.counts() | self._consumer.tally.counts()

    def levels(self) -> dict[Key, int]:
        """How things stand on this rank, by metric and label."""
        levels = {
            ("stateferry_open_handoffs", "ferry"): self.open_count,
            ("stateferry_quarantined_transfers", ""): self._quarantined_count,
        }
        levels.update({("stateferry_peers", state.value): count for state, count in self._peers.items()})
        return levels

    @property
    def alive(self) -> bool:
        """Whether orders are obeyed. It ends only by `stop`, or by a defect that is logged."""
        return self._thread.is_alive() and not self._defect

    def stop(self) -> None:
        """Release what is open and end the thread. Idempotent. Waits at most `STOP_TIMEOUT_S`."""
        if self._thread.ident is None or self._stopping.is_set():
            return
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(STOP_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error("the ferry thread did not end within %g s", STOP_TIMEOUT_S)
            return
        os.close(self._wake)

    # -- ferry thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        setup = self._setup
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        listener = context.socket(zmq.ROUTER)
        try:
            transport = setup.make_transport()
        except Exception as e:  # whatever it is, `start` must not wait for ever
            self._give_up(context, listener, e)
            return
        try:
            registration = transport.register(setup.regions)
            guard = Guard(context, listener, self._key, setup.clock)
            port = _bind(listener, setup.bind_host, setup.port)
            host = numeric(setup.host)
        except Exception as e:
            transport.close()
            self._give_up(context, listener, e)
            return
        poller = zmq.Poller()
        encoded = encode_layout(setup.layout)
        producer = ProducerService(
            listener,
            setup.clock,
            setup.layout,
            encoded,
            setup.software,
            transport.name,
            registration,
            setup.config.lease_s,
            setup.memory,
        )
        consumer = ConsumerService(
            context,
            poller,
            setup.clock,
            setup.config,
            setup.layout,
            encoded,
            setup.software,
            transport,
            setup.memory,
            setup.tamper,
            self._key,
            setup.room,
        )
        self._counters = producer.ledger.counters
        self._producer, self._consumer = producer, consumer
        poller.register(self._wake, zmq.POLLIN)
        poller.register(listener, zmq.POLLIN)
        for socket in guard.sockets:
            poller.register(socket, zmq.POLLIN)
        self._address = RankAddress(host, port, setup.layout.epoch)
        self._started.set()
        try:
            self._loop(poller, listener, guard, producer, consumer)
            consumer.close()
        except BaseException as e:
            self._defect = f"the ferry of this rank cannot go on: {e!r}"
            logger.exception("the ferry thread cannot go on; what is open fails, new orders are refused")
            self._wind_down(producer, consumer)
        try:
            guard.close()
            listener.close(linger=0)
            transport.close()
        finally:
            context.destroy(linger=1000)

    def _loop(
        self,
        poller: zmq.Poller,
        listener: "zmq.Socket[bytes]",
        guard: Guard,
        producer: ProducerService,
        consumer: ConsumerService,
    ) -> None:
        failed_turns = 0
        while not self._stopping.is_set():
            try:
                self._turn(poller, listener, guard, producer, consumer)
                failed_turns = 0
            except Exception:
                # A defect. Whatever it was, other hand-offs must go on and leases must end.
                failed_turns += 1
                if failed_turns == MAX_FAILED_TURNS:
                    raise
                logger.exception("error on the ferry thread; it goes on")

    def _wind_down(self, producer: ProducerService, consumer: ConsumerService) -> None:
        """After a defect: report all that is open as failed, each once nothing can land in its blocks, and
        keep what peers may read until their leases are over. Then go on refusing until `stop`.

        Leans on as little of the rest as it can: part of that is broken.
        """
        while not self._stopping.is_set():
            try:
                self._refuse_orders()
                consumer.wind_down(self._defect)
                producer.ledger.expire(self._setup.clock.now_s())
                self._publish(producer, consumer)
            except Exception:
                logger.exception("error while the ferry thread winds down; it tries again")
            self._stopping.wait(WIND_DOWN_LOOK_S)

    def _refuse_orders(self) -> None:
        reason = self._defect or "the ferry of this rank was stopped"
        while self._inbox:
            orders, _ = self._inbox.popleft()
            self._outbox.add(refused(orders, reason))

    def _turn(
        self,
        poller: zmq.Poller,
        listener: "zmq.Socket[bytes]",
        guard: Guard,
        producer: ProducerService,
        consumer: ConsumerService,
    ) -> None:
        events = poller.poll(self._wait_ms(producer, consumer))
        for socket, _ in events:
            if socket == self._wake:
                os.eventfd_read(self._wake)
            elif socket is listener:
                producer.receive()
            elif socket in guard.sockets:
                guard.receive(self._counters)
            else:
                consumer.receive(socket)
        self._take_orders(producer, consumer)
        consumer.advance()
        consumer.tick()
        producer.tick()
        self._log.tick()
        self._publish(producer, consumer)

    def _wait_ms(self, producer: ProducerService, consumer: ConsumerService) -> int:
        if consumer.moving:
            self._quick_polls += 1
            return 0 if self._quick_polls < QUICK_POLLS else 1
        self._quick_polls = 0
        if consumer.reading_count:
            return 1  # waits for a link or a fence
        due_s = consumer.next_deadline_s() - self._setup.clock.now_s()
        if (
            consumer.quarantined_count
            or producer.ledger.open_count
            or producer.ledger.parked_count
            or consumer.link_count
        ):
            due_s = min(due_s, IDLE_WAIT_S)
        return max(0, min(60_000, math.ceil(due_s * 1000) if due_s < 60 else 60_000))

    def _take_orders(self, producer: ProducerService, consumer: ConsumerService) -> None:
        while self._inbox:
            self._in_hand += 1
            orders, fence = self._inbox.popleft()
            for grant in orders.grants:
                producer.grant(grant)
            for open_order in orders.opens:
                consumer.open(open_order)
            for load in orders.loads:
                consumer.load(load, fence)
            for request_id in orders.placed:
                consumer.ahead.placed(request_id, fence)
            for close in orders.closes:
                consumer.close_handoff(close)

    def _publish(self, producer: ProducerService, consumer: ConsumerService) -> None:
        self._quarantined_count = consumer.quarantined_count
        self._peers = consumer.peers
        sent, ended, lost = producer.take_finished(), consumer.take_ended(), consumer.take_lost()
        waiting, apart = consumer.ahead.take()
        if not (sent or ended or lost or waiting or apart):
            self._count_open(producer, consumer)
            return
        self._log.ended(e.report for e in ended)
        self._outbox.put(sent, ended, lost, producer.take_kept(), waiting, apart)
        # After the results: whoever sees that all is over can also take how it ended.
        self._count_open(producer, consumer)

    def _count_open(self, producer: ProducerService, consumer: ConsumerService) -> None:
        self._open_count = producer.ledger.open_count + consumer.open_count
        self._in_hand = 0

    def _give_up(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        listener: "zmq.Socket[bytes]",
        error: Exception,
    ) -> None:
        listener.close(linger=0)
        context.destroy(linger=0)
        self._start_error = error
        self._started.set()


def _bind(listener: "zmq.Socket[bytes]", bind_host: str, port: int) -> int:
    listener.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
    listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    listener.setsockopt(zmq.IPV6, 1 if ":" in bind_host else 0)
    host = f"[{bind_host}]" if ":" in bind_host else bind_host
    try:
        listener.bind(f"tcp://{host}:{port or '*'}")
    except zmq.ZMQError as e:
        raise ConfigError(
            f"cannot listen on {bind_host}:{port or '(any port)'}: {e}. Set 'port' (0: the system picks) or "
            "'bind_host' in kv_connector_extra_config"
        ) from e
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
