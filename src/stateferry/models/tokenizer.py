"""Tokenizer folders for the tiny models, made here so that no download is needed."""

from __future__ import annotations

import json
from pathlib import Path

from .words import END, PAD, TOKEN_IDS, UNKNOWN

BYTE_VOCAB_SIZE = 258
BYTE_EOS_ID = 256
BYTE_PAD_ID = 257
_SPACE = "\u2581"


def write_byte_tokenizer(folder: Path) -> None:
    """One token per byte (ids 0 to 255), then an end token and a padding token."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True), AddedToken(PAD, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)


def write_word_tokenizer(folder: Path) -> None:
    """One token per word of the recall model's vocabulary; words are parted by single spaces."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    special = (UNKNOWN, END, PAD)
    vocab = {word if word in special else _SPACE + word: index for word, index in TOKEN_IDS.items()}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens([*special])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)


def write_numbered_tokenizer(folder: Path, size: int) -> None:
    """`size` tokens, each with a text of its own, the last two of them END and PAD.

    For models with dummy weights, which answer with any id. vLLM turns tokens into text as they come, and one
    that has none makes it go through the whole prompt again with every token.
    """
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import WordLevel

    vocab = {f"t{index}": index for index in range(size - 2)} | {END: size - 2, PAD: size - 1}
    tokenizer = Tokenizer(WordLevel(vocab=vocab, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END, PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_tokenizer_config(folder)


def _write_tokenizer_config(folder: Path) -> None:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers use for each byte, in byte order.

    Printable Latin-1 bytes stand for themselves; the others take the code points from 256 upwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    symbols = []
    spare = 256
    for byte in range(256):
        if byte in printable:
            symbols.append(chr(byte))
        else:
            symbols.append(chr(spare))
            spare += 1
    return symbols
