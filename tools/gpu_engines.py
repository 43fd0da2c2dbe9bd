"""On a host with two NVIDIA devices and vLLM 0.32: what hand-offs cost at the shapes of Kimi-Linear-48B.

    PYTHONPATH=src python tools/gpu_engines.py --output result.json --arm auto --arm in-tree [--graphs]

Runs `bench handoff` (no router) and `bench interference` over pairs of engines, prefill on device 0 and
decode on device 1, all pairs in one run. Weights are vLLM's dummy ones, for speed alone: the gate asks
whether answers are right. Two pairs with all 256 experts do not fit; with fewer, caches and the work of a
token are the same.
Writes one JSON object, after every step.
"""

import argparse
import json
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from stateferry.bench import Arm, ArmSpec, arm_spec, handoff, interference, percentile
from stateferry.models.random_checkpoint import random_config, write_json
from stateferry.models.tokenizer import write_byte_tokenizer
from stateferry.stack import (
    STATEFERRY,
    STATEFERRY_MODULE,
    Client,
    Engine,
    EngineSpec,
    Role,
    Stack,
    commit,
    host_facts,
)

LENGTHS = (1_000, 8_000, 32_000)
LOAD = interference.Load(decodes=8, handoffs=16, tokens=16_000, alone_s=3.0, interval_s=0.1)
LAYERS, ATTENTION_EVERY, HEADS = 27, 4, 32
START_TIMEOUT_S = 280.0
CACHE_BYTES = 12 << 30
LEASE_S = 60.0
"""Sixteen long prompts are computed before the first of them is taken."""
GRAPHS = json.dumps(
    {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32],
    }
)
PARTS = tuple(f"{part}milliseconds" for part in ("", "wait_", "plan_", "post_", "wire_"))
TRANSFER_METRICS = tuple(
    f"vllm:nixl_{what}" for what in ("xfer_time_seconds", "post_time_seconds", "bytes_transferred")
)


