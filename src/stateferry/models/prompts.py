"""Readable prompts with one right answer, for the bundled recall model.

A prompt tells where things are, then who has them, then asks:

    the lantern is in Paris . the bell is in Rome . Clara Brook has the lantern .
    Clara Stone has the bell . where is Clara Brook

The next word is `Paris`. The model finds the thing of a person in its recurrent state and the place
of a thing through its attention layer, so an answer needs both kinds of memory.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from .words import FILLER, FIRST_NAMES, LAST_NAMES, PLACES, THINGS, TOKEN_IDS

MAX_PAIRS = 6  # the model was trained on up to 8; with 6 it hardly ever errs
MIN_TOKENS = 18
_PAIR_TOKENS = 12
_QUESTION_TOKENS = 4


class Question(Enum):
    """What the last four words ask."""

    WHERE_PERSON = "where is NAME NAME"  # both memories
    WHAT_PERSON = "what has NAME NAME"  # one look-up, from a person to a thing
    WHERE_THING = "where is the THING"  # one look-up, from a thing to a place


@dataclass(frozen=True)
class Holder:
    """A person, the thing that the person has, and the place where it is."""

    first: str
    last: str
    thing: str
    place: str

    def ask(self, question: Question) -> tuple[str, ...]:
        if question is Question.WHERE_PERSON:
            return ("where", "is", self.first, self.last)
        if question is Question.WHAT_PERSON:
            return ("what", "has", self.first, self.last)
        return ("where", "is", "the", self.thing)

    def answer(self, question: Question) -> str:
        return self.thing if question is Question.WHAT_PERSON else self.place


@dataclass(frozen=True)
class RecallPrompt:
    """`text` tokenizes to `token_ids`; the served model goes on with `answer`, then `follow_up`."""

    text: str
    answer: str
    token_ids: tuple[int, ...]
    answer_id: int
    follow_up: str

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def recall_prompt(seed: int, target_tokens: int, question: Question = Question.WHERE_PERSON) -> RecallPrompt:
    """A prompt of exactly `target_tokens` tokens, the same for the same arguments."""
    if target_tokens < MIN_TOKENS:
        raise ValueError(f"target_tokens is {target_tokens}; the shortest prompt has {MIN_TOKENS}")
    rng = random.Random(f"recall:{seed}:{target_tokens}:{question.name}")
    pairs = min(MAX_PAIRS, (target_tokens - _QUESTION_TOKENS) // _PAIR_TOKENS)
    if target_tokens - _QUESTION_TOKENS - pairs * _PAIR_TOKENS == 1:
        pairs -= 1  # no sentence has one word
    holders = cast(rng, pairs)
    filler = target_tokens - _QUESTION_TOKENS - pairs * _PAIR_TOKENS
    words, _ = story(rng, holders, filler)
    first = rng.randrange(pairs)
    asked = holders[first]
    words.extend(asked.ask(question))
    follow_up = questions(holders, first + 1, pairs, question)
    answer = asked.answer(question)
    return RecallPrompt(
        text=" ".join(words),
        answer=answer,
        token_ids=token_ids(words),
        answer_id=TOKEN_IDS[answer],
        follow_up=" ".join([".", *follow_up]),
    )


def token_ids(words: Sequence[str]) -> tuple[int, ...]:
    """One token per word."""
    return tuple(TOKEN_IDS[word] for word in words)


def cast(rng: random.Random, pairs: int) -> list[Holder]:
    """`pairs` people who share first and last names, so that neither name alone tells who it is."""
    side = 1
    while side * side < pairs:
        side += 1
    firsts = rng.sample(FIRST_NAMES, side)
    lasts = rng.sample(LAST_NAMES, side)
    names = rng.sample([(first, last) for first in firsts for last in lasts], pairs)
    things = rng.sample(THINGS, pairs)
    places = rng.sample(PLACES, pairs)
    return [
        Holder(first, last, thing, place)
        for (first, last), thing, place in zip(names, things, places, strict=True)
    ]


def story(rng: random.Random, holders: Sequence[Holder], filler_tokens: int) -> tuple[list[str], int]:
    """The words of all facts with filler in between, and how many of them come before the people."""
    facts: list[tuple[str, ...]] = [
        ("the", holder.thing, "is", "in", holder.place, ".") for holder in rng.sample(holders, len(holders))
    ]
    facts += [(holder.first, holder.last, "has", "the", holder.thing, ".") for holder in holders]
    fillers: list[list[tuple[str, ...]]] = [[] for _ in range(len(facts) + 1)]
    for sentence in filler_sentences(rng, filler_tokens):
        fillers[rng.randrange(len(fillers))].append(sentence)
    words: list[str] = []
    boundary = 0
    for index, fact in enumerate(facts):
        for sentence in fillers[index]:
            words.extend(sentence)
        if index == len(holders):
            boundary = len(words)
        words.extend(fact)
    for sentence in fillers[-1]:
        words.extend(sentence)
    return words, boundary


def questions(holders: Sequence[Holder], start: int, count: int, question: Question) -> list[str]:
    """Questions with their answers: from person `start` on, in the order of the story, round and round."""
    words: list[str] = []
    for step in range(count):
        holder = holders[(start + step) % len(holders)]
        words.extend((*holder.ask(question), holder.answer(question), "."))
    return words


def filler_sentences(rng: random.Random, tokens: int) -> list[tuple[str, ...]]:
    """Sentences of exactly `tokens` words together (0, or 2 and more)."""
    sentences: list[tuple[str, ...]] = []
    longest = max(FILLER)
    left = tokens
    while left:
        if left > longest + 1:
            length = rng.choice(_FILLER_LENGTHS)
        else:
            length = rng.choice([n for n in FILLER if n <= left and left - n != 1])
        sentences.append(rng.choice(FILLER[length]))
        left -= length
    return sentences


# Long sentences are drawn more often than the few short ones.
_FILLER_LENGTHS = tuple(length for length in FILLER for _ in range(1 if length < 5 else 4))
