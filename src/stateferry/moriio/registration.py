"""Tells a router every few seconds that this engine is there. vllm-router forgets who is silent for five."""

import logging
import threading

import msgspec
import zmq

from stateferry.moriio.settings import Moriio
from stateferry.wire import authority

logger = logging.getLogger(__name__)

INTERVAL_S = 3.0
PRODUCER, CONSUMER = "P", "D"
_TRY_MS = 100
_JOIN_S = 5.0


def message(moriio: Moriio, *, produces: bool, data_parallel_size: int, tp_size: int) -> bytes:
    """What the router is told, in msgpack. An engine with both roles is a prefill engine, as in MoRIIO."""
    return msgspec.msgpack.encode(
        {
            "type": PRODUCER if produces else CONSUMER,
            "http_address": authority(moriio.address.host, moriio.http_port),
            "zmq_address": str(moriio.address),
            "dp_size": data_parallel_size,
            "tp_size": tp_size,
            "transfer_mode": "READ",
        }
    )


class Registration:
    """A thread that sends one message to one router until `stop`. Its failures end nothing else.

    Nothing is ever read from the router. While it cannot be reached nothing is kept for it, so that one that
    comes back hears of now and not of then.
    """

    def __init__(self, proxy_host: str, proxy_port: int, said: bytes, interval_s: float = INTERVAL_S) -> None:
        self._endpoint = f"tcp://{authority(proxy_host, proxy_port)}"
        self._said = said
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stateferry-registration", daemon=True)

    def start(self) -> None:
        """Begin; the first message leaves at once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Waits a moment for it at most. Idempotent."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.IPV6, 1)
            socket.setsockopt(zmq.SNDTIMEO, _TRY_MS)
            try:
                socket.connect(self._endpoint)
            except zmq.ZMQError as e:
                logger.error(
                    "cannot register at %s: %s; check proxy_ip and proxy_ping_port. This engine serves "
                    "whoever knows it",
                    self._endpoint,
                    e,
                )
                return
            reached = True
            while not self._stopped.is_set():
                try:
                    socket.send(self._said)
                except zmq.ZMQError as e:
                    if reached:
                        logger.warning("router %s cannot be told of us yet (%s)", self._endpoint, e)
                    reached = False
                    self._stopped.wait(_TRY_MS / 1000)
                    continue
                if not reached:
                    logger.info("router %s is told of us", self._endpoint)
                reached = True
                self._stopped.wait(self._interval_s)