def write_model(folder: Path, experts: int) -> Path:
    """A folder with the config of Kimi-Linear-48B, but for the number of experts, and a tokenizer."""
    attention = sorted({*range(ATTENTION_EVERY, LAYERS + 1, ATTENTION_EVERY), LAYERS})
    config = random_config("kda") | {
        "vocab_size": 163_840,
        "eos_token_id": 163_838,
        "pad_token_id": 163_839,
        "hidden_size": 2304,
        "head_dim": 72,
        "intermediate_size": 9216,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 1 << 20,
        "moe_intermediate_size": 1024,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "num_experts": experts,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
    }
    config["linear_attn_config"] = config["linear_attn_config"] | {
        "full_attn_layers": attention,
        "kda_layers": [i for i in range(1, LAYERS + 1) if i not in attention],
        "num_heads": HEADS,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_byte_tokenizer(folder)
    return folder


def engine_spec(model: Path, arm: ArmSpec, role: Role, device: int, graphs: bool) -> EngineSpec:
    """One engine of one arm."""
    ours = arm.connector == STATEFERRY
    return EngineSpec(
        model=model,
        role=role,
        name=f"{arm.name.split()[0]}-{role.name.lower()}",
        connector=arm.connector,
        connector_module=STATEFERRY_MODULE if ours else None,
        extra_config=arm.extra_config,
        prefix_caching=False,
        max_model_len=40_000,
        enforce_eager=not graphs,
        args=(
            "--load-format",
            "dummy",
            "--kv-cache-memory-bytes",
            str(CACHE_BYTES),
            "--gpu-memory-utilization",
            "0.35",
            "--max-num-seqs",
            "32",
            "--max-num-batched-tokens",
            "8192",
            *(("--compilation-config", GRAPHS) if graphs else ()),
        ),
        # The in-tree connector takes no other layout of convolution states.
        env={"CUDA_VISIBLE_DEVICES": str(device)} | ({} if ours else {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}),
    )


def warm(engine: Engine) -> None:
    """Let an engine compile what it will run."""
    with Client(timeout_s=240.0) as client:
        for length in (8, *LENGTHS, LOAD.tokens):
            client.complete(engine.url, [16 + i % 200 for i in range(length)], 3, ignore_eos=True)


def handoffs(arms: list[Arm], repeats: int) -> dict[str, Any]:
    """First tokens, and where a hand-off's time goes."""
    result = handoff.measure(arms, LENGTHS, (1,), repeats)
    parts: dict[str, Any] = {}
    for (arm, tokens), seen in result.looked_at.items():
        told = [one.received for one in seen if one.received]
        figures = {
            key: percentile([float(one[key]) for one in told if key in one], 50)
            for key in PARTS
            if any(key in one for one in told)
        }
        last = told[-1] if told else {}
        parts[f"{arm}, {tokens}"] = figures | {key: last[key] for key in ("bytes", "pieces") if key in last}
    return {"cells": result.summary(), "time_lines": result.time_lines(), "told_by_the_decode_engine": parts}


def totals(arms: list[Arm]) -> dict[str, Any]:
    """What the decode engines of the in-tree connector counted, from their metrics."""
    found: dict[str, Any] = {}
    with Client(timeout_s=20.0) as client:
        for arm in arms:
            arm.go_on()
            metrics = client.metrics(arm.urls[1])
            for name in TRANSFER_METRICS:
                for suffix in ("_sum", "_count"):
                    if metrics.find(name + suffix):
                        found[f"{arm.name}: {name}{suffix}"] = metrics.total(name + suffix)
    return found


def measured(arms: list[Arm], repeats: tuple[int, int], keep: Callable[[str, Any], None]) -> None:
    """All benches, each kept when it is over."""
    steps: dict[str, Callable[[], Any]] = {
        "handoff": lambda: handoffs(arms, repeats[0]),
        "interference": lambda: interference.measure(arms, repeats[1], LOAD).summary(),
        "totals": lambda: totals(arms),
    }
    for name, step in steps.items():
        try:
            keep(name, step())
        except Exception:
            keep(name, traceback.format_exc())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arm", action="append", help="as in `stateferry bench`; default: auto and in-tree")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for decodes; default: eager")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--repeats", type=int, nargs=2, default=(5, 3), help="of handoff and interference")
    parser.add_argument("--go", type=Path, help="measure when this file is there, not before")
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    start = time.monotonic()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": commit(),
        "host": host_facts(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "experts": arguments.experts,
        "graphs": arguments.graphs,
        "seconds": {},
    }

    def keep(name: str, value: Any) -> None:
        found[name] = value
        found["seconds"][name] = round(time.monotonic() - start, 1)
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{name}: {found['seconds'][name]} s", value if isinstance(value, str) else "", flush=True)

    model = write_model(arguments.logs.absolute() / "model", arguments.experts)
    try:
        with Stack(arguments.logs) as stack:
            arms = []
            for text in arguments.arm or ("auto", "in-tree"):
                spec = arm_spec(text, **({"lease_s": LEASE_S} if text != "in-tree" else {}))
                pair = [
                    stack.start(engine_spec(model, spec, role, device, arguments.graphs))
                    for device, role in enumerate((Role.PREFILL, Role.DECODE))
                ]
                arms.append(Arm(spec.name, (pair[0], pair[1])))
            stack.wait_ready(START_TIMEOUT_S)
            keep("ready", True)
            engines = [engine for arm in arms for engine in arm.engines]
            with ThreadPoolExecutor(len(engines)) as pool:
                list(pool.map(warm, engines))
            keep("warm", True)
            while arguments.go is not None and not arguments.go.exists():
                stack.check_alive()
                time.sleep(0.5)
            if len(arms) > 1:
                for arm in arms:
                    arm.stop()
            measured(arms, tuple(arguments.repeats), keep)
    except Exception:
        keep("error", traceback.format_exc())


if __name__ == "__main__":
    main()
