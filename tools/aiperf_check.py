"""By hand: does NVIDIA's AIPerf, fed the same agent sessions, ask a server what `bench agentx` asks?

    python tools/aiperf_check.py

Makes a virtual environment of AIPerf's own, outside this repository (`--venv`), the first time. Then both
clients replay the same made-up sessions against a server in this process that only takes notes and answers
with as many words as it was asked for. Every conversation of either must be the recorded one: its turns, the
lengths of prompts and answers, whole blocks of shared prefix between any two requests, and what each turn
waited for.

Not compared are times, and where AIPerf's scenario begins inside a session: that is drawn by its own seed, so
sessions are replayed from their first turn. Prints one JSON object. Exit code 0: no difference.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from note_taker import NoteTaker
from stateferry.bench.agentx.compare import Asked, belongs, differences
from stateferry.bench.agentx.generate import make_session
from stateferry.bench.agentx.lanes import Lanes, Tree
from stateferry.bench.agentx.prompts import Prompts
from stateferry.bench.agentx.replay import replay
from stateferry.bench.agentx.trace import Session, write_session
from stateferry.bench.agentx.turns import MAIN, turns_of
from stateferry.bench.streams import Streams

VERSION = "0.13.0"
SCALE, SEED = 64, 3
RUN_S = 600.0
TOKENIZER = Path(__file__).with_name("aiperf_tokenizer.py")


def sessions(count: int, entries: int) -> list[Session]:
    """Made-up sessions cut short, every other one with subagents."""
    found: dict[bool, list[Session]] = {True: [], False: []}
    number = 0
    while min(map(len, found.values())) < (count + 1) // 2:
        session = make_session(number, SEED, SCALE)
        session.requests = session.requests[:entries]
        branched = any(turn.agent != MAIN for turn in turns_of(session))
        found[branched].append(session)
        number += 1
    return [one for pair in zip(found[True], found[False], strict=False) for one in pair][:count]


def prepare(folder: Path) -> Path:
    """AIPerf's environment; returns its Python."""
    python = folder / "bin" / "python"
    if not (folder / f"aiperf-{VERSION}").exists():
        venv.create(folder, with_pip=True)
        command = [str(python), "-m", "pip", "install", "--quiet", f"aiperf=={VERSION}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        (folder / f"aiperf-{VERSION}").touch()
    return python


def run_aiperf(python: Path, recorded: Sequence[Session], url: str, lanes: int, folder: Path) -> str:
    """Replay with AIPerf; returns its last lines if it failed."""
    files = folder / "sessions"
    files.mkdir()
    for session in recorded:
        write_session(session, files)
    hub = folder / "hub"
    made = subprocess.run([str(python), str(TOKENIZER), str(hub)], check=True, capture_output=True, text=True)
    command = [str(python), "-m", "aiperf", "profile", "--model", "made-up", "--url", url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", made.stdout.strip()]
    command += ["--custom-dataset-type", "weka_trace", "--input-file", str(files)]
    command += ["--no-fixed-schedule", "--ignore-trace-delays"]
    command += ["--concurrency", str(lanes), "--num-conversations", str(len(recorded))]
    command += ["--extra-inputs", "ignore_eos:true", "--random-seed", str(SEED)]
    command += ["--ui", "none", "--no-gpu-telemetry", "--artifact-dir", str(folder / "artifacts")]
    env = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(hub),
        # Each recorded agent one conversation: otherwise AIPerf guesses from prefixes who a turn is of.
        "AIPERF_DATASET_WEKA_SPLIT_FLATTENED_AGENTS": "false",
        "AIPERF_DATASET_MMAP_CACHE_ENABLED": "false",
    }
    log = folder / "aiperf.log"
    with log.open("w") as file:
        code = subprocess.run(
            command, env=env, cwd=folder, stdout=file, stderr=subprocess.STDOUT, timeout=RUN_S, check=False
        ).returncode
    return "" if code == 0 else f"exit code {code}: {log.read_text()[-3000:]}"


def run_ours(recorded: Sequence[Session], url: str, lanes: int) -> None:
    """Replay as `bench agentx` does, without pauses."""

    async def run() -> None:
        trees = [Tree(number, turns_of(session)) for number, session in enumerate(recorded)]
        prompts = {number: Prompts(session, 0) for number, session in enumerate(recorded)}
        async with Streams() as streams:
            await replay(Lanes(trees, lanes, SEED, time_scale=0.0), prompts, streams, url)

    asyncio.run(run())


def compared(recorded: Sequence[Session], notes: NoteTaker, *, whole: bool) -> dict[str, Any]:
    """What was asked otherwise, by session."""
    conversations = notes.conversations()
    theirs: list[list[Sequence[Asked]]] = [[] for _ in recorded]
    for asked in conversations.values():
        owners = [number for number, session in enumerate(recorded) if belongs(session, asked, whole)]
        nearest = min(owners or [0], key=lambda n: len(differences(recorded[n], [asked], whole=False)))
        theirs[nearest].append(asked)
    found = {
        session.id: differences(session, theirs[number], whole=whole)
        for number, session in enumerate(recorded)
    }
    return {
        "conversations": len(conversations),
        "requests": sum(map(len, conversations.values())),
        "differences": {name: texts[:20] for name, texts in found.items() if texts},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser.add_argument("--venv", type=Path, default=cache / "stateferry" / "aiperf")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--entries", type=int, default=12, help="of each session, subagents count as one")
    parser.add_argument("--lanes", type=int, default=2)
    asked = parser.parse_args()
    python = prepare(asked.venv)
    recorded = sessions(asked.sessions, asked.entries)
    with tempfile.TemporaryDirectory() as folder, NoteTaker() as notes:
        failed = run_aiperf(python, recorded, notes.url, asked.lanes, Path(folder))
        theirs = compared(recorded, notes, whole=True)
    with NoteTaker() as notes:
        run_ours(recorded, notes.url, asked.lanes)
        ours = compared(recorded, notes, whole=False)
    requests = sum(len(turns_of(session)) for session in recorded)
    result = {
        "aiperf": VERSION,
        "requests": requests,
        "failed": failed,
        "theirs": theirs,
        "ours": ours,
    }
    print(json.dumps(result, indent=2))
    return 1 if failed or theirs["differences"] or ours["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
