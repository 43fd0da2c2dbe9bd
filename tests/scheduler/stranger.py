"""A stranger on a producer's control socket: whoever knows an offer may speak for it."""

from typing import Any

import zmq

from stateferry.wire import Release, encode_message


def give_back(params: dict[str, Any]) -> None:
    """Release an offer that nobody claimed, as a consumer that has given up does."""
    ours = params["stateferry"]
    host, port, epoch = ours["ranks"][0]
    release = Release(
        epoch=epoch, transfer_id=ours["transfer_id"], claimant="x", tp_rank=0, tp_size=1, received=False
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://{host}:{port}")
        socket.send(encode_message(release))
        assert socket.poll(20_000)
        socket.recv()
