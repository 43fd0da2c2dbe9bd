"""On a host with NVIDIA devices: the conformance suite and the transport bench over device memory.

    PYTHONPATH=src python tools/gpu_transports.py --output result.json [--transport cudaipc --transport nixl]

Needs torch, triton, numpy and msgspec (and nixl for that transport). Writes one JSON object.
"""

import argparse
import json
import platform
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from stateferry.bench.transport import connected, result, room_for
from stateferry.bench.transport_cases import made_up, planned
from stateferry.stack import commit, host_facts
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", action="append", help="may be repeated; default: cudaipc and nixl")
    parser.add_argument(
        "--conformance", action="append", help="which of them to check, may be repeated; default: all of them"
    )
    parser.add_argument("--only", choices=("conformance", "bench"), help="default: both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    names = arguments.transport or ["cudaipc", "nixl"]
    target_device = torch.cuda.device_count() - 1  # another device where there are two
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "host": {
            **host_facts(),
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "peer_access": target_device > 0 and torch.cuda.can_device_access_peer(0, target_device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "conformance": {},
    }
    for transport in () if arguments.only == "bench" else arguments.conformance or names:
        found["conformance"][transport] = conformance(transport, target_device)
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    if arguments.only != "conformance":
        try:
            found["transport"] = transports(names, arguments.rounds)
        except Exception:
            found["transport"] = traceback.format_exc()
    arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
