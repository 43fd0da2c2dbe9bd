"""On a host with NVIDIA devices: the conformance suite and the transport bench over device memory.

    PYTHONPATH=src python tools/gpu_transports.py conformance bench --output result.json [--transport …]

Needs torch, triton, numpy and msgspec (and nixl for that transport). Writes one JSON object. Part of gpu.py.
"""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stateferry.bench.transport import connected, result, room_for
from stateferry.bench.transport_cases import made_up, planned
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import CudaRig
from stateferry.transport import MemoryKind


def conformance(transport: str, target_device: int) -> dict[str, str]:
    """Check -> `passed`, or how it failed."""
    found = {}
    with CudaRig(transport, target_device) as rig:
        for name, check in CHECKS.items():
            start = time.monotonic()
            try:
                check(rig)
                found[name] = "passed"
            except Exception:
                found[name] = traceback.format_exc(limit=-3)
            print(f"{transport}: {name}: {found[name]} ({time.monotonic() - start:.1f} s)", flush=True)
    return found


def transports(names: list[str], rounds: int) -> dict[str, Any]:
    """Made-up hand-offs and planned ones, all arms interleaved."""
    handoffs = [*made_up(), *planned()]
    with connected(MemoryKind.CUDA, room_for(handoffs), names) as bench:
        return dict(result(bench, bench.measure(handoffs, rounds), rounds, MemoryKind.CUDA))


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("what", nargs="+", choices=("conformance", "bench"))
    parser.add_argument("--transport", action="append", help="may be repeated; default: cudaipc and nixl")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, help="not used: what is printed is all there is")
    arguments = parser.parse_args()
    names = arguments.transport or ["cudaipc", "nixl"]
    target_device = torch.cuda.device_count() - 1  # another device where there are two
    found: dict[str, Any] = {
        "peer_access": target_device > 0 and torch.cuda.can_device_access_peer(0, target_device)
    }
    failed = False
    if "conformance" in arguments.what:
        found["conformance"] = {}
        for name in names:
            found["conformance"][name] = conformance(name, target_device)
            failed |= set(found["conformance"][name].values()) != {"passed"}
            arguments.output.write_text(json.dumps(found))
    if "bench" in arguments.what:
        found["transport"] = transports(names, arguments.rounds)
        arguments.output.write_text(json.dumps(found))
    sys.exit(failed)


if __name__ == "__main__":
    main()
