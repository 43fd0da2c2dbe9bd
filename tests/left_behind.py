"""Which processes a program left behind, known by a mark in the environment that it gave to all of them."""

from pathlib import Path


def processes_with(mark: str, *, but: int) -> list[int]:
    """Numbers of processes that are alive and have `mark` in their environment; `but` is not counted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != but:
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z" and mark.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found
