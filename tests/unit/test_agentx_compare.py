"""What a client asked against what was recorded: an honest one passes, and every way to differ is told."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from stateferry.bench.agentx.compare import Asked, differences
from stateferry.bench.agentx.generate import make_session
from stateferry.bench.agentx.prompts import Prompts
from stateferry.bench.agentx.trace import Session
from stateferry.bench.agentx.turns import MAIN, turns_of

Conversations = list[list[Asked]]


def short_session(turns: int = 30) -> Session:
    """The first made-up one that has a subagent early on, cut short."""
    for number in range(40):
        session = make_session(number, 3, 64)
        session.requests = session.requests[:turns]
        agents = {turn.agent for turn in turns_of(session)}
        joined = any(len(turn.after) > 1 for turn in turns_of(session))
        if len(agents) > 1 and joined and len(session.requests) == turns:
            return session
    raise AssertionError("no made-up session has a subagent early on")


SESSION = short_session()
TURNS = turns_of(SESSION)


def asked_one_by_one(session: Session = SESSION) -> Conversations:
    """What a client asks that sends every turn as recorded, one after the other."""
    prompts, found = Prompts(session, 7), {}
    for turn in turns_of(session):
        one = Asked(prompts.tokens(turn), turn.request.output_tokens, 2 * turn.number, 2 * turn.number + 1)
        found.setdefault(turn.agent, []).append(one)
    return list(found.values())


def test_a_client_that_asks_what_was_recorded_differs_in_nothing() -> None:
    assert differences(SESSION, asked_one_by_one()) == []
    assert differences(SESSION, asked_one_by_one()[::-1]) == []


def test_a_client_that_begins_inside_asks_the_rest() -> None:
    inside = [conversation[3:] for conversation in asked_one_by_one() if len(conversation) > 3]
    assert differences(SESSION, inside, whole=False) == []
    assert any("was not recorded" in text for text in differences(SESSION, inside))


def _turn_left_out(found: Conversations) -> None:
    del found[0][-1]


def _agent_left_out(found: Conversations) -> None:
    found.remove(min(found, key=len))


def _agent_asked_twice(found: Conversations) -> None:
    found.append(list(found[0]))


def _answers_longer(found: Conversations) -> None:
    found[0][2] = replace(found[0][2], output_tokens=found[0][2].output_tokens + 1)


def _two_turns_swapped(found: Conversations) -> None:
    outputs = [one.output_tokens for one in found[0]]
    at = next(i for i in range(3, len(outputs)) if outputs[i] != outputs[i - 1])
    found[0][at - 1], found[0][at] = found[0][at], found[0][at - 1]


def _prompt_longer(found: Conversations) -> None:
    found[0][4] = replace(found[0][4], prompt=[*found[0][4].prompt, 1, 1])


def _prefix_lost(found: Conversations) -> None:
    prompt = list(found[0][4].prompt)
    found[0][4] = replace(found[0][4], prompt=[prompt[0] + 1, *prompt[1:]])


def _prefix_made_up(found: Conversations) -> None:
    """Every prompt is the front of the longest one: too much is cached."""
    longest = max((one.prompt for one in found[0]), key=len)
    found[0][:] = [replace(one, prompt=longest[: len(one.prompt)]) for one in found[0]]
    found[1][0] = replace(found[1][0], prompt=longest[: len(found[1][0].prompt)])


def _not_joined(found: Conversations) -> None:
    late = next(turn for turn in TURNS if turn.agent == MAIN and len(turn.after) > 1)
    place = [turn.number for turn in TURNS if turn.agent == MAIN].index(late.number)
    before = next(number for number in late.after if TURNS[number].agent != MAIN)
    main = next(c for c in found if c[0].came == 0)
    main[place] = replace(main[place], came=2 * before)


MUTANTS: list[tuple[Callable[[Conversations], None], str]] = [
    (_turn_left_out, "was not recorded"),
    (_agent_left_out, "turns were not asked"),
    (_agent_asked_twice, "was not recorded"),
    (_answers_longer, "was not recorded"),
    (_two_turns_swapped, "was not recorded"),
    (_prompt_longer, "a prompt of"),
    (_prefix_lost, "share 0 blocks"),
    (_prefix_made_up, "blocks, recorded are"),
    (_not_joined, "was asked before turn"),
]


@pytest.mark.parametrize(("mutant", "says"), MUTANTS, ids=lambda value: getattr(value, "__name__", "")[1:])
def test_a_client_that_asks_otherwise_is_told_apart(
    mutant: Callable[[Conversations], None], says: str
) -> None:
    found = asked_one_by_one()
    mutant(found)
    assert any(says in text for text in differences(SESSION, found))


def test_lengths_may_differ_by_what_is_allowed() -> None:
    found = asked_one_by_one()
    _prompt_longer(found)
    assert differences(SESSION, found, slack_tokens=2) == []
    assert differences(SESSION, found, slack_tokens=1) != []
