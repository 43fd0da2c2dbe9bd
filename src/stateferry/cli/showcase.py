"""What the demo asks: the same questions of one engine, of two, and of two without recurrent state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from stateferry.stack import AnswerError, Client, Completion, Engine, Router

ROUNDS = 3
QUESTION_WORDS = 4
WITHHOLD_STATE: Mapping[str, Any] = {"withhold": "state"}


class Question(Protocol):
    """A prompt with one right continuation."""

    @property
    def text(self) -> str: ...  # the prompt
    @property
    def answer(self) -> str: ...  # the next word
    @property
    def follow_up(self) -> str: ...  # and the words after it


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to answer one question; times are medians."""

    text: str
    total_s: float
    first_token_s: float | None = None
    received: Mapping[str, Any] = field(default_factory=dict)
    """By another request than those whose first token is timed: a streamed answer does not say it."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and its three answers."""

    prompt: str
    prompt_tokens: int
    expected: str
    one_engine: Arm
    two_engines: Arm
    withheld: Arm

    @property
    def question(self) -> str:
        """The end of the prompt."""
        words = self.prompt.split()
        return " ".join(words[-QUESTION_WORDS:])

    def problems(self) -> list[str]:
        """Why this question speaks against the hand-off; empty if nothing does."""
        problems = []
        for name, arm in (("one engine", self.one_engine), ("two engines", self.two_engines)):
            if arm.error:
                problems.append(f"{name}: {arm.error}")
            elif arm.text != self.expected:
                problems.append(f"{name} answered {arm.text!r}, right is {self.expected!r}")
        if self.two_engines.text != self.one_engine.text:
            problems.append("two engines did not answer as one engine does")
        outcome = self.two_engines.received.get("outcome")
        if outcome != "received":
            problems.append(
                f"the decode engine did not take the hand-off (it reports {outcome or 'nothing'})"
            )
        if not self.withheld.error and self.withheld.text == self.expected:
            problems.append("right even without recurrent state: the question proves nothing")
        return problems


def ask_all(
    client: Client,
    prefill: Engine,
    decode: Engine,
    router: Router,
    questions: Sequence[Question],
    tell: Callable[[str], None],
) -> list[Asked]:
    """Ask every question in all three ways. Raises AnswerError if an engine does not answer at all."""
    tell("warming up")
    warm = questions[0]
    for url in (prefill.url, decode.url, router.url):
        client.complete(url, warm.text, 2)
        client.complete(url, warm.text, 2, stream=True)
    asked = []
    for number, question in enumerate(questions, 1):
        tell(f"question {number} of {len(questions)}")
        asked.append(_ask(client, prefill, decode, router, question))
    return asked


def _ask(client: Client, prefill: Engine, decode: Engine, router: Router, question: Question) -> Asked:
    expected = " ".join(f"{question.answer} {question.follow_up}".split())
    length = len(expected.split())

    def ask(url: str, stream: bool) -> Completion:
        for engine in (prefill, decode):
            client.reset_prefix_cache(engine.url)
        return client.complete(url, question.text, length, stream=stream)

    ones, twos, wholes = [], [], []
    for _ in range(ROUNDS):  # one after the other, so that a busy moment hits all
        ones.append(ask(prefill.url, stream=True))
        twos.append(ask(router.url, stream=True))
        wholes.append(ask(router.url, stream=False))  # only these say what was received
    for engine in (prefill, decode):
        client.reset_prefix_cache(engine.url)
    try:
        lost = client.handoff(prefill.url, decode.url, question.text, length, tamper=WITHHOLD_STATE)
        withheld = Arm(lost.decode.text.strip(), lost.total_s, received=lost.received)
    except AnswerError as e:
        withheld = Arm("", 0.0, error=str(e))
    return Asked(
        prompt=question.text,
        prompt_tokens=ones[0].prompt_tokens,
        expected=expected,
        one_engine=_arm(ones),
        two_engines=_arm(twos, wholes),
        withheld=withheld,
    )


def _received(answer: Completion) -> Mapping[str, Any]:
    ours = (answer.kv_transfer_params or {}).get("stateferry") or {}
    return ours.get("received") or {}


def _typical(hand_offs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The hand-off whose time is the median; one that was not received, if there is one."""
    bad = [one for one in hand_offs if one.get("outcome") != "received"]
    if bad or not hand_offs:
        return bad[0] if bad else {}
    return sorted(hand_offs, key=lambda one: float(one.get("milliseconds", 0.0)))[len(hand_offs) // 2]


def _arm(streamed: Sequence[Completion], whole: Sequence[Completion] = ()) -> Arm:
    """The first answer, which all must equal, with medians of the times."""
    answers = [*whole, *streamed]
    texts = list(dict.fromkeys(answer.text.strip() for answer in answers))
    first_token_s = [answer.first_token_s for answer in answers if answer.first_token_s is not None]
    return Arm(
        text=texts[0],
        total_s=median(answer.total_s for answer in answers),
        first_token_s=median(first_token_s) if first_token_s else None,
        received=_typical([_received(answer) for answer in whole]),
        error=f"asked {len(answers)} times, gave {texts!r}" if len(texts) > 1 else "",
    )
