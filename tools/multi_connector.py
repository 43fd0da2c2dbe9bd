"""StateFerry beside vLLM's OffloadingConnector, under MultiConnector, for a hybrid model: does it hold?

    python tools/multi_connector.py         # three starts of engines: two minutes or so

First an engine with what vLLM ships, which offloads GPUs only: what it says is kept. Then a pair whose
OffloadingConnector copies within the host (`tools/host_offload.py`; the rest of it is vLLM's): hand-offs must
be exact, the prefill engine must find offloaded prompts again, and a withheld state must be noticed.

Writes `benchmarks/results/multi-connector-DATE.json`. Exit code 0: nothing was wrong.
"""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from stateferry.errors import EngineError
from stateferry.models import RECALL_GDN, recall_prompt
from stateferry.stack import Client, Completion, Engine, EngineSpec, Role, Stack, commit, host_facts

TOOLS = Path(__file__).resolve().parent
RESULTS = TOOLS.parent / "benchmarks" / "results"
LENGTHS = (60, 300, 700, 1000)
TOKENS = 8
TOP = 20
START_S = 300.0
ROOM_BYTES = 256 * 2**20
REFUSAL = "CPU Offloading is currently only supported"


def spec(role: Role, offload: Mapping[str, Any]) -> EngineSpec:
    """An engine with both connectors, ours first."""
    children = [
        {
            "kv_connector": "StateFerryConnector",
            "kv_role": role.value,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host": "127.0.0.1", "testing": True},
        },
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": ROOM_BYTES, **offload},
        },
    ]
    path = os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return EngineSpec(
        model=RECALL_GDN,
        role=role,
        name=f"multi-{role.name.lower()}" if offload else "as-shipped",
        connector="MultiConnector",
        extra_config={"connectors": children},
        env={"PYTHONPATH": path},
    )


def as_shipped(stack: Stack) -> str:
    """What an engine says to vLLM's own part for offloading; empty: it starts."""
    engine = stack.start(spec(Role.DECODE, {}))
    try:
        engine.wait_ready(START_S)
    except EngineError:
        lines = engine.log_path.read_text(errors="replace").splitlines()
        said = [line for line in lines if REFUSAL in line]
        return said[-1][said[-1].index(REFUSAL) :] if said else lines[-1]
    finally:
        stack.stop(engine)
    return ""


def offloaded(client: Client, engine: Engine) -> dict[str, float]:
    """Bytes that the offloading connector stored and loaded."""
    page = client.metrics(engine.url)
    return {what: page.total(f"vllm:kv_offload_{what}_bytes_total") for what in ("store", "load")}


def forget(client: Client, *engines: Engine, everywhere: bool) -> None:
    """Empty prefix caches; `everywhere`: and what is offloaded."""
    for engine in engines:
        client.reset_prefix_cache(engine.url)
        if everywhere:
            httpx.post(
                f"{engine.url}/reset_prefix_cache?reset_external=true", timeout=30.0, trust_env=False
            ).raise_for_status()


def same(whole: Completion, rest: Completion) -> bool:
    """Whether `rest` goes on exactly as `whole` did after its first token."""
    assert whole.logprobs is not None
    assert rest.logprobs is not None
    return whole.token_ids[1:] == rest.token_ids and whole.logprobs.top[1:] == rest.logprobs.top


def held_up(client: Client, prefill: Engine, decode: Engine, length: int) -> dict[str, Any]:
    """One prompt in every way that two connectors can be asked for it."""
    prompt = list(recall_prompt(40 + length, length).token_ids)
    forget(client, prefill, decode, everywhere=True)
    whole = client.complete(prefill.url, prompt, TOKENS, logprobs=TOP)
    longer = [*prompt, whole.token_ids[0]]

    forget(client, prefill, decode, everywhere=True)
    fresh = client.handoff(prefill.url, decode.url, longer, TOKENS - 1, logprobs=TOP)

    forget(client, prefill, decode, everywhere=False)
    before = offloaded(client, prefill)["load"]
    again = client.handoff(prefill.url, decode.url, longer, TOKENS - 1, logprobs=TOP)
    loaded_by_prefill = offloaded(client, prefill)["load"] - before

    forget(client, decode, everywhere=False)
    before = offloaded(client, decode)["load"]
    alone = client.complete(decode.url, longer, TOKENS - 1, logprobs=TOP)
    loaded_by_decode = offloaded(client, decode)["load"] - before

    forget(client, prefill, decode, everywhere=True)
    withheld = client.handoff(
        prefill.url, decode.url, longer, TOKENS - 1, logprobs=TOP, tamper={"withhold": "state"}
    )
    return {
        "tokens": length,
        "fresh": {"outcome": fresh.received.get("outcome"), "exact": same(whole, fresh.decode)},
        "again": {
            "outcome": again.received.get("outcome"),
            "same_tokens": again.decode.token_ids == whole.token_ids[1:],
            "offloaded_bytes_loaded_by_prefill": loaded_by_prefill,
        },
        "decode_alone": {
            "same_tokens": alone.token_ids == whole.token_ids[1:],
            "offloaded_bytes_loaded_by_decode": loaded_by_decode,
        },
        "withheld_state_noticed": not same(whole, withheld.decode),
    }


def problems(prompts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with a run."""
    found = []
    for one in prompts:
        name = f"{one['tokens']} tokens"
        ended = {part: one[part]["outcome"] for part in ("fresh", "again")}
        found += [f"{name}: {part}: {how}" for part, how in ended.items() if how != "received"]
        if not one["fresh"]["exact"]:
            found.append(f"{name}: a hand-off is not exact")
        if not (one["again"]["same_tokens"] and one["decode_alone"]["same_tokens"]):
            found.append(f"{name}: other tokens after something was loaded from the host")
        if not one["withheld_state_noticed"]:
            found.append(f"{name}: a withheld state went unnoticed")
    if not any(one["again"]["offloaded_bytes_loaded_by_prefill"] for one in prompts):
        found.append("the prefill engine loaded nothing that was offloaded")
    return found


def main() -> int:
    argparse.ArgumentParser(description="StateFerry beside vLLM's OffloadingConnector.").parse_args()
    ours = {"spec_name": "HostOffloadingSpec", "spec_module_path": "host_offload"}
    with Stack() as stack, Client(timeout_s=120.0) as client:
        print(f"logs: {stack.log_folder}", file=sys.stderr, flush=True)
        refusal = as_shipped(stack)
        prefill, decode = (stack.start(spec(role, ours)) for role in (Role.PREFILL, Role.DECODE))
        stack.wait_ready(START_S)
        prompts = []
        for length in LENGTHS:
            prompts.append(held_up(client, prefill, decode, length))
            print(json.dumps(prompts[-1]), file=sys.stderr, flush=True)
        stored = {engine.name: offloaded(client, engine) for engine in (prefill, decode)}
        stack.check_alive()
    wrong = problems(prompts)
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "host": host_facts(),
        "as_shipped": refusal,
        "prompts": prompts,
        "offloaded_bytes": stored,
    }
    path = RESULTS / f"multi-connector-{result['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result | {"problems": wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
