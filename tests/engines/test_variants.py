"""The same hand-off over NIXL and Mooncake, with drafts, over two ranks, and read ahead."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.engines.conftest import PATIENT, START_TIMEOUT_S
from tests.engines.continuation import TOP, assert_exact, random_prompt, same

from stateferry.gate import Speculation
from stateferry.gate.speculation import drafts_of
from stateferry.models import RECALL_GDN, recall_prompt
from stateferry.models.drafting import write_recall_mtp
from stateferry.stack import STATEFERRY_MODULE, Client, EngineSpec, Role, Stack

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
LENGTHS = (3, 17, 639, 640, 641, 900)
"""Around the block of the tiny model (640 tokens with prefix caching) and the convolution window."""


@contextmanager
def started(stack: Stack, model: Path, *, consumer: dict[str, Any], **spec: Any) -> Iterator[tuple[str, str]]:
    """A pair of its own, ended again."""
    prefill = stack.start(EngineSpec(model=model, role=Role.PREFILL, **spec))
    decode = stack.start(EngineSpec(model=model, role=Role.DECODE, **(spec | consumer)))
    try:
        for engine in (prefill, decode):
            engine.wait_ready(500.0)
        yield prefill.url, decode.url
    finally:
        stack.stop(prefill, decode)


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_over_another_transport(stack: Stack, client: Client, random_model: Path, transport: str) -> None:
    if transport == "mooncake":
        pytest.importorskip("mooncake.engine", exc_type=ImportError)  # or a library of the system is missing
    extra = {"transport": transport, **PATIENT}
    with started(stack, random_model, extra_config=extra, consumer={}) as (prefill, decode):
        assert_exact(client, prefill, decode, LENGTHS, tokens=4)


def test_drafts_without_prefix_caching_and_loaded_by_module_path(
    stack: Stack, client: Client, tmp_path: Path
) -> None:
    """Both engines draft by a layer of their own (MTP): some drafts are taken back, some are not."""
    with started(
        stack,
        write_recall_mtp(tmp_path),
        extra_config={"verify": "all", **PATIENT},
        prefix_caching=False,
        connector_module=STATEFERRY_MODULE,
        args=Speculation("mtp", 2).arguments,
        consumer={},
    ) as (prefill, decode):
        assert_exact(client, prefill, decode, (3, 17, 127, 128, 129, 600), tokens=12)
        story = recall_prompt(1, 200).token_ids
        alone = client.complete(prefill, story, 48, logprobs=TOP)
        handoff = client.handoff(prefill, decode, (*story, alone.token_ids[0]), 47, logprobs=TOP)
        assert same(alone, handoff.decode)
        for url in (prefill, decode):
            assert drafts_of(client.metrics(url)).tried


@pytest.mark.by_hand  # four workers on two cores wait for each other for minutes
def test_two_ranks_on_each_side(stack: Stack, random_model: Path) -> None:
    with (
        started(stack, random_model, extra_config=PATIENT, tp_size=2, max_model_len=2048, consumer={}) as (
            prefill,
            decode,
        ),
        Client(timeout_s=300.0) as patient,
    ):
        for handoff in assert_exact(patient, prefill, decode, (5, 300), tokens=2):
            assert handoff.received["pieces"] >= 2  # each rank read its own


def test_prefix_hits_on_either_side_and_both(stack: Stack, client: Client, pair: Any) -> None:
    prompt = random_prompt(1500, seed=5)
    whole = client.complete(pair.prefill.url, prompt, 5, logprobs=20)
    longer = [*prompt, whole.token_ids[0]]
    whole_bytes = 0
    for hit_on_decode in (False, True):
        for hit_on_prefill in (False, True):
            for url in (pair.prefill.url, pair.decode.url):
                client.reset_prefix_cache(url)
            if hit_on_prefill:
                client.complete(pair.prefill.url, prompt, 1)
            if hit_on_decode:
                client.complete(pair.decode.url, prompt[:1300], 1)
            handoff = client.handoff(pair.prefill.url, pair.decode.url, longer, 4, logprobs=20)
            assert same(whole, handoff.decode), (hit_on_decode, hit_on_prefill)
            block_bytes = handoff.received["bytes"]["attention"]
            if hit_on_decode:
                assert block_bytes < whole_bytes, "blocks that D had were read again"
            else:
                whole_bytes = block_bytes


def test_sync_loads(stack: Stack, client: Client, pair: Any) -> None:
    """A decode engine that reads ahead: exact around block borders, and alive after reads that fail."""
    extra = {"testing": True, "load_mode": "sync", "transport": "faults", "room_mib": 256}
    decode = stack.start(EngineSpec(model=RECALL_GDN, role=Role.DECODE, name="sync", extra_config=extra))
    try:
        decode.wait_ready(START_TIMEOUT_S)
        assert_exact(client, pair.prefill.url, decode.url, (17, 640, 641), tokens=4)
        prompt = random_prompt(700, seed=9)
        alone = client.complete(decode.url, prompt, 4)
        client.reset_prefix_cache(decode.url)
        failing = {"faults": [{"kind": "fail_writing"}]}
        failed = client.handoff(pair.prefill.url, decode.url, prompt, 4, tamper=failing)
        assert failed.received["outcome"] == "failed"
        assert failed.decode.token_ids == alone.token_ids
        assert_exact(client, pair.prefill.url, decode.url, (18,), tokens=4)
    finally:
        stack.stop(decode)
