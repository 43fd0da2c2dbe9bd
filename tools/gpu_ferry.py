"""On a host with two NVIDIA devices: one hand-off from its order to its last byte, without engines.

    PYTHONPATH=src python tools/gpu_ferry.py --output result.json [--transport cudaipc --transport nixl]

Real ferries with the cache of one rank of Kimi-Linear in device memory, one a process. The thread that
orders stands for vLLM's engine thread: *held* is how long its order takes it. The offer has been claimed
before, as it has in an engine, where a request waits to be scheduled. Writes one JSON object. Part of gpu.py.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from stateferry.bench.plan import Case, block_tables, layouts
from stateferry.bench.transport import spread
from stateferry.block_ids import BlockIds
from stateferry.config import Config
from stateferry.ferry import Ferry, FerrySetup
from stateferry.ferry import loop as ferry_loop
from stateferry.ids import EngineId, RequestId, new_epoch, new_transfer_id
from stateferry.layout.blocks import needed_blocks
from stateferry.layout.spec import CacheLayout
from stateferry.session import Grant, GroupLoad, Load, Open, Orders, Outcome, Report
from stateferry.testing.kimi import KIMI_LINEAR
from stateferry.testing.peers import ArrayMemory
from stateferry.transport import MemoryKind, MemoryRegion, TransportOptions, create_transport
from stateferry.wire import Offer, RankAddress, offer_to_params, parse_offer

LENGTHS = (1_024, 8_192, 32_768, 131_072)
ROOM_TOKENS = 200_000
CLAIMED_S = 0.02
"""More than a claim takes on one host."""
PATIENCE_S = 20.0
PARTS = ("waited_s", "plan_s", "post_s", "wire_s", "total_s")


def layout(name: str) -> CacheLayout:
    """One rank's cache, the same on both sides."""
    ours, _ = layouts(Case(KIMI_LINEAR, 1, 1), 0, ROOM_TOKENS)
    return msgspec.structs.replace(ours, engine_id=EngineId(name), epoch=new_epoch())


