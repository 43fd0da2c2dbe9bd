"""`stateferry doctor` as a person meets it, over engines and machines that are made up."""

import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from tests.unit.test_top_tables import figures

from stateferry.cli import doctor as module
from stateferry.cli import doctor_standing
from stateferry.cli.main import main
from stateferry.doctor import EngineAnswer, Finding, Verdict
from stateferry.errors import LayoutMismatch
from stateferry.layout.fingerprint import compare
from stateferry.layout.spec import Part, PartRule
from stateferry.stack import AnswerError
from stateferry.testing.caches import Model, Tensor
from stateferry.watch import Figures
from stateferry.wire import RankAddress

HEADS = Part(name="heads", size=4, rule=PartRule.SPLIT)
MODEL = Model(((Tensor("conv", (3, (HEADS,)), 2), Tensor("matrix", ((HEADS,), 5), 4)),) * 2)
HEALTHY = [Finding("torch", Verdict.OK, "2.13.0"), Finding("nixl", Verdict.WARNING, "[none]", "install it")]
SICK = [*HEALTHY, Finding("vllm", Verdict.PROBLEM, "not installed, needed for everything", "install vllm")]
PREFILL, DECODE = "http://p:8100", "http://d:8200"


def engine(size: int, kv_role: str = "", **facts: str) -> EngineAnswer:
    layouts = [msgspec.structs.replace(MODEL.layout(rank, size), facts=facts) for rank in range(size)]
    ranks = [RankAddress("10.0.0.1", 7000 + rank, 77 + rank) for rank in range(size)]
    return EngineAnswer(tuple(layouts), tuple(ranks), kv_role)


Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Iterator[Doctor]:
    """Run the command with these findings and engines: (exit code, stdout, stderr)."""
    handler = signal.getsignal(signal.SIGTERM)

    def call(
        *arguments: str,
        findings: Sequence[Finding] = HEALTHY,
        engines: dict[str, Any] | None = None,
        pages: dict[str, Figures] | None = None,
    ) -> tuple[int, str, str]:
        def look(url: str) -> list[Figures]:
            return [page for at, page in (pages or {}).items() if at == url]

        def ask(url: str) -> EngineAnswer:
            found = (engines or {})[url]
            if isinstance(found, Exception):
                raise found
            return found

        with (
            patch.object(module, "examine_machine", lambda: list(findings)),
            patch.object(module, "ask_engine", ask),
            patch.object(doctor_standing, "looked_at", look),
            patch.object(sys, "argv", ["stateferry", "doctor", *arguments]),
            pytest.raises(SystemExit) as caught,
        ):
            main()
        return int(caught.value.code or 0), *capsys.readouterr()

    yield call
    signal.signal(signal.SIGTERM, handler)


def both(*more: str) -> list[str]:
    return ["--prefill-url", PREFILL, "--decode-url", DECODE, *more]


def test_a_healthy_machine_passes(doctor: Doctor) -> None:
    code, out, _ = doctor()
    assert code == 0
    for words in ("No problem found", "warning", "[none]", "install it", "2.13.0"):
        assert words in out


def warned(out: str) -> int:
    """Rows of the machine's table that warn."""
    return sum("│ warning" in line for line in out.splitlines())


@pytest.mark.parametrize(
    ("findings", "says"),
    [
        (HEALTHY[:1], "No problem found.\n"),
        (HEALTHY, "No problem found.\nOne warning: nixl.\n"),
        ([*HEALTHY, Finding("/dev/shm", Verdict.WARNING, "64 MiB", "more")], "2 warnings: nixl, /dev/shm.\n"),
        (SICK, "vllm: not installed, needed for everything\nOne warning: nixl.\n"),
    ],
)
def test_the_summary_says_as_many_warnings_as_the_rows(
    doctor: Doctor, findings: list[Finding], says: str
) -> None:
    """Symptom: a row that warned of memory that may be locked, and `No problem found` under it."""
    _, out, _ = doctor(findings=findings)
    assert out.endswith(says)
    value = json.loads(doctor("--json", findings=findings)[1])
    assert len(value["warnings"]) == warned(out) == says.count("nixl") + says.count("/dev/shm")


def test_a_problem_is_named_and_fails(doctor: Doctor) -> None:
    code, out, _ = doctor(findings=SICK)
    assert code == 1
    assert "vllm: not installed" in out
    assert "No problem" not in out


