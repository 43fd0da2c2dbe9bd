"""Fuzz the control plane for as long as you like, guided by coverage (atheris, libFuzzer's options).

    make fuzz                                   a minute
    make fuzz ARGS=-max_total_time=3600         an hour
    make fuzz ARGS=PATH                         one input again, as a crash left it

Damaged messages go to a live producer and a live consumer, damaged layouts and registrations to what reads
them. An error that is not ours, a dead thread, or another's hand-off that was harmed ends the run.
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

try:
    import atheris
except ImportError:
    sys.exit(
        "make fuzz needs atheris, which the set-up does not install: .venv/bin/pip install atheris\n"
        "(`make test` runs the same damage without it, for some seconds)"
    )

with atheris.instrument_imports(include=["stateferry"]):
    from stateferry.errors import StateFerryError
    from stateferry.ferry import links
    from stateferry.layout.fingerprint import decode_layout, encode_layout
    from stateferry.layout.plan import make_plan
    from stateferry.testing.fuzz import ConsumerTarget, ProducerTarget
    from stateferry.testing.junk import Choose, damaged, damaged_bytes, damaged_frame
    from stateferry.testing.peers import small_layout
    from stateferry.transport.base import TransportOptions
    from stateferry.transport.cma import CmaTransport
    from stateferry.wire import encode_message

import msgspec

DEFAULT_SECONDS = 60


def try_producer(target: ProducerTarget, choose: Choose) -> None:
    """Some damaged messages of a stranger."""
    messages = target.messages()
    target.send([damaged_frame(messages[choose(len(messages))], choose) for _ in range(1 + choose(4))])
    assert target.victim_is_held()


def try_consumer(target: ConsumerTarget, choose: Choose) -> None:
    """A producer's damaged answers."""
    offer = target.offer()
    messages = target.messages(offer)
    frames = [encode_message(messages[0])] if choose(3) else []
    frames += [damaged_frame(messages[choose(len(messages))], choose) for _ in range(choose(5))]
    target.serve(offer, frames, load=bool(choose(2)))


def try_layout(choose: Choose) -> None:
    """A damaged layout, planned both ways round."""
    ours = small_layout("d", tp_size=1 + choose(2))
    tree = damaged(msgspec.msgpack.decode(encode_layout(ours)), choose)
    with contextlib.suppress(StateFerryError):
        theirs = decode_layout(msgspec.msgpack.encode(damaged(tree, choose)))
        make_plan(ours, theirs)
        make_plan(theirs, ours, merge=False)


def try_registration(choose: Choose) -> None:
    """A damaged registration of the cma transport."""
    transport = CmaTransport(TransportOptions())
    registration = transport.register(())
    frame = msgspec.msgpack.encode(damaged(msgspec.msgpack.decode(registration), choose))
    with contextlib.suppress(StateFerryError):
        transport.connect(frame if choose(3) else damaged_bytes(registration, choose), 1.0)
    transport.close()


def main() -> None:
    """Run until the time is over or something is found."""
    arguments = sys.argv[1:]
    if not any(a.startswith("-max_total_time") or not a.startswith("-") for a in arguments):
        arguments.append(f"-max_total_time={DEFAULT_SECONDS}")
    found = Path(tempfile.gettempdir()) / "stateferry-fuzz"
    found.mkdir(exist_ok=True)
    with (
        patch.object(links, "MAX_PAUSE_S", 0.01),
        patch.object(links, "IDLE_LINK_S", 0.01),
        ProducerTarget() as producer,
        ConsumerTarget() as consumer,
    ):

        def once(data: bytes) -> None:
            provider = atheris.FuzzedDataProvider(data)

            def choose(n: int) -> int:
                return provider.ConsumeIntInRange(0, n - 1)

            what = choose(4)
            if what == 0:
                try_producer(producer, choose)
            elif what == 1:
                try_consumer(consumer, choose)
            elif what == 2:
                try_layout(choose)
            else:
                try_registration(choose)

        atheris.Setup([sys.argv[0], f"-artifact_prefix={found}/", "-timeout=60", *arguments], once)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
