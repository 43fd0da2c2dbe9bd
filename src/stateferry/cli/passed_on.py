"""vLLM's options among the arguments that `stateferry serve` passes on, and ours that are misspelt there."""

import difflib
from collections.abc import Mapping, Sequence

from stateferry.errors import ConfigError

LIKENESS = 0.84
"""From which likeness on (0 to 1, as difflib counts) an unknown option is taken for a misspelt one of ours.
vLLM's own `--port` is 0.8 like our `--kv-port`, and `--host` like `--kv-host`."""


def option_name(argument: str) -> str:
    """`--max_model_len=8` as `--max-model-len`; an empty string for anything but a long option."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") and len(name) > 2 else ""


def last_value(arguments: Sequence[str], *names: str) -> str | None:
    """The value of an option as vLLM reads it: the last one counts. None: it is not there, or has none.

    `names` are long ones as `option_name` gives them, or short ones such as `-tp`.
    """
    found = None
    for number, argument in enumerate(arguments):
        name, separator, value = argument.partition("=")
        if (option_name(argument) or name) in names:
            following = arguments[number + 1] if number + 1 < len(arguments) else None
            found = value if separator else following
    return found


def refuse_misspelt(arguments: Sequence[str], ours: Sequence[str], settings: Mapping[str, str]) -> None:
    """Raise ConfigError where an argument is an option of ours that is written wrongly.

    `ours`: the options of this command. `settings`: how settings that have no option would be written as one,
    and their keys; these only count when they are written rightly (vLLM's `--moe-backend` is very like our
    `mori_backend`). What is like neither is vLLM's: its own parser refuses what it does not know, before an
    engine starts.
    """
    for argument in arguments:
        name, typed = option_name(argument), argument.partition("=")[0]
        if name in settings:
            key = settings[name]
            raise ConfigError(f"{typed}: the setting {key!r} has no option of its own; use --set {key}=VALUE")
        like = difflib.get_close_matches(name, ours, 1, LIKENESS) if name else []
        if like:
            raise ConfigError(f"there is no option {typed}; did you mean {like[0]}?")
