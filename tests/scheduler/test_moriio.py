"""An engine whose settings are written for MoRIIO's connector, over vLLM's own scheduler."""

import contextlib
import random
import socket
from typing import Any

import msgspec
import pytest
import zmq
from engine_parts import CacheModel, KVConnectorFactory, KVConnectorRole, make_cache, make_config
from harness import ATTENTION, HYBRID, WINDOW, Pair
from simulated_model import answer
from test_producer import prompt_of

from stateferry.moriio import Address, request_id
from stateferry.vllm.connector import StateFerryConnector
from stateferry.vllm.dropin import MoRIIOConnector
from stateferry.vllm.moriio import fronts_http

pytestmark = pytest.mark.scheduler

UNIQUE = "0123456789abcdef" * 2


def free_ports(count: int) -> int:
    """The first of some ports in a row that are free, where the system gives out none by itself."""
    while True:
        first = random.randrange(20_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def moriio(**more: Any) -> dict[str, Any]:
    return {"read_mode": "true", "http_port": 8000, "handshake_port": free_ports(2), **more}


def start(model: CacheModel, **more: Any) -> tuple[Pair, Address, Address]:
    """Two engines, and the addresses that a router would know them by."""
    producer, consumer = moriio(), moriio()
    pair = Pair(model, producer=producer, consumer=consumer, **more)
    p, d = (Address("127.0.0.1", s["handshake_port"], 61005) for s in (producer, consumer))
    return pair, p, d


def prefill(pair: Pair, prompt: list[int], name: str) -> dict[str, Any]:
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"tx-{UNIQUE}"}
    asked |= {"remote_engine_id": None, "remote_block_ids": None, "remote_dp_size": 1}
    pair.producer.add(prompt, params=asked, request_id=name)
    pair.run_until(lambda: pair.producer.finished[name].reason is not None, "the prefill")
    params = pair.producer.finished[name].params
    assert params is not None
    return params


def picked(params: dict[str, Any]) -> dict[str, Any]:
    kept = ("remote_engine_id", "remote_block_ids", "transfer_id")
    return {"do_remote_prefill": True, "do_remote_decode": False, **{k: params[k] for k in kept}}


@pytest.mark.parametrize("carries", ["whole", "three fields"])
@pytest.mark.parametrize("model", [HYBRID, ATTENTION, WINDOW], ids=["hybrid", "attention", "window"])
def test_a_hand_off_over_either_kind_of_router(model: CacheModel, carries: str) -> None:
    """F3.1 to F3.4: attention first, each group apart, one state each, cut to N-1 tokens."""
    pair, p, d = start(model)
    with pair:
        prompt = prompt_of(11)
        name = f"cmpl-{request_id(p, d, UNIQUE)}-0-1a2b3c4d"
        params = prefill(pair, prompt, name)
        tables = params["remote_block_ids"]
        assert params["transfer_id"] == f"tx-{UNIQUE}"
        if model is HYBRID:
            assert [len(table) for table in tables] == [3, 1, 1, 1]
        assert params["stateferry"]["num_tokens"] == 10
        carried = params if carries == "whole" else picked(params)
        pair.consumer.add(prompt, params=carried, request_id=name, max_tokens=3)
        pair.run()
        assert pair.consumer.scheduled[name][0] == (10, 1), "the prompt was not fetched"
        assert pair.consumer.finished[name].tokens == answer(prompt, 3)
        pair.check_idle()


def test_two_ranks_are_dialled_where_they_bind() -> None:
    """W14: the port that is computed for dialling is the one that the rank listens on."""
    pair, p, d = start(HYBRID, ranks=2)
    with pair:
        prompt = prompt_of(11)
        name = f"cmpl-{request_id(p, d, UNIQUE)}-0-1a2b3c4d"
        pair.consumer.add(prompt, params=picked(prefill(pair, prompt, name)), request_id=name, max_tokens=3)
        pair.run()
        assert pair.consumer.scheduled[name][0] == (10, 1)
        pair.check_idle()


def test_blocks_wait_for_their_consumer_as_long_as_defer_timeout() -> None:
    with Pair(HYBRID, producer=moriio(defer_timeout="0.3"), consumer=moriio()) as pair:
        params = prefill(pair, prompt_of(10), "r")
        assert params["stateferry"]["lease_s"] == 0.3
        pair.run()
        pair.check_idle()
        assert pair.producer.ferry.counters.expired == 1


