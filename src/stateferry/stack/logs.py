"""Reading the log of a server that did not start: its end, its errors, and what to do about them."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 256 * 1024
MOST_ERRORS = 5

_PREFIX = re.compile(
    r"^(?:\(\w[\w-]* pid=\d+\)\s*)?(?:(?:INFO|WARNING|ERROR)\s+[\d-]+ [\d:]+ \[[^\]]*\]\s?)?"
)
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Unavailable|Mismatch)\b.*|.*: error: .*)$")
_CONSEQUENCES = ("Engine core initialization failed", "WorkerProc initialization failed")

HINTS: Sequence[tuple[str, str]] = (
    ("operator torchvision::nms does not exist", "torchvision does not fit: pip uninstall -y torchvision"),
    ("No module named 'vllm'", "vLLM is not installed in this environment: run `make setup`"),
    ("Unsupported connector type", "the stateferry package is not installed in the engine's environment"),
    ("kv_connector_extra_config", "a setting was refused; the line names it"),
    ("Cannot allocate memory", "not enough memory: stop other engines or lower the cache size"),
    ("MemoryError", "not enough memory: stop other engines or lower the cache size"),
    ("No available memory for the cache blocks", "raise the cache size or lower max_model_len"),
    ("unrecognized arguments", "an argument is not known to this version of the server"),
    ("lscpu", "vLLM needs the program lscpu: install util-linux"),
)
"""Words in a dead server's log, and what to do."""


def tail(path: Path, lines: int) -> str:
    """The last lines of a text file; an empty string if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def plain(line: str) -> str:
    """A log line without colours and without vLLM's process, level, time and file."""
    return _PREFIX.sub("", _ESCAPES.sub("", line))


def errors(text: str) -> list[str]:
    """The lines that name an error, each once, the ones that only say "it failed" left out."""
    found = [plain(line).strip() for line in text.splitlines()]
    causes = [
        line for line in found if _ERROR.match(line) and not any(words in line for words in _CONSEQUENCES)
    ]
    return list(dict.fromkeys(causes))[:MOST_ERRORS]


def explain(path: Path, lines: int = 30) -> str:
    """Errors, advice and the end of a log, for the message about the server that wrote it."""
    text = tail(path, 10_000)
    parts = [f"  {line}" for line in errors(text)]
    if parts:
        parts.insert(0, "Errors in its log:")
    advice = next((advice for words, advice in HINTS if words in text), None)
    if advice is not None:
        parts.append(f"Hint: {advice}.")
    parts.append(f"Its log is {path} and ends with:")
    parts.append("\n".join(text.splitlines()[-lines:]))
    return "\n".join(parts)
