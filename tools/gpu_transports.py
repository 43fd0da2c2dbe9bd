"""On a host with NVIDIA devices: the conformance suite and the transport bench over device memory.

    PYTHONPATH=src python tools/gpu_transports.py --output result.json [--transport cudaipc --transport nixl]

Needs torch, triton, numpy and msgspec (and nixl for that transport). Writes one JSON object.
"""

import argparse
import json
import platform
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stateferry.bench.transport import CASES, measure
from stateferry.testing.conformance import CHECKS
from stateferry.testing.transport_rigs import CudaRig


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


def plain_copy(target_device: int) -> Callable[[int], Callable[[], float]]:
    """Copies between the two devices (or inside one), timed to the end."""

    def of_size(size_bytes: int) -> Callable[[], float]:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=f"cuda:{target_device}")
        target = torch.empty(size_bytes, dtype=torch.uint8, device="cuda:0")

        def copy() -> float:
            for device in {0, target_device}:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(0)
            return time.perf_counter() - start

        return copy

    return of_size


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", action="append", help="may be repeated; default: cudaipc and nixl")
    parser.add_argument(
        "--conformance", action="append", help="which of them to check, may be repeated; default: all of them"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    transports = arguments.transport or ["cudaipc", "nixl"]
    target_device = torch.cuda.device_count() - 1  # another device where there are two
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "host": {
            "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
            "peer_access": target_device > 0 and torch.cuda.can_device_access_peer(0, target_device),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "conformance": {},
    }
    for transport in arguments.conformance or transports:
        result["conformance"][transport] = conformance(transport, target_device)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    try:
        with ExitStack() as stack:
            rigs = {name: stack.enter_context(CudaRig(name, target_device)) for name in transports}
            result["transport"] = measure(rigs, plain_copy(target_device), CASES, arguments.rounds)
    except Exception:
        result["transport"] = traceback.format_exc()
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
