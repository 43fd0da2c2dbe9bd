"""`examples/llmd_sidecar.py` with its connector `mooncake`: both legs at once, before made-up engines.

The facts are those of llm-d's own sidecar, read in its source. Where it asks is the service that prefill
engines answer it with.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestClient, TestServer
from tests.programs import loaded
from tests.unit.test_llmd_sidecar import BODY, MadeUp

from stateferry.bootstrap import BootstrapService, query_answer
from stateferry.ids import EngineId, Epoch
from stateferry.wire import RankAddress, parse_promise, promised_to

EXAMPLE = Path(__file__).parents[2] / "examples" / "llmd_sidecar.py"
PATH = "/v1/completions"
PLACES = {0: (EngineId("p_dp0"), [RankAddress("127.0.0.1", 5600, Epoch(1))])}
TWO_PLACES = PLACES | {1: (EngineId("p_dp1"), [RankAddress("127.0.0.1", 5601, Epoch(1))])}


@pytest.fixture(scope="module")
def sidecar() -> ModuleType:
    return loaded(EXAMPLE)


class Scene:
    """A client, the sidecar, two engines, and the service that the prefill engine is asked at."""

    def __init__(self, client: TestClient[Any, Any], prefill: MadeUp, decode: MadeUp, named: str) -> None:
        self.client, self.prefill, self.decode = client, prefill, decode
        self.named = {"x-prefiller-host-port": named}
        self.bootstrap = BootstrapService("127.0.0.1", 0)


def play(sidecar: ModuleType, scenario: Callable[[Scene], Awaitable[None]]) -> Scene:
    """Run a scenario; give it for a look."""

    async def run() -> Scene:
        prefill, decode = MadeUp(), MadeUp()
        async with TestServer(prefill.app()) as p, TestServer(decode.app()) as d:
            scene = Scene(None, prefill, decode, f"{p.host}:{p.port}")  # type: ignore[arg-type]
            scene.bootstrap.start()
            app = sidecar.Sidecar(str(d.make_url("/")), 5, "mooncake", scene.bootstrap.port).app()
            try:
                async with TestClient(TestServer(app)) as scene.client:
                    await asyncio.wait_for(scenario(scene), 30.0)
            finally:
                scene.bootstrap.stop()
        return scene

    return asyncio.run(run())


def test_neither_leg_waits_for_the_other_and_both_have_what_they_need(sidecar: ModuleType) -> None:
    async def scenario(scene: Scene) -> None:
        scene.bootstrap.tell(query_answer(PLACES))
        scene.prefill.held = asyncio.Event()
        answer = await scene.client.post(PATH, json=BODY, headers=scene.named)
        assert (await answer.json())["choices"][0]["text"] == "Kyoto", "the decode engine's"
        await scene.prefill.waits.wait()
        assert not scene.prefill.held.is_set()
        scene.prefill.held.set()

    scene = play(sidecar, scenario)
    ((path, first, headers),) = scene.prefill.asked
    ((_, second, headers_two),) = scene.decode.asked
    assert path == PATH
    assert (first["max_tokens"], first["stream"], first["prompt"]) == (1, False, "q")
    assert "min_tokens" not in first
    params = first["kv_transfer_params"]
    assert set(params) == {"do_remote_decode", "do_remote_prefill", "transfer_id"}
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert headers["x-data-parallel-rank"] == "0"
    assert "x-data-parallel-rank" not in headers_two, "a rank of the prefill engine's"
    fetch = second.pop("kv_transfer_params")
    assert second == BODY
    assert fetch["remote_bootstrap_addr"] == f"http://127.0.0.1:{scene.bootstrap.port}"
    promise = parse_promise(fetch)
    assert promise is not None
    assert promise.address.port == 5600
    assert promise.transfer_id == promised_to(params)


def test_legs_that_were_sent_one_after_the_other_would_be_noticed(sidecar: ModuleType) -> None:
    """The mutant: the other connector, before a prefill engine that does not answer."""

    async def run() -> int:
        prefill, decode = MadeUp(), MadeUp()
        prefill.held = asyncio.Event()
        async with (
            TestServer(prefill.app()) as p,
            TestServer(decode.app()) as d,
            TestClient(TestServer(sidecar.Sidecar(str(d.make_url("/"))).app())) as client,
        ):
            named = {"x-prefiller-host-port": f"{p.host}:{p.port}"}
            asked = asyncio.create_task(client.post(PATH, json=BODY, headers=named))
            await prefill.waits.wait()
            early = len(decode.asked)
            prefill.held.set()
            await asked
        return early

    assert asyncio.run(asyncio.wait_for(run(), 30.0)) == 0


def test_names_are_new_and_the_prefill_engine_is_asked_once(sidecar: ModuleType) -> None:
    async def scenario(scene: Scene) -> None:
        scene.bootstrap.tell(query_answer(TWO_PLACES))
        for _ in range(40):
            assert (await scene.client.post(PATH, json=BODY, headers=scene.named)).status == 200
            scene.bootstrap.tell(b"nothing")
        while len(scene.prefill.asked) < 40:
            await asyncio.sleep(0.01)

    scene = play(sidecar, scenario)
    firsts = {
        body["kv_transfer_params"]["transfer_id"]: headers["x-data-parallel-rank"]
        for _, body, headers in scene.prefill.asked
    }
    assert len(firsts) == 40
    assert set(firsts.values()) == {"0", "1"}, "load is spread over data-parallel ranks"
    for _, body, _ in scene.decode.asked:
        params = body["kv_transfer_params"]
        rank = firsts[params["transfer_id"]]
        assert params["remote_engine_id"] == f"p_dp{rank}@127.0.0.1:560{rank}", "the very rank that computes"


@pytest.mark.parametrize(
    "told", [None, b"nothing", b"[]", b"{}", b'{"0": 1}', b'{"0": {}}'], ids=lambda told: repr(told)
)
def test_a_prefill_engine_that_does_not_say_where_it_listens_is_a_bad_gateway(
    sidecar: ModuleType, told: bytes | None
) -> None:
    async def scenario(scene: Scene) -> None:
        if told is not None:
            scene.bootstrap.tell(told)
        answer = await scene.client.post(PATH, json=BODY, headers=scene.named)
        assert answer.status == 502
        assert "/query does not say where" in (await answer.json())["error"]["message"]

    scene = play(sidecar, scenario)
    assert scene.prefill.asked == scene.decode.asked == []


def test_a_prefill_engine_that_nobody_can_ask_is_a_bad_gateway(sidecar: ModuleType) -> None:
    async def scenario(scene: Scene) -> None:
        scene.bootstrap.stop()
        assert (await scene.client.post(PATH, json=BODY, headers=scene.named)).status == 502

    scene = play(sidecar, scenario)
    assert scene.prefill.asked == scene.decode.asked == []


def test_a_first_leg_that_fails_is_not_the_clients_and_not_tried_again(sidecar: ModuleType) -> None:
    """Its name serves one request. The decode engine computes what it does not get."""

    async def scenario(scene: Scene) -> None:
        scene.bootstrap.tell(query_answer(PLACES))
        scene.prefill.statuses = [503]
        for number in (1, 2):
            assert (await scene.client.post(PATH, json=BODY, headers=scene.named)).status == 200
            while len(scene.prefill.asked) < number:
                await asyncio.sleep(0.01)

    scene = play(sidecar, scenario)
    assert len(scene.prefill.asked) == len(scene.decode.asked) == 2


def test_a_client_that_leaves_ends_the_second_leg_and_the_first_goes_on(sidecar: ModuleType) -> None:
    async def scenario(scene: Scene) -> None:
        scene.bootstrap.tell(query_answer(PLACES))
        scene.prefill.held, scene.decode.held = asyncio.Event(), asyncio.Event()
        async with ClientSession() as leaving:
            url = scene.client.make_url(PATH)
            task = asyncio.create_task(leaving.post(url, json=BODY, headers=scene.named))
            await scene.prefill.waits.wait()
            await scene.decode.waits.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await scene.decode.left.wait()
        assert not scene.prefill.left.is_set()
        scene.prefill.held.set()

    play(sidecar, scenario)


def test_what_is_asked_on_the_command_line_is_what_is_served(
    sidecar: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[Any, ...]] = []

    class Made(sidecar.Sidecar):  # type: ignore[misc,name-defined]
        def __init__(self, *arguments: Any) -> None:
            made.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(sidecar, "Sidecar", Made)
    monkeypatch.setattr(sidecar.web, "run_app", lambda app, **options: None)
    words = ["llmd_sidecar.py", "--decode", "http://d:1"]
    more = ["--kv-connector", "mooncake", "--mooncake-bootstrap-port", "9000"]
    for arguments in (words, words + more):
        monkeypatch.setattr("sys.argv", arguments)
        sidecar.main()
    assert made == [("http://d:1", 0, "nixlv2", 8998), ("http://d:1", 0, "mooncake", 9000)]
