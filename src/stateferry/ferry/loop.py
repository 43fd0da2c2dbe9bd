"""What the ferry thread does: polls its sockets, obeys orders, moves hand-offs on, tells what happened.

A fully idle engine takes no steps, so nothing here may need one: leases end and renewals go out whatever
the engine does.
"""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import zmq

from stateferry.errors import ConfigError
from stateferry.ferry.connection import lose_patience
from stateferry.ferry.consumer import ConsumerService
from stateferry.ferry.desk import Desk
from stateferry.ferry.guard import Guard
from stateferry.ferry.handoff_log import HandoffLog
from stateferry.ferry.keys import ControlKey, numeric
from stateferry.ferry.producer import ProducerService
from stateferry.ferry.quiet import LogLimit
from stateferry.ferry.setup import FerrySetup
from stateferry.layout.fingerprint import encode_layout
from stateferry.session import Grant, Orders, refused
from stateferry.telemetry import Key
from stateferry.transport.base import QUICK_PAUSE_S, QUICK_POLLS
from stateferry.wire import MAX_MESSAGE_BYTES, RankAddress, authority

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.25
"""Longest sleep while anything is open: how late a deadline may be noticed."""
MAX_FAILED_TURNS = 20
"""So many turns of the thread in a row end in an error before it gives up: what fails every time will not
pass."""
WIND_DOWN_LOOK_S = 0.02
HANDSHAKE_MS = 10_000
"""A connection that has not shown who it is by then is closed."""
BACKLOG = 4096
"""Calls that the kernel takes for a process that hangs. Each consumer rank calls again and again, and those
that it gave up count, too: where they are too many, the process looks as if it had ended."""
MAX_SOCKETS = 4096
"""More than all links with the two sockets that watch each, all questions, and the listener with its own."""


