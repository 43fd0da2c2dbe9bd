"""What the demo asks: the same questions of one engine, of two, and of two without recurrent state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stateferry.stack import AnswerError, Client, Completion, Engine, Router

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
    """One way to answer one question."""

    text: str
    total_s: float
    first_token_s: float | None = None
    received: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One question and its three answers."""

    question: str
    prompt_tokens: int
    expected: str
    one_engine: Arm
    two_engines: Arm
    withheld: Arm

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
    expected = f"{question.answer} {question.follow_up}".split()
    length = len(expected)

    def forget() -> None:
        for engine in (prefill, decode):
            client.reset_prefix_cache(engine.url)

    def arm(answer: Completion) -> Arm:
        return Arm(answer.text.strip(), answer.total_s, answer.first_token_s)

    forget()
    streamed = client.complete(prefill.url, question.text, length, stream=True)
    one = arm(streamed)
    forget()
    two_streamed = client.complete(router.url, question.text, length, stream=True)
    forget()
    whole = client.complete(router.url, question.text, length)
    received = ((whole.kv_transfer_params or {}).get("stateferry") or {}).get("received") or {}
    two = Arm(whole.text.strip(), whole.total_s, two_streamed.first_token_s, received)
    if two_streamed.text != whole.text:
        two = Arm(two.text, two.total_s, two.first_token_s, received, "streamed and whole answer differ")
    forget()
    try:
        lost = client.handoff(prefill.url, decode.url, question.text, length, tamper=WITHHOLD_STATE)
        withheld = Arm(lost.decode.text.strip(), lost.total_s, received=lost.received)
    except AnswerError as e:
        withheld = Arm("", 0.0, error=str(e))
    words = question.text.split()
    return Asked(
        question="… " + " ".join(words[-4:]) if len(words) > 4 else question.text,
        prompt_tokens=streamed.prompt_tokens,
        expected=" ".join(expected),
        one_engine=one,
        two_engines=two,
        withheld=withheld,
    )
