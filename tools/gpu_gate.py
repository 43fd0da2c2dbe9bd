"""On a host with NVIDIA devices and vLLM 0.32: the accuracy gate over pairs of engines, all pairs at once.

    PYTHONPATH=src python tools/gpu_gate.py --output result.json --full kda:cudaipc:graphs --case kda:nixl

A case is MODEL:TRANSPORT[:VARIANT]. MODEL is the bundled one or a seeded family; VARIANT is `v1` (vLLM's
old model runner, scheduling not asynchronous) or `graphs` (CUDA graphs). Each engine of a pair has its own
device, where there are two. Writes one JSON object, anew when a case is judged. Part of gpu.py.
"""

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from stateferry.gate import FULL, SMALL, Running, Subject, bundled, run_gate, seeded
from stateferry.models import RECALL_GDN
from stateferry.stack import STATEFERRY_MODULE, Client, Engine, EngineSpec, Role, Stack

CHUNK_TOKENS = 1024
START_TIMEOUT_S = 240.0
LEASE_S = 120.0
WARM_LENGTHS = (1, 3, 70, 300, 1500)
"""Of prompts that make every kernel be compiled and tuned."""
DEFAULT_FULL = ("kda:cudaipc:graphs",)
DEFAULT_CASES = ("kda:nixl:graphs", "recall_gdn:cudaipc")
VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "": ((), {}),
    "v1": (("--no-async-scheduling",), {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "graphs": (("--compilation-config", '{"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}'), {}),
}
"""Arguments and environment."""
TOLD = re.compile(r"[Aa]synchronous scheduling is|V\d Model Runner|attention backend|MLA prefill|KDA")
"""Lines of an engine's log that say how it runs."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of engines to judge."""

    name: str
    full: bool

    @property
    def kind(self) -> tuple[str, str]:
        """Model and variant: engines of one kind round alike."""
        model, _, variant = self.parts
        return model, variant

    @property
    def parts(self) -> tuple[str, str, str]:
        """Model, transport and variant."""
        model, transport, *rest = self.name.split(":")
        return model, transport, rest[0] if rest else ""


Keep = Callable[[str, Mapping[str, Any]], None]


def spec(
    subject: Subject, model: Path, role: Role, transport: str, variant: str, device: int, kernels: Path
) -> EngineSpec:
    """One engine. All of one model and variant tune their kernels from one cache (`kernels`): two that chose
    other configurations would round otherwise, which is no hand-off's fault and would fail a comparison that
    has no tolerance."""
    arguments, environment = VARIANTS[variant]
    own = ("--gdn-prefill-backend", "triton") if "gdn" in subject.name else ()  # the default needs FlashInfer
    return EngineSpec(
        model=model,
        role=role,
        name=f"{subject.name}-{transport}-{role.name.lower()}",
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


def gate_kind(cases: Sequence[Case], folder: Path, keep: Keep) -> None:
    """Start a pair for each case of one kind, the first engine alone until it has tuned its kernels; judge
    all of them at once; stop them."""
    name, variant = cases[0].kind
    subject = bundled() if name == RECALL_GDN.name else seeded(name)
    place = folder / "-".join(part for part in cases[0].kind if part)
    devices = torch.cuda.device_count()
    seconds: dict[str, float] = {}
    start = time.monotonic()
    kernels = (place / "kernels").absolute()

    def reached(what: str) -> None:
        seconds[what] = round(time.monotonic() - start, 1)
        print(name, variant, what, seconds[what], flush=True)

    with Stack(place) as stack:
        model = subject.write(place / "model")
        engines = []
        for case in cases:
            for index, role in enumerate((Role.PREFILL, Role.DECODE)):
                transport = case.parts[1]
                one = spec(subject, model, role, transport, variant, index % devices, kernels)
                engines.append(stack.start(one))
                if len(engines) == 1:
                    stack.wait_ready(START_TIMEOUT_S)
                    reached("first ready")
                    warm(engines[0], subject)
                    reached("first warm")
        stack.wait_ready(START_TIMEOUT_S)
        reached("all ready")
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(lambda engine: warm(engine, subject), engines[1:]))
        reached("all warm")
        with ThreadPoolExecutor(len(cases)) as pool:
            for number, case in enumerate(cases):
                pair = engines[2 * number], engines[2 * number + 1]
                pool.submit(judge, case, subject, pair, seconds, keep)


def judge(
    case: Case, subject: Subject, pair: tuple[Engine, Engine], seconds: Mapping[str, float], keep: Keep
) -> None:
    """The gate over two running engines; whatever happens is kept."""
    urls = Running(pair[0].url, pair[1].url, CHUNK_TOKENS)
    try:
        size = FULL if case.full else SMALL
        report = run_gate([subject], size, full=case.full, transport=case.parts[1], running=urls)
        lines = [line for engine in pair for line in engine.log_path.read_text(errors="replace").splitlines()]
        told = sorted({line.split("] ", 1)[-1] for line in lines if TOLD.search(line)})
        keep(case.name, {**report.to_json(), "start_s": dict(seconds), "engines_say": told[:20]})
    except Exception:
        keep(case.name, {"passed": False, "failures": [traceback.format_exc()]})


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    told = f"may be repeated; default: {' '.join(DEFAULT_CASES)}, and {' '.join(DEFAULT_FULL)} in full size"
    parser.add_argument("--case", action="append", default=[], help=told)
    parser.add_argument("--full", action="append", default=[], help="a case in full size; may be repeated")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    arguments = parser.parse_args()
    asked = arguments.full or arguments.case
    cases = [Case(name, True) for name in (arguments.full if asked else DEFAULT_FULL)]
    cases += [Case(name, False) for name in (arguments.case if asked else DEFAULT_CASES)]
    found: dict[str, Any] = {}

    def keep(name: str, result: Mapping[str, Any]) -> None:
        found[name] = result
        arguments.output.write_text(json.dumps(found))
        print(name, "passed" if result["passed"] else "FAILED", result["failures"], flush=True)

    def guarded(kind: Sequence[Case]) -> None:
        try:
            gate_kind(kind, arguments.logs, keep)
        except Exception:
            for case in kind:
                if case.name not in found:
                    keep(case.name, {"passed": False, "failures": [traceback.format_exc()]})

    kinds = [list(kind) for _, kind in groupby(sorted(cases, key=lambda c: c.kind), lambda c: c.kind)]
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(guarded, kinds))
    sys.exit(0 if all(result["passed"] for result in found.values()) else 1)


if __name__ == "__main__":
    main()
