"""The gate on two engines that only pretend: it must pass good ones and fail each kind of bad one.

The pretended model answers from a state (a window and two layers of two heads) and from all tokens, so
every damage shows exactly where its part is used, and a connector's defects are one line each.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from stateferry.errors import ConfigError
from stateferry.gate.damages import ANY_FEATURE, DIGEST_MUTANTS, MUTANTS
from stateferry.gate.engines import Facts
from stateferry.gate.report import ModelReport
from stateferry.gate.run import Size, judge_engines
from stateferry.gate.speculation import Speculation
from stateferry.gate.subjects import Subject
from stateferry.stack import AnswerError, Completion, Logprobs
from stateferry.testing.mutants import DAMAGES_NOTHING

BLOCK, CHUNK = 16, 64
SIZE = Size(prompts=40, tokens=3, mutant_prompts=8, digest_prompts=3)
FACTS = Facts(BLOCK, True, CHUNK, 4096)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Memory:
    """What a prompt leaves behind."""

    window: Tokens
    heads: tuple[Tokens, ...]
    """Layer by layer, two heads each."""
    kv: Tokens

    @staticmethod
    def of(tokens: Tokens) -> "Memory":
        """Computed here."""
        return Memory(tokens[-3:], tuple((part, *tokens) for part in range(4)), tokens)

    def after(self, token: int) -> "Memory":
        """With one more token."""
        heads = tuple((*head, token) for head in self.heads)
        return Memory((*self.window, token)[-3:], heads, (*self.kv, token))


@dataclass
class Pretended:
    """See Engines. Every field below the first is a defect, or a state of affairs."""

    facts: Facts = FACTS
    blind_to: str = ""
    """A part of the memory that answers do not depend on."""
    loses: str = ""
    """A part that no hand-off brings."""
    noise: float = 0.0
    """Added to every log-probability of a decode leg."""
    drafts: int = 0
    """Rows by which a first step is filled up, but not across a block: then it rounds otherwise."""
    jitter: bool = False
    """No two answers are the same."""
    state_bytes: int = 100
    short_by: int = 0
    """Bytes of attention that do not arrive."""
    reports: bool = True
    testing: bool = True
    caching: bool = True
    breaks_on: str = ""
    """A damage that is answered with an error."""
    dies_on: str = ""
    no_heads: bool = False
    leaks: bool = False
    """The last damage leaves its hand-off open."""
    open: dict[int, Tokens] = field(default_factory=dict)
    held: dict[str, set[Tokens]] = field(default_factory=lambda: {"p": set(), "d": set()})
    late: int = 0
    """How many looks at its metrics come too early."""
    hits: int = 0
    asked: int = 0

    def alone(self, prompt: Tokens, max_tokens: int) -> Completion:
        """See Engines."""
        self._look("p", prompt)
        return self._answer(Memory.of(prompt[:-1]), prompt, max_tokens, None)

    def hold_on_decode(self, prompt: Tokens) -> None:
        """See Engines."""
        self._look("d", prompt)

    def offer(self, prompt: Tokens) -> Mapping[str, Any]:
        """See Engines."""
        if len(prompt) < 2:
            return {"stateferry": {"not_offered": "a prompt of one token"}}
        self._look("p", prompt[:-1])
        number = len(self.open) + self.asked
        self.open[number] = prompt[:-1]
        return {"number": number}

    def decode(
        self,
        prompt: Tokens,
        params: Mapping[str, Any],
        max_tokens: int,
        damage: Mapping[str, Any] | None = None,
    ) -> Completion:
        """See Engines."""
        self.asked += 1000
        held = self._look("d", prompt)
        if "number" not in params or held == len(prompt) - 1:
            self.open.pop(params.get("number", -1), None)
            return self._answer(Memory.of(prompt[:-1]), prompt, max_tokens, {})
        good = Memory.of(self.open.pop(params["number"]))
        if self.leaks and damage == {"withhold": "number:1", "verify": "all"}:
            self.open[params["number"]] = prompt[:-1]
        memory, reason = self._damaged(good, damage or {}) if self.testing else (good, "")
        if self.loses:
            memory = replace(memory, **{self.loses: ()})
        if not reason and (damage or {}).get("verify") and memory != good:
            reason = "digests of entries [0] differ"
        if reason:
            outcome = {"outcome": "failed", "reason": reason, "tokens": len(prompt) - 1, "bytes": {}}
            return self._answer(good, prompt, max_tokens, outcome)
        blocks = -(-(len(prompt) - 1) // BLOCK) - held // BLOCK
        sizes = {"state": self.state_bytes, "attention": blocks * 10 - self.short_by}
        outcome = {"outcome": "received", "reason": "", "tokens": len(prompt) - 1, "bytes": sizes}
        length = len(prompt) - 1
        crosses = length % BLOCK and length // BLOCK < (length + self.drafts) // BLOCK
        return self._answer(memory, prompt, max_tokens, outcome, 1e-9 if crosses else self.noise)

    def forget(self, *, prefill: bool = False, decode: bool = False) -> None:
        """See Engines."""
        if prefill and self.open:
            raise AnswerError("blocks are held", 200)
        for engine, wanted in (("p", prefill), ("d", decode)):
            if wanted:
                self.held[engine].clear()

    def prefill_hit_tokens(self) -> int:
        """See Engines."""
        self.late -= 1
        return 0 if self.late > 0 else self.hits

    def _look(self, engine: str, prompt: Tokens) -> int:
        """Find the longest held prefix in whole blocks, then hold this prompt's."""
        cuts = [cut for cut in range(BLOCK, len(prompt), BLOCK) if prompt[:cut] in self.held[engine]]
        if self.caching:
            self.held[engine] |= {prompt[:cut] for cut in range(BLOCK, len(prompt) + 1, BLOCK)}
        found = max(cuts, default=0)
        self.hits += found if engine == "p" else 0
        return found

    def _damaged(self, good: Memory, damage: Mapping[str, Any]) -> tuple[Memory, str]:
        if self.breaks_on and self.breaks_on in str(damage):
            raise AnswerError("the engine gave the request up", 200)
        if self.dies_on and self.dies_on in str(damage):
            raise AnswerError("the engine did not answer", 0)
        if not damage or damage.get("nothing"):
            return good, ""
        if "other" in damage:
            other = Memory.of(self.open[damage["other"]["number"]])
            state = {"window": other.window, "heads": other.heads} if damage["what"] != "attention" else {}
            kv = {"kv": other.kv} if damage["what"] != "state" else {}
            return replace(good, **state, **kv), ""
        first, second, third, fourth = good.heads
        name, _, number = str(damage.get("withhold", damage.get("swap"))).partition(":")
        changed: dict[str, Any] = {
            "state": {"window": (), "heads": ((), (), (), ())},
            "convolution": {"window": ()},
            "layer": {"heads": ((), (), third, fourth) if int(number or 0) % 2 else (first, second, (), ())},
            "number": {"window": good.window[1:]}
            if number == "0"
            else {"heads": ((1,), second, third, fourth)},
            "last_block": {"kv": good.kv[: (len(good.kv) - 1) // BLOCK * BLOCK]},
            "heads": {"heads": (second, first, fourth, third)},
            "layers": {"heads": (third, fourth, first, second)},
        }.get(name)
        if changed is None:
            return good, f"tamper {sorted(damage)} is unknown"
        if name == "heads" and self.no_heads:
            return good, f"tamper swap {DAMAGES_NOTHING}"
        return replace(good, **changed), ""

    def _answer(
        self,
        memory: Memory,
        prompt: Tokens,
        max_tokens: int,
        outcome: Mapping[str, Any] | None,
        noise: float = 0.0,
    ) -> Completion:
        self.asked += 1
        chosen, tops, generated = [], [], [prompt[-1]]
        for _ in range(max_tokens):
            memory = memory.after(generated[-1])
            parts = {"window": memory.window, "heads": memory.heads, "kv": memory.kv}
            parts.pop(self.blind_to, None)
            rng = random.Random(f"{parts} {self.asked if self.jitter else ''}")
            top = {token: rng.random() - 2 + noise for token in rng.sample(range(1, 99), 5)}
            token = max(top, key=lambda t: top[t])
            generated.append(token)
            chosen.append(top[token])
            tops.append(top)
        report = None if outcome is None or not self.reports else {"stateferry": {"received": outcome}}
        if outcome == {}:
            report = {"stateferry": {"received": {"outcome": "unused"}}}
        return Completion(
            text="",
            token_ids=tuple(generated[1:]),
            finish_reason="length",
            prompt_tokens=len(prompt),
            kv_transfer_params=report,
            logprobs=Logprobs(tuple(chosen), tuple(tops)),
            total_s=0.0,
            first_token_s=None,
        )


def source(seed: int, length: int) -> Tokens:
    return tuple(random.Random(f"{seed} {length}").choices(range(1, 99), k=length))


def judged(
    engines: Pretended, lacking: frozenset[str] = frozenset(), speculation: Speculation | None = None
) -> ModelReport:
    subject = Subject("pretended", source, lacking, lambda folder: folder, speculation=speculation)
    return judge_engines(engines, subject, SIZE, "memory")


def failed(report: ModelReport) -> set[str]:
    return {tally.name for tally in (*report.mutants, *report.digests) if not tally.passed}


def test_good_engines_pass() -> None:
    engines = Pretended()
    report = judged(engines)
    assert report.failures() == []
    assert report.passed
    assert report.clean.exact == report.clean.prompts == SIZE.prompts
    assert {tally.name for tally in report.mutants} == {mutant.name for mutant in MUTANTS}
    assert {tally.name for tally in report.digests} == {mutant.name for mutant in DIGEST_MUTANTS}
    for tally in report.mutants:
        assert tally.judged == tally.asked == SIZE.mutant_prompts
        assert tally.caught == (0 if tally.name == "none" else tally.judged)


def test_no_hand_off_stays_open() -> None:
    engines = Pretended()
    assert judged(engines).leak == ""
    assert engines.open == {}


def test_blocks_that_stay_held_fail_the_run() -> None:
    report = judged(Pretended(leaks=True))
    assert report.leak == "blocks are held"
    assert not report.passed
    assert failed(report) == set()


def test_every_kind_of_hit_is_tried() -> None:
    report = judged(Pretended())
    assert set(report.clean.hits) == {"none", "prefill", "decode", "both"}
    assert {"one token", "convolution window", "block border", "chunk border"} <= set(report.clean.kinds)


def test_metrics_that_are_late_are_looked_at_again() -> None:
    assert judged(Pretended(late=20)).passed


def test_a_hit_that_did_not_happen_fails_its_case() -> None:
    report = judged(Pretended(caching=False))
    assert not report.passed
    assert any("the prefill engine held 0 tokens, not 16" in text for text in report.clean.failures)


def test_without_prefix_caching_hits_are_not_expected() -> None:
    report = judged(Pretended(caching=False, facts=Facts(BLOCK, False, CHUNK, 4096)))
    assert report.passed
    assert set(report.clean.hits) == {"none"}


@pytest.mark.parametrize("part", ["window", "heads", "kv"])
def test_a_part_that_never_arrives_fails_the_clean_arm(part: str) -> None:
    report = judged(Pretended(loses=part))
    assert not report.passed
    assert report.clean.exact < report.clean.prompts


@pytest.mark.parametrize(
    ("part", "unnoticed"),
    [
        ("window", {"convolution withheld"}),
        ("heads", {"one layer's state withheld", "heads swapped", "two layers swapped"}),
        ("kv", {"last attention block withheld", "another prompt's attention"}),
    ],
)
def test_a_model_that_does_not_need_a_part_fails_its_mutants(part: str, unnoticed: set[str]) -> None:
    report = judged(Pretended(blind_to=part))
    assert report.clean.passed
    assert not report.passed
    assert failed(report) == unnoticed


def test_noise_of_a_billionth_is_not_exact() -> None:
    report = judged(Pretended(noise=1e-9))
    assert report.clean.exact == 2  # the two prompts of which nothing moves
    assert not report.passed


def test_steps_of_another_shape_may_round_otherwise_where_engines_draft() -> None:
    report = judged(Pretended(drafts=3), speculation=Speculation("ngram", 3))
    assert report.passed, report.failures()
    assert report.clean.exact < report.clean.right == report.clean.same_tokens == SIZE.prompts
    assert all(tally.judged == tally.asked for tally in report.mutants)
    assert not judged(Pretended(drafts=3)).passed, "engines that do not draft have no such excuse"


@pytest.mark.parametrize("defect", [{"noise": 1e-9}, {"loses": "heads"}, {"short_by": 3}])
def test_other_defects_of_engines_that_draft_are_found_all_the_same(defect: dict[str, Any]) -> None:
    assert not judged(Pretended(drafts=3, **defect), speculation=Speculation("ngram", 3)).passed


def test_an_engine_that_disagrees_with_itself_is_named() -> None:
    report = judged(Pretended(jitter=True))
    assert not report.passed
    assert "does not agree with itself" in report.clean.failures[0]


@pytest.mark.parametrize(
    "engines", [Pretended(short_by=3), Pretended(state_bytes=0), Pretended(reports=False)]
)
def test_missing_bytes_fail_although_every_answer_is_exact(engines: Pretended) -> None:
    if not engines.reports:
        with pytest.raises(ConfigError, match="testing"):
            judged(engines)
        return
    report = judged(engines)
    assert report.clean.exact == report.clean.prompts
    assert report.clean.right < report.clean.prompts
    assert not report.passed


def test_engines_that_ignore_damage_are_refused() -> None:
    with pytest.raises(ConfigError, match="testing"):
        judged(Pretended(testing=False))


def test_an_error_counts_as_caught_and_is_listed_apart() -> None:
    report = judged(Pretended(breaks_on="convolution"))
    tally = next(t for t in report.mutants if t.name == "convolution withheld")
    assert (tally.errors, tally.caught, tally.passed) == (tally.judged, 0, True)


def test_an_engine_that_is_gone_ends_the_run() -> None:
    with pytest.raises(AnswerError):
        judged(Pretended(dies_on="swap"))


def test_a_model_without_heads_passes_only_if_it_is_known_to_have_none() -> None:
    assert failed(judged(Pretended(no_heads=True))) == {"heads swapped"}
    report = judged(Pretended(no_heads=True), ANY_FEATURE)
    assert report.passed
    assert [t.name for t in report.mutants if not t.applies] == ["heads swapped"]
