"""The child process of `transport_rigs.ProcessRig`: registers memory and does what the pipe says.

Arguments: descriptor of the pipe, transport, `cpu` or the number of a CUDA device, seed, sizes of the
regions. Sends its registration. Ends
when the pipe does.
"""

import multiprocessing.connection
import sys

from stateferry.testing.transport_rigs import content, regions_of
from stateferry.transport import TransportOptions, create_transport


def main(arguments: list[str]) -> None:
    """Serve until the other end closes."""
    descriptor, name, device, seed, *sizes = arguments
    pipe = multiprocessing.connection.Connection(int(descriptor))
    buffers = content(int(seed), [int(size) for size in sizes])
    regions = regions_of(buffers)
    if device != "cpu":
        from stateferry.testing.cuda_memory import on_device

        _kept, regions = on_device(buffers, int(device))  # keeps the memory
    transport = create_transport(name, TransportOptions())
    pipe.send_bytes(transport.register(regions))
    while True:
        try:
            command = pipe.recv_bytes()
        except EOFError:
            break
        if command == b"close":
            transport.close()
            pipe.send_bytes(b"closed")
        elif command == b"reopen":
            transport = create_transport(name, TransportOptions())
            pipe.send_bytes(transport.register(regions))
    transport.close()


if __name__ == "__main__":
    main(sys.argv[1:])