@contextmanager
def ferry_on(device: int, transport: str, cache: CacheLayout) -> Iterator[tuple[Ferry, RankAddress]]:
    """A ferry over memory of a device."""
    with torch.cuda.device(device):
        memory = torch.ones(cache.region_sizes_bytes[0], dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
    ferry = Ferry(
        FerrySetup(
            config=Config(),
            layout=cache,
            regions=(MemoryRegion(memory.data_ptr(), memory.numel(), MemoryKind.CUDA, device),),
            memory=ArrayMemory(1),  # only looked at for digests
            make_transport=lambda: create_transport(transport, TransportOptions()),
            host="127.0.0.1",
            bind_host="127.0.0.1",
            port=0,
            software="gpu_ferry",
        )
    )
    address = ferry.start()
    try:
        yield ferry, address
    finally:
        ferry.stop()


def serve(device: int, transport: str) -> None:
    """The producer: for every line with tokens and block tables, an offer as a line."""
    cache = layout("p")
    with ferry_on(device, transport, cache) as (ferry, address):
        print("ready", flush=True)
        for number, line in enumerate(sys.stdin):
            asked = json.loads(line)
            ferry.take()
            offer = Offer(
                transfer_id=new_transfer_id(),
                engine_id=cache.engine_id,
                request_id=RequestId(f"prefill-{number}"),
                num_tokens=asked["tokens"],
                block_ids=tuple(BlockIds(ids) for ids in asked["tables"]),
                first_blocks=tuple(asked["first"]),
                prefix_digest="0" * 32,
                lease_s=PATIENCE_S,
                ranks=(address,),
            )
            grant = Grant(
                offer.request_id,
                offer.transfer_id,
                offer.num_tokens,
                offer.block_ids,
                offer.first_blocks,
                offer.prefix_digest,
            )
            ferry.submit(Orders(grants=(grant,)))
            print(json.dumps(offer_to_params(offer)), flush=True)


def hand_off(
    ferry: Ferry, request: str, offer: Offer, local: Sequence[Sequence[int]]
) -> tuple[float, Report]:
    """One hand-off: seconds that its order took, and its report."""
    name = RequestId(request)
    ferry.submit(Orders(opens=(Open(name, offer),)))
    time.sleep(CLAIMED_S)
    groups = tuple(
        GroupLoad(index, offer.first_blocks[index], BlockIds(mine), offer.block_ids[index])
        for index, mine in enumerate(local)
    )
    orders = Orders(loads=(Load(name, 0, groups),))
    start = time.perf_counter()
    ferry.submit(orders)
    held_s = time.perf_counter() - start
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        ferry.wait(0.05)
        for report in ferry.take().reports:
            if report.request_id == name:
                if report.outcome is not Outcome.RECEIVED:
                    raise RuntimeError(f"{request}: {report.outcome}: {report.reason}")
                return held_s, report
    raise RuntimeError(f"{request}: no report after {PATIENCE_S:g} s")


def measure(transport: str, rounds: int) -> list[dict[str, Any]]:
    """Every length in turn, `rounds` times; the first round is not counted."""
    rng = random.Random(0)
    cache = layout("d")
    command = [sys.executable, __file__, "--serve", str(torch.cuda.device_count() - 1), transport]
    producer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert producer.stdin is not None
    assert producer.stdout is not None
    found: dict[int, list[tuple[float, Report]]] = {tokens: [] for tokens in LENGTHS}
    try:
        if "ready" not in producer.stdout.readline():
            raise RuntimeError("the producer did not start")
        with ferry_on(0, transport, cache) as (ferry, _):
            for number in range(-1, rounds):
                for tokens in rng.sample(LENGTHS, len(LENGTHS)):
                    tables = list(block_tables(cache, tokens, False, rng))
                    first = [needed_blocks(group, 0, tokens).start for group in cache.groups]
                    asked = {"tokens": tokens, "first": first, "tables": [theirs for _, theirs in tables]}
                    producer.stdin.write(json.dumps(asked) + "\n")
                    producer.stdin.flush()
                    offer = parse_offer(json.loads(producer.stdout.readline()))
                    one = hand_off(ferry, f"decode-{number}-{tokens}", offer, [ours for ours, _ in tables])
                    if number >= 0:
                        found[tokens].append(one)
    finally:
        producer.kill()
        producer.wait()
    return [
        {
            "tokens": tokens,
            "bytes": sum(several[0][1].bytes_by_group),
            "pieces": several[0][1].pieces,
            "held_ms": spread([held * 1e3 for held, _ in several]),
            **{
                part.replace("_s", "_ms"): spread([getattr(report, part) * 1e3 for _, report in several])
                for part in PARTS
            },
        }
        for tokens, several in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transport", action="append", help="may be repeated; default: cudaipc and nixl")
    parser.add_argument(
        "--quick-looks",
        type=int,
        action="append",
        help="how often a ferry looks before it pauses; may be repeated, each is an arm; default: its own",
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--logs", type=Path, help="not used: what is printed is all there is")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), arguments.serve[1])
        return
    found: dict[str, Any] = {}
    failed = False
    for transport, looks in product(
        arguments.transport or ("cudaipc", "nixl"), arguments.quick_looks or [ferry_loop.QUICK_POLLS]
    ):
        name = f"{transport}, {looks} quick looks"
        try:
            with patch.object(ferry_loop, "QUICK_POLLS", looks):
                found[name] = measure(transport, arguments.rounds)
            show(name, found[name])
        except Exception as e:
            found[name] = repr(e)
            failed = True
            print(name, found[name], flush=True)
        if arguments.output:
            arguments.output.write_text(json.dumps(found))
    sys.exit(failed)


def show(name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Medians, a line a length."""
    for row in rows:
        figures = {key: value["median"] for key, value in row.items() if isinstance(value, dict)}
        what = f"{row['tokens']} tokens, {row['bytes'] / 1e6:.0f} MB in {row['pieces']}"
        print(f"{name}: {what}: {figures}", flush=True)


if __name__ == "__main__":
    main()
