"""Where prompts come from: stories for the bundled model, random tokens for any other."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stateferry.errors import ConfigError
from stateferry.models.prompts import MIN_TOKENS, recall_prompt

Tokens = tuple[int, ...]
PromptSource = Callable[[int, int], Tokens]
"""(seed, length) -> that many tokens, the same for the same arguments."""


def model_config(folder: Path) -> Mapping[str, Any]:
    """A checkpoint's `config.json`. Raises ConfigError that names the folder."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"--model {str(folder)!r} is not a folder with a readable config.json: {e}") from e
    if not isinstance(config, dict):
        raise ConfigError(f"--model {str(folder)!r}: its config.json is not an object")
    return config


def recall_source(seed: int, length: int) -> Tokens:
    """Stories with a question at the end, as the bundled model was trained on; shorter ones are their end."""
    return recall_prompt(seed, max(length, MIN_TOKENS)).token_ids[-length:]


def random_source(config: Mapping[str, Any]) -> PromptSource:
    """Random tokens of the model's vocabulary, special ones left out."""
    special: set[int] = set()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        special |= set(value) if isinstance(value, list) else {value} if isinstance(value, int) else set()
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int) or size <= len(special):
        raise ConfigError(f"the model's config.json has vocab_size {size!r}, not a number of tokens")
    usable = [token for token in range(size) if token not in special]

    def source(seed: int, length: int) -> Tokens:
        rng = random.Random(f"gate:{seed}:{length}")
        return tuple(rng.choices(usable, k=length))

    return source
