# ruff: noqa: SIM905 (lists of words read better as text)
"""The words of the recall model: its whole vocabulary, in the order of its token ids."""

from __future__ import annotations

from types import MappingProxyType

FIRST_NAMES = tuple(
    """Alice Arthur Bella Boris Clara Carl Diana David Elena Emil Flora Felix Greta George Helen
    Hugo Irene Ivan Julia Jonas Karin Kurt Laura Leo Maria Max Nora Nils Olga Oscar Paula Peter
    Rosa Ralph Sonia Simon Tilda Tom Vera Victor""".split()
)
LAST_NAMES = tuple(
    """Archer Baker Barlow Brook Carter Chase Cole Dale Fisher Fletcher Ford Frost Gardner Glover
    Grant Hale Hart Hill Hunter Lake Lane Marsh Mason Miller Moss North Page Porter Reed Rivers
    Sadler Shaw Stone Taylor Tanner Turner Vale Walker Weaver Woods""".split()
)
THINGS = tuple(
    """anchor axe bag basket bell book bottle bowl box brush bucket button candle carpet chain chair
    clock coat coin compass crown cup drum fan flag flute glove hammer harp hat jar kettle key knife
    ladder lamp lantern letter lock map mask mirror needle painting pen pillow ring rope""".split()
)
PLACES = tuple(
    """Athens Berlin Bergen Boston Bremen Cairo Calais Cork Delhi Dover Dublin Essen Florence Geneva
    Genoa Ghent Hanoi Havana Kyoto Lagos Leeds Lima Lisbon London Lyon Madrid Malmo Milan Minsk
    Moscow Munich Naples Nice Oslo Oxford Paris Prague Quito Riga Rome Seoul Sofia Tokyo Tunis Turin
    Vienna Warsaw York""".split()
)

_ADJECTIVES = "calm young tired quiet hungry clever brown grey little shy proud lazy".split()
_ANIMALS = "horse fox owl cat dog goat crow badger rabbit heron mouse donkey".split()
_VERBS = "sleeps waits hides sings rests stands walks dreams".split()
_WHERES = "under near behind beside beyond above".split()
_SCENERY = "barn bridge tower meadow orchard fence garden well mill chapel harbour stable".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_WEATHER = "rains snows thunders clears".split()

_SHORT_FILLER = (
    "silence .",
    "time passes .",
    "nobody speaks .",
    "the wind turns .",
    "a door creaks .",
    "so the story goes .",
    "nothing else happens today .",
)


def _filler_sentences() -> dict[int, tuple[tuple[str, ...], ...]]:
    """Sentences that say nothing about who has what and what is where, by their length in words."""
    sentences = [tuple(line.split()) for line in _SHORT_FILLER]
    sentences += [("it", verb, "on", day, ".") for verb in _WEATHER for day in _DAYS]
    for number, adjective in enumerate(_ADJECTIVES):
        for animal in _ANIMALS:
            verb = _VERBS[(number + len(animal)) % len(_VERBS)]
            where = _WHERES[(number * 5 + len(verb)) % len(_WHERES)]
            scene = _SCENERY[(number * 7 + ord(animal[1])) % len(_SCENERY)]
            sentences.append(("the", animal, verb, where, "the", scene, "."))
            sentences.append(("a", adjective, animal, verb, where, "the", scene, "."))
    by_length: dict[int, list[tuple[str, ...]]] = {}
    for sentence in dict.fromkeys(sentences):
        by_length.setdefault(len(sentence), []).append(sentence)
    return {length: tuple(group) for length, group in sorted(by_length.items())}


FILLER = MappingProxyType(_filler_sentences())

UNKNOWN = "<|unknown|>"
END = "<|end|>"
PAD = "<|pad|>"

_GRAMMAR = "the is in . has where what a it on".split()
_FILLER_WORDS = sorted({word for group in FILLER.values() for line in group for word in line})

VOCABULARY: tuple[str, ...] = (
    *dict.fromkeys([*_GRAMMAR, *_FILLER_WORDS, *FIRST_NAMES, *LAST_NAMES, *THINGS, *PLACES]),
    UNKNOWN,
    END,
    PAD,
)
TOKEN_IDS = MappingProxyType({word: index for index, word in enumerate(VOCABULARY)})
EOS_ID = TOKEN_IDS[END]
PAD_ID = TOKEN_IDS[PAD]
