"""Recorded agent sessions in the Weka format: lengths, shared prefixes and times, no text.

One JSON object a session. A request's `hash_ids` name its prompt's blocks of `block_size` tokens; equal ids
at the front of two requests of a session are a shared prefix. Subagents are entries with requests of their
own.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from stateferry.errors import ConfigError

BLOCK_TOKENS = 64
Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Request(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn, or (type "subagent") a subagent with its turns in `requests`."""

    t: Seconds
    """When it was sent. A subagent's own requests count from its start in some files, from the session's
    start in others (see `turns_of`)."""
    type: str = "n"
    """"n", "s" (streamed) or "subagent"."""
    model: str = ""
    input_tokens: Count = msgspec.field(default=0, name="in")
    output_tokens: Count = msgspec.field(default=0, name="out")
    hash_ids: list[int] = msgspec.field(default_factory=list)
    api_time: Seconds = 0.0
    """How long the answer took."""
    think_time: Seconds = 0.0
    """From the answer before to this request."""
    ttft: Seconds | None = None
    agent_id: str = ""
    subagent_type: str = ""
    models: list[str] = msgspec.field(default_factory=list)
    """A subagent's. Other readers of the format want both."""
    duration_ms: Seconds = 0.0
    status: str = ""
    requests: list["Request"] = msgspec.field(default_factory=list)
    input_types: list[str] = msgspec.field(default_factory=list)
    output_types: list[str] = msgspec.field(default_factory=list)
    stop: str = ""

    @property
    def is_subagent(self) -> bool:
        """Whether this is no turn but a subagent."""
        return self.type == "subagent"


class Session(msgspec.Struct, kw_only=True):
    """One recorded session."""

    id: str
    models: list[str] = msgspec.field(default_factory=list)
    block_size: Annotated[int, msgspec.Meta(gt=0)] = BLOCK_TOKENS
    hash_id_scope: str = "local"
    tool_tokens: Count = 0
    system_tokens: Count = 0
    requests: list[Request] = msgspec.field(default_factory=list)


def read_sessions(path: Path) -> list[Session]:
    """The sessions of a folder of `.json` files, of one such file, or of one with a session a line.

    Raises ConfigError for what is no such file.
    """
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    sessions: list[Session] = []
    for file in files:
        try:
            data = file.read_bytes()
            if file.suffix == ".jsonl":
                sessions += [msgspec.json.decode(line, type=Session) for line in data.splitlines() if line]
            else:
                sessions.append(msgspec.json.decode(data, type=Session))
        except (OSError, msgspec.MsgspecError) as e:
            raise ConfigError(f"{file.name} is no session in the Weka format: {e}") from e
    sessions = [session for session in sessions if session.requests]
    if not sessions:
        raise ConfigError(f"{path.name} has no session: expected .json files, or one .jsonl")
    return sessions


def write_session(session: Session, folder: Path) -> Path:
    """Write one file, named after the session, that this reader and others of the format take."""
    file = folder / f"{session.id}.json"
    file.write_bytes(msgspec.json.encode(session) + b"\n")
    return file


def coarsened(session: Session, factor: int) -> Session:
    """The session scaled down: `factor` blocks become one, tokens are divided, times stay.

    Keeps the block size, the ratio of input to output and, nearly, what is shared.
    """
    names: dict[tuple[int, ...], int] = {}

    def scaled(request: Request) -> Request:
        ids = request.hash_ids
        groups = (tuple(ids[i : i + factor]) for i in range(0, len(ids) - factor + 1, factor))
        return msgspec.structs.replace(
            request,
            input_tokens=request.input_tokens // factor,
            output_tokens=max(1, request.output_tokens // factor) if request.output_tokens else 0,
            hash_ids=[names.setdefault(group, len(names) + 1) for group in groups],
            requests=[scaled(inner) for inner in request.requests],
        )

    requests = [scaled(request) for request in session.requests]
    return msgspec.structs.replace(session, tool_tokens=0, system_tokens=0, requests=requests)
