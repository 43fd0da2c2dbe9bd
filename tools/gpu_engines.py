"""On a host with two NVIDIA devices and vLLM 0.32: what hand-offs cost at the shapes of Kimi-Linear-48B.

    PYTHONPATH=src python tools/gpu_engines.py handoff interference --output result.json [--graphs] [--watch]

Runs `bench handoff` (no router), `bench interference` and `bench agentx` over pairs of engines, prefill on
device 0 and decode on device 1, all pairs in one run. Weights are vLLM's dummy ones, for speed alone: the
gate asks whether answers are right. Two pairs with all 256 experts do not fit; with fewer, caches and the
work of a token are the same. With `agentx` engines cache prefixes. `--watch`: engines tell where the time of
their steps goes (gpu_watched.py). Writes one JSON object, anew after every step. Part of gpu.py.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gpu_watched
from stateferry.bench import Arm, ArmSpec, agentx, arm_spec, handoff, interference, percentile
from stateferry.bench.arms import same_engines, shared
from stateferry.bench.engine_gaps import FINE_BUCKETS_S
from stateferry.models.random_checkpoint import random_config, write_json
from stateferry.models.tokenizer import write_numbered_tokenizer
from stateferry.stack import (
    STATEFERRY,
    STATEFERRY_MODULE,
    Client,
    Engine,
    EngineSpec,
    Role,
    Stack,
)

ARMS = ("auto", "auto-at-once", "in-tree")
BENCHES = frozenset({"handoff", "interference", "agentx"})
LENGTHS = (1_000, 8_000, 32_000)
LOAD = interference.Load(decodes=8, handoffs=16, tokens=16_000, alone_s=2.0, interval_s=0.1)
SESSIONS, SESSIONS_SCALE = 12, 4
"""Made-up agent sessions, with a quarter of their tokens: first prompts of 2,000 to 150,000."""
REPLAY = agentx.Settings(lanes=4, longest_turns=8, longest_s=20.0)
LONGEST_PROMPT = 262_144
"""That `agentx` may ask."""
LAYERS, ATTENTION_EVERY, HEADS, VOCABULARY = 27, 4, 32, 163_840
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
        "vocab_size": VOCABULARY,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 1,
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
    write_numbered_tokenizer(folder, VOCABULARY)
    return folder


def engine_spec(model: Path, arm: ArmSpec, role: Role, device: int, asked: argparse.Namespace) -> EngineSpec:
    """One engine of one arm."""
    ours = arm.connector == STATEFERRY
    name = f"{arm.name.split()[0]}-{role.name.lower()}"
    # The in-tree connector takes no other layout of convolution states.
    env = {"CUDA_VISIBLE_DEVICES": str(device)} | ({} if ours else {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"})
    if asked.watch:
        env |= gpu_watched.environment(asked.logs.absolute() / f"{name}.watched")
    agents = "agentx" in asked.what
    return EngineSpec(
        model=model,
        role=role,
        name=name,
        connector=arm.connector,
        connector_module=gpu_watched.__name__ if asked.watch else STATEFERRY_MODULE if ours else None,
        extra_config=arm.extra_config,
        prefix_caching=agents,
        max_model_len=LONGEST_PROMPT if agents else 40_000,
        enforce_eager=not asked.graphs,
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
            "--custom-histogram-buckets",
            json.dumps({"inter_token_latency": FINE_BUCKETS_S}),
            *(("--compilation-config", GRAPHS) if asked.graphs else ()),
        ),
        env=env,
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


def running(arms: list[Arm], repeats: int, tokens: int, logs: Path | None) -> dict[str, Any]:
    """What running decodes notice; with `logs` also where the time of their engines' steps went."""
    arms = [arm for arm in arms if arm.at_once is None]  # prompts are computed before their hand-offs begin
    load = replace(LOAD, tokens=tokens)
    result = interference.measure(arms, repeats, load)
    found: dict[str, Any] = {"load": asdict(load), "arms": result.summary()}
    if logs is not None:
        found["steps"] = {
            name: gpu_watched.summary(
                logs / f"{name.split()[0]}-decode.watched", [repeat.windows_s for repeat in repeats_of_arm]
            )
            for name, repeats_of_arm in result.repeats.items()
            if any(name == arm.name for arm in arms)
        }
    return found