class Loop:
    """Owner of the control sockets, the transport and every deadline. Ferry thread only."""

    def __init__(self, setup: FerrySetup, desk: Desk, key: ControlKey | None) -> None:
        """Register memory and bind the socket. Whatever this raises, nothing stays open."""
        self.desk = desk
        self._clock = setup.clock
        self._quick_polls = 0
        self._log = HandoffLog(setup.clock, setup.config.slow_handoff_s)
        with ExitStack() as undo:
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
            self._listener = self._context.socket(zmq.ROUTER)
            undo.callback(self._listener.close, linger=0)
            self._transport = setup.make_transport()
            undo.callback(self._transport.close)
            registration = self._transport.register(setup.regions)
            self._guard = Guard(self._context, self._listener, key, setup.clock)
            port = _bind(self._listener, setup.bind_host, setup.port)
            self.address = RankAddress(numeric(setup.host), port, setup.layout.epoch)
            encoded = encode_layout(setup.layout)
            self._producer = ProducerService(
                self._listener,
                setup.clock,
                setup.layout,
                encoded,
                setup.software,
                self._transport.name,
                registration,
                setup.config.lease_s,
                setup.memory,
            )
            self._poller = zmq.Poller()
            self._consumer = ConsumerService(
                self._context,
                self._poller,
                setup.clock,
                setup.config,
                setup.layout,
                encoded,
                setup.software,
                self._transport,
                setup.memory,
                setup.tamper,
                key,
                setup.room,
            )
            undo.pop_all()
        desk.counters = self._producer.ledger.counters
        for socket in (desk.wake, self._listener, *self._guard.sockets):
            self._poller.register(socket, zmq.POLLIN)

    def counts(self) -> dict[Key, int]:
        """What happened on this rank since its start, by metric and label. From any thread."""
        return self._producer.counts() | self._consumer.tally.counts()

    def run(self) -> None:
        """Until somebody stops it. A defect that does not pass is survived by refusing everything."""
        try:
            self._turns()
            self._consumer.close()
        except BaseException as e:
            self.desk.defect = f"the ferry of this rank cannot go on: {e!r}"
            logger.exception("the ferry thread cannot go on; what is open fails, new orders are refused")
            self._wind_down()
        try:
            self._guard.close()
            self._listener.close(linger=0)
            self._transport.close()
        finally:
            self._context.destroy(linger=1000)

    def _turns(self) -> None:
        failed_turns = 0
        while not self.desk.stopping.is_set():
            try:
                self._turn()
                failed_turns = 0
            except Exception:
                # A defect. Whatever it was, other hand-offs must go on and leases must end.
                failed_turns += 1
                if failed_turns == MAX_FAILED_TURNS:
                    raise
                logger.exception("error on the ferry thread; it goes on")

    def _turn(self) -> None:
        # On a crowded machine this thread may get no processor for seconds anywhere from here on. Peers are
        # judged by what had arrived before, which is read below: what they said meanwhile counts next time.
        heard_s = self._clock.now_s()
        for socket, _ in self._poller.poll(self._wait_ms()):
            if socket == self.desk.wake:
                self.desk.woken()
            elif socket is self._listener:
                self._producer.receive()
            elif socket in self._guard.sockets:
                self._guard.receive(self.desk.counters)
            else:
                self._consumer.receive(socket)
        self._take_orders()
        self._consumer.advance()
        self._consumer.tick(heard_s)
        self._producer.tick(heard_s)
        self._log.tick()
        self._publish()

    def _wait_ms(self) -> int:
        consumer, ledger, open_here = self._consumer, self._producer.ledger, self._consumer.open_here
        if open_here.moving:
            self._quick_polls += 1
            if self._quick_polls >= QUICK_POLLS:
                return 1
            self.desk.stopping.wait(QUICK_PAUSE_S)
            return 0
        self._quick_polls = 0
        if open_here.reading_count:
            return 1  # waits for a link or a fence
        due_s = consumer.next_deadline_s() - self._clock.now_s()
        awaited = self._producer.awaited.count
        held = open_here.quarantined_count or ledger.open_count or ledger.parked_count
        if held or awaited or consumer.link_count:
            due_s = min(due_s, IDLE_WAIT_S)
        return max(0, min(60_000, math.ceil(due_s * 1000) if due_s < 60 else 60_000))

    def _take_orders(self) -> None:
        producer, consumer = self._producer, self._consumer
        while (found := self.desk.next_orders()) is not None:
            orders, fence = found
            # In the order in which they take effect, by their field of `Orders`.
            obey: dict[str, Callable[[Any], None]] = {
                "grants": producer.grant,
                "withdrawals": producer.withdraw,
                "expects": consumer.inquiries.ask,
                "opens": consumer.open,
                "loads": partial(consumer.load, fence=fence),
                "placed": partial(consumer.ahead.placed, used_until=fence),
                "closes": consumer.close_handoff,
            }
            for kind, carry_out in obey.items():
                for order in getattr(orders, kind):
                    try:
                        carry_out(order)
                    except Exception as e:  # a defect, which must not cost the others their answers
                        self._refuse(kind, order, e)

    def _refuse(self, kind: str, order: Any, error: Exception) -> None:
        """Answer an order that met a defect, so that vLLM does not wait for it."""
        logger.exception("one of the %s met a defect: request=%s", kind, getattr(order, "request_id", "-"))
        held = kind == "grants" and isinstance(self._producer.ledger.made(order.transfer_id), Grant)
        if not held:  # else its blocks may be read: its lease ends it
            self.desk.outbox.add(refused(Orders(**{kind: (order,)}), f"defect: {error!r}"))

    def _publish(self) -> None:
        open_here = self._consumer.open_here
        self.desk.quarantined_count = open_here.quarantined_count
        self.desk.peers = self._consumer.peers
        sent, ended, lost = self._producer.take_finished(), open_here.take_ended(), open_here.take_lost()
        waiting, apart = self._consumer.ahead.take()
        answered = self._consumer.inquiries.take_answered()
        renounced = self._producer.ledger.take_renounced()
        if sent or ended or lost or waiting or apart or answered or renounced:
            kept = self._producer.take_kept()
            try:
                self._log.ended(e.report for e in ended)
            finally:  # vLLM waits for these, whatever an operator's logging does
                self.desk.outbox.put(sent, ended, lost, kept, waiting, apart, answered, renounced)
        # After the results: whoever sees that all is over can also take how it ended.
        consumed = open_here.open_count + self._consumer.inquiries.open_count
        self.desk.count_open(self._producer.ledger.open_count + consumed)

    def _wind_down(self) -> None:
        """After a defect: report all that is open as failed, each once nothing can land in its blocks, and
        keep what peers may read until their leases are over. Then go on refusing until stopped.

        Leans on as little of the rest as it can: part of that is broken.
        """
        limit = LogLimit()
        while not self.desk.stopping.is_set():
            try:
                self.desk.refuse_orders()
                self._consumer.open_here.wind_down(self.desk.defect)
                self._consumer.inquiries.wind_down(self.desk.defect)
                self._producer.ledger.expire(self._clock.now_s())
                self._publish()
            except Exception:
                if limit.may_log(self._clock.now_s()):
                    what = limit.left_out()
                    logger.exception("error while the ferry thread winds down; it tries again%s", what)
            self.desk.stopping.wait(WIND_DOWN_LOOK_S)


def _bind(listener: "zmq.Socket[bytes]", bind_host: str, port: int) -> int:
    listener.setsockopt(zmq.LINGER, 0)
    listener.setsockopt(zmq.BACKLOG, BACKLOG)
    listener.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    listener.setsockopt(zmq.ROUTER_MANDATORY, 1)
    listener.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    lose_patience(listener)  # or each consumer's machine that dies leaves a connection here for ever
    listener.setsockopt(zmq.IPV6, 1 if ":" in bind_host else 0)
    try:
        listener.bind(f"tcp://{authority(bind_host, port or '*')}")
    except zmq.ZMQError as e:
        raise ConfigError(
            f"cannot listen on {bind_host}:{port or '(any port)'}: {e}. Set 'port' (0: the system picks) or "
            "'bind_host' in kv_connector_extra_config"
        ) from e
    endpoint = listener.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
