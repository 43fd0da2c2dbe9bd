"""What routers hear of an engine before they send both legs at once, and what a hand-off makes of it."""

import socket
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from harness import HYBRID, Engine, Pair
from simulated_model import answer
from test_both_legs_at_once import prompt_of
from test_moriio import free_ports, moriio

from stateferry.config import Config
from stateferry.errors import ConfigError
from stateferry.ids import Epoch
from stateferry.vllm.bootstrap import MOONCAKES_VARIABLE, Bootstrap
from stateferry.wire import DESCRIBE_PARAMS, RankAddress, parse_description

pytestmark = pytest.mark.scheduler

HOST = "127.0.0.1"


def settings(ranks: int = 1) -> dict[str, Any]:
    first = free_ports(ranks + 1)
    return {"port": first, "bootstrap_port": first + ranks}


def query(port: int) -> httpx.Response:
    return httpx.get(f"http://{HOST}:{port}/query", timeout=30.0, trust_env=False)


def legs(port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What vllm-router, llm-d's sidecar and vLLM's example proxy send after they have asked."""
    told = query(port).json()
    name = "xfer-3b1f4d0a-8c55-4f0e-9a55-0a3f6a3d9f10"
    prefill = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
    decode = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": name,
        "remote_bootstrap_addr": f"http://{HOST}:{port}",
        "remote_engine_id": told["0"]["engine_id"],
    }
    return prefill, decode


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_both_legs_find_each_other_by_what_the_router_was_told(ranks: int, first: str) -> None:
    own = settings(ranks)
    with Pair(HYBRID, ranks=ranks, producer=own) as pair:
        prompt = prompt_of(14)
        to_prefill, to_decode = legs(own["bootstrap_port"])
        adds = {
            "prefill": lambda: pair.producer.add(prompt, params=to_prefill, request_id="p"),
            "decode": lambda: pair.consumer.add(prompt, params=to_decode, request_id="d", max_tokens=4),
        }
        adds.pop(first)()
        for add in adds.values():
            add()
        pair.run()
        assert pair.consumer.scheduled["d"][0] == (13, 1), "the prompt was not fetched"
        assert pair.consumer.finished["d"].tokens == answer(prompt, 4)
        pair.check_idle()


def test_an_address_that_is_not_rank_0s_hands_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: what is told decides whether the legs find each other."""
    real = Bootstrap.tell
    wrong = [RankAddress(HOST, 9, Epoch(1))]  # the discard port: nobody listens
    monkeypatch.setattr(Bootstrap, "tell", lambda self, ranks: real(self, wrong))
    own = settings() | {"lease_s": 0.3}
    with Pair(HYBRID, producer=own, consumer={"handshake_timeout_s": 0.3}) as pair:
        to_prefill, to_decode = legs(own["bootstrap_port"])
        pair.producer.add(prompt_of(14), params=to_prefill, request_id="p")
        pair.consumer.add(prompt_of(14), params=to_decode, request_id="d", max_tokens=4)
        pair.run()
        assert pair.consumer.scheduled["d"][0][0] == 0, "fetched from nowhere"
        assert pair.consumer.finished["d"].tokens == answer(prompt_of(14), 4)


@pytest.mark.parametrize("moved", [False, True], ids=["same port", "another port"])
def test_what_a_router_heard_of_an_engine_holds_for_its_next_life(moved: bool) -> None:
    """They ask once. The mutant is an engine that comes back elsewhere, which is why `port` must be set."""
    own = settings()
    with Pair(HYBRID, producer=own):
        to_prefill, to_decode = legs(own["bootstrap_port"])
    again = settings() | {"lease_s": 0.3} if moved else own
    with Pair(HYBRID, producer=again, consumer={"handshake_timeout_s": 0.3} if moved else {}) as pair:
        pair.producer.add(prompt_of(14), params=to_prefill, request_id="p")
        pair.consumer.add(prompt_of(14), params=to_decode, request_id="d", max_tokens=4)
        pair.run()
        assert pair.consumer.scheduled["d"][0][0] == (0 if moved else 13)
        assert pair.consumer.finished["d"].tokens == answer(prompt_of(14), 4)
        pair.check_idle()


def test_all_ranks_are_told_and_an_engine_that_ends_answers_no_more() -> None:
    own = settings(2)
    with Pair(HYBRID, ranks=2, producer=own) as pair:
        (told,) = query(own["bootstrap_port"]).json().values()
        name = pair.producer.config.kv_transfer_config.engine_id
        assert told["engine_id"] == f"{name}@{HOST}:{own['port']}"
        ports = {rank: place["0"] for rank, place in told["worker_addr"].items()}
        assert ports == {"0": f"tcp://{HOST}:{own['port']}", "1": f"tcp://{HOST}:{own['port'] + 1}"}
    with pytest.raises(httpx.ConnectError):
        query(own["bootstrap_port"])


def test_a_router_that_asks_before_the_ranks_are_known_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    own = settings()
    real = Bootstrap.tell

    def ask_first(self: Bootstrap, ranks: Any) -> None:
        if self.port:
            seen.append(query(own["bootstrap_port"]).status_code)
        real(self, ranks)

    monkeypatch.setattr(Bootstrap, "tell", ask_first)
    with Pair(HYBRID, producer=own):
        assert seen == [503]
        assert query(own["bootstrap_port"]).status_code == 200


def test_an_engine_describes_where_it_answers() -> None:
    own = settings()
    with Pair(HYBRID, producer=own) as pair:
        for engine, port in ((pair.producer, own["bootstrap_port"]), (pair.consumer, 0)):
            name = engine.add(prompt_of(11), params=DESCRIBE_PARAMS).request_id
            pair.run()
            assert parse_description(engine.finished[name].params).bootstrap_port == port


@pytest.mark.parametrize(
    ("role", "more", "says"),
    [
        ("kv_consumer", {}, "kv_role 'kv_consumer'.*prefill engines only"),
        ("kv_producer", moriio(handshake_port=0), "beside settings for MoRIIO"),
    ],
)
def test_an_engine_that_has_nothing_to_say_there_does_not_start(
    role: str, more: dict[str, Any], says: str
) -> None:
    own = settings()
    if more:
        own.pop("port")
    with pytest.raises(ConfigError, match=says):
        Engine(role, HYBRID, **own, **more)


def test_a_port_that_is_taken_ends_the_start_with_its_setting() -> None:
    own = settings()
    with (
        socket.create_server((HOST, own["bootstrap_port"])),
        pytest.raises(ConfigError, match=rf"{HOST}:{own['bootstrap_port']}.*'bootstrap_port'"),
    ):
        Engine("kv_producer", HYBRID, **own)


def test_mooncakes_variable_opens_no_door_and_is_answered_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_ports(1)
    monkeypatch.setenv(MOONCAKES_VARIABLE, str(port))
    with Pair(HYBRID), pytest.raises(httpx.ConnectError):
        query(port)
    (said,) = [record.getMessage() for record in caplog.records if "answers no /query" in record.getMessage()]
    assert "'bootstrap_port'" in said


def of(index: int, **more: Any) -> Any:
    """vLLM's parallel config of one of several engines, as far as it is looked at."""
    facts = {"size": 1, "size_local": 1, "rank_local": index, "external_lb": False, "hybrid_lb": False} | more
    return SimpleNamespace(data_parallel_index=index, **{f"data_parallel_{k}": v for k, v in facts.items()})


def told_by(parallel: Any, name: str = "e") -> dict[str, Any] | None:
    """What the engine answers; None: it leaves that to another. Raises ConfigError."""
    first = free_ports(3)
    config = Config(port=first, bootstrap_port=first + 2)
    transfer = SimpleNamespace(engine_id=name, kv_role="kv_producer", is_kv_producer=True)
    vllm_config = SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)
    made = Bootstrap(config, vllm_config, drops_in=False)
    made.start()
    try:
        own = first + parallel.data_parallel_index * 2
        made.tell([RankAddress(HOST, own + rank, Epoch(1)) for rank in range(2)])
        told = query(config.bootstrap_port).json()
        return {
            rank: (entry["engine_id"].replace(str(own), "own"), list(entry["worker_addr"]))
            if rank == "0"
            else entry["engine_id"].replace(str(own + 2 * int(rank)), "next")
            for rank, entry in told.items()
        }
    except httpx.ConnectError:
        return None
    finally:
        made.stop()


