"""Tries what `cma` does: a child, which is no ancestor of this process, reads this process's memory.

As between engines: the one that is read has allowed it, the one that reads is not its parent. (A parent may
read its child where engines may not read each other.)
"""

import base64
import secrets
import subprocess
import sys

import numpy as np

from stateferry.errors import StateFerryError, TransportError
from stateferry.layout.spec import Int64Array, Pieces
from stateferry.transport import create_transport
from stateferry.transport.base import MemoryRegion, TransferState, TransportOptions

SIZE_BYTES = 4096
TIMEOUT_S = 30.0
_CHILD = "from stateferry.doctor.reading import read_parent; read_parent()"


def try_to_read() -> str:
    """Why no process here can read another's memory; empty when one did. Ends its child."""
    secret = np.frombuffer(secrets.token_bytes(SIZE_BYTES), np.uint8)
    try:
        with create_transport("cma", TransportOptions()) as transport:
            registration = transport.register([MemoryRegion(secret.ctypes.data, SIZE_BYTES)])
            child = subprocess.run(
                [sys.executable, "-c", _CHILD],
                input=base64.b64encode(registration),
                capture_output=True,
                timeout=TIMEOUT_S,
            )
    except (StateFerryError, OSError, subprocess.TimeoutExpired) as e:
        return str(e)
    if child.returncode != 0:
        lines = child.stderr.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the reading process ended with code {child.returncode}"
    if child.stdout != secret.tobytes():
        return "the bytes that were read are not the bytes that were there"
    return ""


def read_parent() -> None:
    """What the child does: registration on stdin, the bytes on stdout, or the reason on stderr."""
    target = np.zeros(SIZE_BYTES, np.uint8)
    try:
        with create_transport("cma", TransportOptions()) as transport:
            transport.register([MemoryRegion(target.ctypes.data, SIZE_BYTES)])
            peer = transport.connect(base64.b64decode(sys.stdin.buffer.read()), TIMEOUT_S)
            transfer = peer.post_read(_whole())
            while transfer.poll() is TransferState.PENDING:
                pass  # cma moves bytes inside poll
            if transfer.poll() is TransferState.FAILED:
                raise TransportError(transfer.error)
    except StateFerryError as e:
        sys.stderr.write(f"{e}\n")
        raise SystemExit(1) from e
    sys.stdout.buffer.write(target.tobytes())


def _whole() -> Pieces:
    zero: Int64Array = np.zeros(1, np.int64)
    return Pieces(
        local_regions=zero,
        local_offsets=zero,
        remote_regions=zero,
        remote_offsets=zero,
        sizes=np.array([SIZE_BYTES], np.int64),
    )
