"""On a host with NVIDIA devices and vLLM 0.32: the accuracy gate over two engines, each on its own device.

    PYTHONPATH=src python tools/gpu_gate.py --output FOLDER [--transport cudaipc --transport nixl]

Writes gate-TRANSPORT.json and the engines' logs into FOLDER. With one device both engines share it.
"""

import argparse
import json
import traceback
from pathlib import Path
from typing import Any

import torch

from stateferry.gate import FULL, SMALL, Running, bundled, run_gate
from stateferry.models import RECALL_GDN
from stateferry.stack import STATEFERRY_MODULE, EngineSpec, Role, Stack

CHUNK_TOKENS = 1024
START_TIMEOUT_S = 240.0


def gate(transport: str, folder: Path, graphs: bool, full: bool, extra: list[str]) -> dict[str, Any]:
    """Start two engines, judge them, stop them."""
    devices = torch.cuda.device_count()
    with Stack(folder / "logs") as stack:
        engines = [
            stack.start(
                EngineSpec(
                    model=RECALL_GDN,
                    role=role,
                    name=f"{transport}-{role.name.lower()}",
                    connector_module=STATEFERRY_MODULE,
                    extra_config={"testing": True, "transport": transport},
                    max_model_len=4096,
                    enforce_eager=not graphs,
                    args=(
                        "--max-num-batched-tokens",
                        str(CHUNK_TOKENS),
                        "--gpu-memory-utilization",
                        "0.2",
                        "--gdn-prefill-backend",
                        "triton",  # FlashInfer's needs a package that is not everywhere
                        *extra,
                    ),
                    env={"CUDA_VISIBLE_DEVICES": str(index % devices)},
                )
            )
            for index, role in enumerate((Role.PREFILL, Role.DECODE))
        ]
        stack.wait_ready(START_TIMEOUT_S, lambda p: print(f"{p.name} {p.seconds:.0f} s {p.line}", flush=True))
        urls = Running(engines[0].url, engines[1].url, CHUNK_TOKENS)
        report = run_gate([bundled()], FULL if full else SMALL, full=full, transport=transport, running=urls)
        failures = report.failures()
        return {
            **report.to_json(),
            "failures": failures,
            "devices": [torch.cuda.get_device_name(i) for i in range(devices)],
        }


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("--transport", action="append", help="may be repeated; default: cudaipc and nixl")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs; default: eager")
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("engine_arguments", nargs="*", help="passed to vLLM, after --")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for transport in arguments.transport or ["cudaipc", "nixl"]:
        try:
            result = gate(
                transport, arguments.output, arguments.graphs, arguments.full, arguments.engine_arguments
            )
        except Exception:
            result = {"passed": False, "failures": [traceback.format_exc()]}
        (arguments.output / f"gate-{transport}.json").write_text(json.dumps(result, indent=2) + "\n")
        print(transport, result["passed"], json.dumps(result["failures"])[:3000], flush=True)


if __name__ == "__main__":
    main()