def agents(arms: list[Arm], repeats: int) -> dict[str, Any]:
    """Agent sessions through every arm, and what must not happen in them."""
    sessions = [agentx.make_session(number, 0, SESSIONS_SCALE) for number in range(SESSIONS)]
    summary = agentx.measure(arms, sessions, repeats, REPLAY, one_engine=False).summary()
    told = {"dialect": agentx.DIALECT, "sessions": "made-up", "count": SESSIONS, "scale": SESSIONS_SCALE}
    return {**told, "settings": asdict(REPLAY), "arms": summary, "verdict": agentx.verdict(summary)}


def started(stack: Stack, model: Path, asked: argparse.Namespace) -> list[Arm]:
    """All pairs, ready. Arms that ask the same engines otherwise share a pair."""
    specs = [
        arm_spec(text, **({"lease_s": LEASE_S} if text != "in-tree" else {})) for text in asked.arm or ARMS
    ]
    pairs: list[tuple[ArmSpec, Arm]] = []
    for spec in specs:
        if not any(same_engines(other, spec) for other, _ in pairs):
            prefill, decode = (
                stack.start(engine_spec(model, spec, role, device, asked))
                for device, role in enumerate((Role.PREFILL, Role.DECODE))
            )
            pairs.append((spec, Arm(spec.name, (prefill, decode))))
    stack.wait_ready(START_TIMEOUT_S)
    return [shared(spec, next(arm for other, arm in pairs if same_engines(other, spec))) for spec in specs]


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    told = "handoff, interference, agentx; nothing: only start engines, which compiles their kernels"
    parser.add_argument("what", nargs="*", help=told)
    parser.add_argument("--arm", action="append", help=f"as in `stateferry bench`; default: {' '.join(ARMS)}")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs for decodes; default: eager")
    parser.add_argument("--watch", action="store_true", help="note where the time of engines' steps goes")
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--arriving-tokens", type=int, default=LOAD.tokens, help="of prompts in interference")
    for name, repeats in (("handoff", 5), ("interference", 3), ("agentx", 2)):
        parser.add_argument(f"--{name}-repeats", type=int, default=repeats)
    parser.add_argument("--logs", type=Path, default=Path("gpu-logs"))
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    if not BENCHES.issuperset(asked.what):
        parser.error(f"expected some of {', '.join(sorted(BENCHES))}; found {' '.join(asked.what)}")
    start = time.monotonic()
    found: dict[str, Any] = {"experts": asked.experts, "graphs": asked.graphs, "seconds": {}}
    failed = False

    def keep(name: str, value: Any) -> None:
        found[name] = value
        found["seconds"][name] = round(time.monotonic() - start, 1)
        asked.output.write_text(json.dumps(found))
        print(f"{name}: {found['seconds'][name]} s", flush=True)

    model = write_model(asked.logs.absolute() / "model", asked.experts)
    with Stack(asked.logs) as stack:
        arms = started(stack, model, asked)
        keep("ready", True)
        engines = list({engine.url: engine for arm in arms for engine in arm.engines}.values())
        with ThreadPoolExecutor(len(engines)) as pool:
            list(pool.map(warm, engines))
        keep("warm", True)
        if len(engines) > 2:
            for arm in arms:
                arm.stop()
        steps: dict[str, Callable[[], Any]] = {
            "handoff": lambda: handoffs(arms, asked.handoff_repeats),
            "interference": lambda: running(
                arms, asked.interference_repeats, asked.arriving_tokens, asked.logs if asked.watch else None
            ),
            "agentx": lambda: agents(arms, asked.agentx_repeats),
        }
        for name in asked.what:
            try:
                keep(name, steps[name]())
            except Exception:
                failed = True
                keep(name, traceback.format_exc())
        keep("totals", totals(arms))
    sys.exit(failed)


if __name__ == "__main__":
    main()