def test_json_is_the_last_line(doctor: Doctor) -> None:
    code, out, err = doctor("--json", findings=SICK)
    value = json.loads(out)
    assert code == 1
    assert value["passed"] is False
    assert value["problems"] == ["vllm: not installed, needed for everything"]
    assert [f["verdict"] for f in value["findings"]] == ["ok", "warning", "problem"]
    assert value["engines"] is None
    assert "This machine" in err


@pytest.mark.parametrize(("producer", "consumer"), [(1, 1), (1, 2), (4, 2)])
def test_engines_that_fit_are_shown_with_what_moves(doctor: Doctor, producer: int, consumer: int) -> None:
    engines = {PREFILL: engine(producer, dtype="x"), DECODE: engine(consumer, dtype="x")}
    code, out, _ = doctor(*both(), engines=engines)
    assert code == 0
    for words in ("They can exchange", PREFILL, DECODE, "10.0.0.1:7000", "77", f"{producer} → {consumer}"):
        assert words in out
    code, out, _ = doctor(*both("--json"), engines=engines)
    value = json.loads(out)["engines"]
    assert code == 0
    assert value["can_exchange"] is True
    assert len(value["prefill"]["ranks"]) == producer
    assert len(value["decode"]["ranks"]) == consumer
    state = 2 * (3 * 4 * 2 + 4 * 5 * 4)
    assert {length["state_bytes"] for length in value["lengths"]} == {state}
    assert sum(sum(pair["block_bytes"]) for pair in value["pairs"]) == state


def test_engines_that_do_not_fit_are_told_so_in_the_words_of_the_hand_shake(doctor: Doctor) -> None:
    engines = {PREFILL: engine(1, kv_cache_dtype="fp8"), DECODE: engine(1, kv_cache_dtype="auto")}
    with pytest.raises(LayoutMismatch) as refusal:
        compare(engines[DECODE].layouts[0], engines[PREFILL].layouts[0])  # as the decode engine does
    code, out, _ = doctor(*both("--json"), engines=engines)
    value = json.loads(out)
    assert code == 1
    assert value["problems"] == [str(refusal.value)]
    assert value["engines"]["can_exchange"] is False
    assert value["engines"]["problem"] == str(refusal.value)
    _, out, _ = doctor(*both(), engines=engines)
    assert "They can exchange" not in out
    _, _, after = out.partition(str(refusal.value))
    assert "decode engine's words" in after.partition("One warning")[0]


@pytest.mark.parametrize(
    ("prefill", "decode", "fit"),
    [
        ("kv_producer", "kv_consumer", True),
        ("kv_both", "kv_both", True),
        ("kv_producer", "kv_producer", False),
        ("kv_consumer", "kv_consumer", False),
        ("kv_consumer", "kv_producer", False),
    ],
)
def test_roles_are_compared_too(doctor: Doctor, prefill: str, decode: str, fit: bool) -> None:
    engines = {PREFILL: engine(1, prefill, dtype="x"), DECODE: engine(1, decode, dtype="x")}
    code, out, _ = doctor(*both("--json"), engines=engines)
    value = json.loads(out)
    assert code == (0 if fit else 1)
    assert value["engines"]["can_exchange"] is fit
    assert value["engines"]["problem"] == ""
    assert value["problems"] == ([] if fit else [value["engines"]["wrong_roles"]])
    assert value["engines"]["prefill"]["kv_role"] == prefill
    _, out, _ = doctor(*both(), engines=engines)
    assert ("They can exchange" in out) == fit
    assert prefill in out
    assert decode in out
    assert "decode engine's words" not in out


@pytest.mark.parametrize("trouble", ["", "http://p:8998/query does not answer"])
def test_where_routers_ask_is_shown_and_whether_they_are_answered(
    doctor: Doctor, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "why_not_told", lambda *about: asked.append(about) or trouble)
    answers = dataclasses.replace(engine(1, dtype="x"), bootstrap_port=8998)
    engines = {PREFILL: answers, DECODE: engine(1, dtype="x")}
    code, out, _ = doctor(*both(), engines=engines)
    assert code == 0
    assert asked == [("http://p:8998/query", answers.ranks)]
    assert (trouble or "are answered at http://p:8998/query.") in out
    assert ("2 warnings: nixl, what routers are told." in out) == bool(trouble)
    value = json.loads(doctor(*both("--json"), engines=engines)[1])
    assert value["engines"]["prefill"]["query"] == "http://p:8998/query"
    assert value["engines"]["untold"] == trouble
    assert (f"what routers are told: {trouble}" in value["warnings"]) == bool(trouble)


