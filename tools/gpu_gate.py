"""On a host with NVIDIA devices and vLLM 0.32: the accuracy gate over pairs of engines, all pairs at once.

    PYTHONPATH=src python tools/gpu_gate.py --output FOLDER --case kda:cudaipc --case recall_gdn:nixl

A case is MODEL:TRANSPORT[:VARIANT]. MODEL is the bundled one or a seeded family; VARIANT is `v1` (vLLM's
old model runner, scheduling not asynchronous) or `graphs` (CUDA graphs). Each engine of a pair has its own
device, where there are two. Writes gate-MODEL-TRANSPORT[-VARIANT].json and the engines' logs into FOLDER.
"""

import argparse
import json
import re
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from stateferry.gate import SMALL, Running, Subject, bundled, run_gate, seeded
from stateferry.models import RECALL_GDN
from stateferry.stack import STATEFERRY_MODULE, Client, Engine, EngineSpec, Role, Stack

CHUNK_TOKENS = 1024
START_TIMEOUT_S = 240.0
LEASE_S = 120.0
WARM_LENGTHS = (1, 3, 70, 300, 1500)
"""Of prompts that make every kernel be compiled and tuned."""
DEFAULT_CASES = (
    "recall_gdn:cudaipc",
    "gdn:cudaipc",
    "kda:cudaipc",
    "recall_gdn:nixl",
    "recall_gdn:cudaipc:v1",
)
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "": ((), {}),
    "v1": (("--no-async-scheduling",), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "graphs": (("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'), {}),
}
"""Arguments and environment."""
TOLD = re.compile(r"[Aa]synchronous scheduling is|V\d Model Runner|attention backend|MLA prefill|KDA")
"""Lines of an engine's log that say how it runs."""


def spec(
    subject: Subject, model: Path, role: Role, transport: str, variant: str, device: int, kernels: Path
) -> EngineSpec:
    """One engine. Both of a pair tune their kernels from one cache of their own (`kernels`): two that chose
    other configurations would round otherwise, which is no hand-off's fault and would fail a comparison that
    has no tolerance."""
    arguments, environment = VARIANTS[variant]
    own = ("--gdn-prefill-backend", "triton") if "gdn" in subject.name else ()  # the default needs FlashInfer
    return EngineSpec(
        model=model,
        role=role,
        name=f"{subject.name}-{role.name.lower()}",
        connector_module=STATEFERRY_MODULE,
        extra_config={"testing": True, "transport": transport, "lease_s": LEASE_S},
        prefix_caching=subject.caching,
        max_model_len=4096,
        enforce_eager=variant != "graphs",
        args=(
            "--max-num-batched-tokens",
            str(CHUNK_TOKENS),
            "--gpu-memory-utilization",
            "0.05",
            "--kv-cache-memory-bytes",
            str(1 << 30),
            "--max-num-seqs",
            "16",
            *own,
            *arguments,
        ),
        env={
            "CUDA_VISIBLE_DEVICES": str(device),
            "TRITON_CACHE_DIR": str(kernels),
            "TRITON_CACHE_AUTOTUNING": "1",
            **environment,
        },
    )


def warm(engine: Engine, subject: Subject) -> None:
    """Let an engine compile and tune what it will run."""
    with Client(timeout_s=180.0) as client:
        for number, length in enumerate(WARM_LENGTHS):
            client.complete(engine.url, subject.source(9_000_000 + number, length), 4, ignore_eos=True)
        client.reset_prefix_cache(engine.url)


def gate(case: str, folder: Path) -> dict[str, Any]:
    """Start two engines, the second when the first has tuned its kernels; judge them; stop them."""
    name, transport, *rest = case.split(":")
    variant = rest[0] if rest else ""
    subject = bundled() if name == RECALL_GDN.name else seeded(name)
    place = folder / f"logs-{case.replace(':', '-')}"
    devices = torch.cuda.device_count()
    seconds: dict[str, float] = {}
    start = time.monotonic()
    with Stack(place) as stack:
        model = subject.write(place / "model")
        engines = []
        for index, role in enumerate((Role.PREFILL, Role.DECODE)):
            kernels = (place / "kernels").absolute()
            one = spec(subject, model, role, transport, variant, index % devices, kernels)
            engines.append(stack.start(one))
            stack.wait_ready(START_TIMEOUT_S)
            seconds[f"{role.name.lower()} ready"] = round(time.monotonic() - start, 1)
            warm(engines[-1], subject)
            seconds[f"{role.name.lower()} warm"] = round(time.monotonic() - start, 1)
        urls = Running(engines[0].url, engines[1].url, CHUNK_TOKENS)
        report = run_gate([subject], SMALL, transport=transport, running=urls)
        told = [
            [line.split("] ", 1)[-1] for line in engine.log_path.read_text(errors="replace").splitlines()]
            for engine in engines
        ]
    return {
        **report.to_json(),
        "case": case,
        "start_s": seconds,
        "engines_say": sorted({line for lines in told for line in lines if TOLD.search(line)})[:20],
        "devices": [torch.cuda.get_device_name(i) for i in range(devices)],
    }


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    default = " ".join(DEFAULT_CASES)
    parser.add_argument("--case", action="append", help=f"may be repeated; default: {default}")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    cases = arguments.case or list(DEFAULT_CASES)
    start = time.monotonic()
    with ThreadPoolExecutor(len(cases)) as pool:
        running = {pool.submit(gate, case, arguments.output): case for case in cases}
        for done in as_completed(running):
            case = running[done]
            try:
                result = done.result()
            except Exception:
                result = {"case": case, "passed": False, "failures": [traceback.format_exc()]}
            path = arguments.output / f"gate-{case.replace(':', '-')}.json"
            path.write_text(json.dumps(result, indent=2) + "\n")
            verdict = "passed" if result["passed"] else "FAILED"
            took = f"{time.monotonic() - start:.0f} s"
            print(case, verdict, took, json.dumps(result["failures"])[:1500], flush=True)


if __name__ == "__main__":
    main()