@pytest.mark.parametrize(
    "damage",
    [
        {"remote_engine_id": None},
        {"remote_engine_id": "127.0.0.1:6301"},
        {"remote_block_ids": None},
        {"remote_block_ids": [[1, 2, 3]]},
        {"transfer_id": 7},
        {"transfer_id": "a\nb"},
    ],
    ids=str,
)
def test_params_that_say_nothing_are_computed_here(damage: dict[str, Any]) -> None:
    """W4, W9: such params claimed tokens that nobody sent, or ended the engine."""
    with Pair(HYBRID, producer=moriio(defer_timeout=0.3), consumer=moriio()) as pair:
        prompt = prompt_of(10)
        params = picked(prefill(pair, prompt, "r")) | damage
        pair.consumer.add(prompt, params=params, request_id="r", max_tokens=3)
        pair.run()
        assert pair.consumer.computed_here("r") >= 10
        assert pair.consumer.finished["r"].tokens == answer(prompt, 3)
        pair.check_idle()


@pytest.mark.parametrize("speaks", ["producer", "consumer"])
def test_where_one_engine_alone_has_moriios_settings_nothing_is_mixed_up(speaks: str) -> None:
    """Tables in the other order never pass for those of other groups: the prompt is computed here."""
    with Pair(HYBRID, lease_s=0.3, **{speaks: moriio()}) as pair:
        prompt = prompt_of(10)
        params = prefill(pair, prompt, "r")
        pair.consumer.add(prompt, params=params, request_id="r", max_tokens=3)
        pair.run()
        assert pair.consumer.computed_here("r") >= 10
        assert pair.consumer.finished["r"].tokens == answer(prompt, 3)
        pair.check_idle()


def test_the_router_hears_of_an_engine_once_its_workers_have_addresses() -> None:
    """One place in an engine registers: the half that all of its ranks report to."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        settings = moriio(proxy_ip="127.0.0.1", proxy_ping_port=port)
        with Pair(HYBRID, ranks=2, producer=settings, consumer=moriio()) as pair:
            sender, said = router.recv_multipart()
            assert msgspec.msgpack.decode(said) == {
                "type": "P",
                "http_address": "127.0.0.1:8000",
                "zmq_address": f"host:127.0.0.1,handshake:{settings['handshake_port']},notify:61005",
                "dp_size": 1,
                "tp_size": 2,
                "transfer_mode": "READ",
            }
            assert all(half._dropin._registration is None for half in pair.producer.worker_halves)
            pair.producer.connector.shutdown()
            router.setsockopt(zmq.RCVTIMEO, 0)
            under_way = []
            with contextlib.suppress(zmq.Again):
                while True:
                    under_way.append(router.recv_multipart()[0])
            assert set(under_way) <= {sender}, "somebody else registers, too"


@pytest.mark.parametrize(
    ("external", "hybrid", "local", "index", "speaks"),
    [
        (False, False, None, 0, True),
        (False, False, 1, 1, False),
        (True, False, 0, 3, True),
        (False, True, 0, 4, True),
        (False, True, 1, 5, False),
    ],
)
def test_one_engine_speaks_for_those_behind_one_http_port(
    external: bool, hybrid: bool, local: int | None, index: int, speaks: bool
) -> None:
    parallel = make_config("kv_producer", HYBRID).parallel_config
    parallel.data_parallel_external_lb = external
    parallel.data_parallel_hybrid_lb = hybrid
    parallel.data_parallel_rank_local = local
    parallel.data_parallel_index = index
    assert fronts_http(parallel) is speaks


def test_what_has_no_effect_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with Pair(HYBRID, ranks=2, producer=moriio(num_workers=4, notify_port=7), consumer=moriio()):
        pass
    found = [r.getMessage() for r in caplog.records if "without effect" in r.getMessage()]
    assert len(found) == 1
    assert "notify_port, num_workers" in found[0]


def test_the_name_in_moriio_configurations_loads_us() -> None:
    assert issubclass(MoRIIOConnector, StateFerryConnector)
    config = make_config("kv_producer", HYBRID, **moriio())
    config.kv_transfer_config.kv_connector = "MoRIIOConnector"
    config.kv_transfer_config.kv_connector_module_path = "stateferry.vllm.dropin"
    cache, _, _ = make_cache(config, HYBRID)
    made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    assert isinstance(made, MoRIIOConnector)
    made.shutdown()