def test_wrong_roles_and_caches_that_do_not_fit_are_two_problems(doctor: Doctor) -> None:
    engines = {
        PREFILL: engine(1, "kv_producer", kv_cache_dtype="fp8"),
        DECODE: engine(1, "kv_producer", kv_cache_dtype="auto"),
    }
    code, out, _ = doctor(*both("--json"), engines=engines)
    assert code == 1
    roles, caches = json.loads(out)["problems"]
    assert "both engines have kv_role" in roles
    assert "kv_cache_dtype" in caches


def test_an_engine_that_does_not_answer_is_a_problem(doctor: Doctor) -> None:
    engines = {PREFILL: engine(1), DECODE: AnswerError(f"{DECODE} did not answer: connection refused")}
    code, out, _ = doctor(*both("--json"), engines=engines)
    value = json.loads(out)
    assert code == 1
    assert value["problems"] == [f"{DECODE} did not answer: connection refused"]
    assert value["engines"]["can_exchange"] is False
    assert value["engines"]["prefill"]["ranks"][0]["epoch"] == 77
    assert value["engines"]["decode"] is None


def page(**more: Any) -> Figures:
    return dataclasses.replace(figures("decode_after.txt", DECODE), **more)


def test_peers_that_hang_are_a_warning_of_the_engine_that_knows_them(doctor: Doctor) -> None:
    engines, pages = {PREFILL: engine(1), DECODE: engine(1)}, {DECODE: page(peers={"silent": 2})}
    code, out, _ = doctor(*both(), engines=engines, pages=pages)
    assert code == 0
    assert f"{DECODE} has 2 silent peers now" in out
    assert f"2 warnings: nixl, {DECODE} now." in out
    _, out, _ = doctor(*both("--json"), engines=engines, pages=pages)
    assert json.loads(out)["warnings"][1:] == [f"{DECODE} now: 2 silent peers"]
    _, out, _ = doctor(*both(), engines=engines, pages={DECODE: page(retries=3, lease_losses=2)})
    assert "One warning" in out, "what is long over is not how it stands"


def test_an_engine_that_hangs_is_a_problem_and_is_not_waited_for(doctor: Doctor) -> None:
    """Symptom: doctor waited for a minute without a word, and then said that there was no answer."""
    engines = {PREFILL: engine(1), DECODE: AssertionError("asked")}
    hangs = page(running=3, waiting=1, told_s_ago=600.0)
    code, out, _ = doctor(*both("--json"), engines=engines, pages={DECODE: hangs})
    assert code == 1
    (problem,) = json.loads(out)["problems"]
    assert problem.startswith(
        f"{DECODE} has 3 requests running and 1 waiting, and no step for 10 min: it hangs"
    )
    for rests in (page(running=0, waiting=0, told_s_ago=600.0), page(running=3, told_s_ago=5.0)):
        engines[DECODE] = engine(1)
        assert doctor(*both(), engines=engines, pages={DECODE: rests})[0] == 0


@pytest.mark.parametrize("dead", [[PREFILL], [DECODE], [PREFILL, DECODE]], ids=["prefill", "decode", "both"])
def test_every_engine_has_a_row_and_every_dead_one_its_reason(doctor: Doctor, dead: list[str]) -> None:
    """Symptom: an empty table, and nothing of the second engine where the first was dead."""
    engines = {url: AnswerError(f"{url} refused") if url in dead else engine(1) for url in (PREFILL, DECODE)}
    code, out, _ = doctor(*both(), engines=engines)
    assert code == 1
    rows = {url: line for line in out.splitlines() for url in engines if line.startswith("│") and url in line}
    for url in engines:
        assert ("not known" in rows[url]) == (url in dead)
        assert ("10.0.0.1:7000" in rows[url]) == (url not in dead)
        assert (f"  {url} refused\n" in out) == (url in dead)
    assert "They can exchange" not in out
    assert "decode engine's words" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prefill-url", PREFILL], "two sides"),
        (["--decode-config", "d.yaml"], "two sides"),
        ([*both(), "--decode-config", "d.yaml"], "--decode-config"),
        ([PREFILL, DECODE], f"--prefill-url {PREFILL} --decode-url {DECODE}"),
        ([PREFILL], f"--prefill-url {PREFILL} --decode-url URL"),
    ],
)
def test_one_side_alone_or_twice_is_bad_usage(doctor: Doctor, arguments: list[str], words: str) -> None:
    code, out, err = doctor(*arguments)
    assert code == 2
    assert words in err
    assert out == ""