def test_the_first_of_several_engines_answers_for_all_that_share_its_http_port() -> None:
    """As the routers expect: one bootstrap port a URL, a key a data-parallel rank, an address each."""
    ranks = ["0", "1"]
    two = {"size": 2, "size_local": 2}
    both = {"0": (f"e_dp0@{HOST}:own", ranks), "1": f"e_dp1@{HOST}:next"}
    assert told_by(of(0, **two), "e_dp0") == both
    assert told_by(of(1, **two), "e_dp1") is None
    # One HTTP port a machine: ranks are counted from the first one there.
    node = {"size": 4, "size_local": 2, "hybrid_lb": True}
    third = {"0": (f"e_dp2@{HOST}:own", ranks), "1": f"e_dp3@{HOST}:next"}
    assert told_by(of(2, **node, rank_local=0), "e_dp2") == third
    assert told_by(of(3, **node, rank_local=1), "e_dp3") is None
    # One HTTP port an engine.
    assert told_by(of(3, size=4, external_lb=True, rank_local=0), "e_dp3") == {
        "0": (f"e_dp3@{HOST}:own", ranks)
    }


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (of(1), "would not know of it"),  # a dense model's: vLLM tells each that it is alone
        (of(1, hybrid_lb=True), "would not know of it"),
        (of(0, size=4, size_local=2, rank_local=0), "where the machines of the others are"),
    ],
)
def test_neighbours_that_the_one_who_answers_cannot_know_end_the_start(parallel: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"'bootstrap_port'.*{says}.*--data-parallel-external-lb"):
        told_by(parallel)
