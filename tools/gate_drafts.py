"""The accuracy gate over two engines that speculate on CPU, and what a hand-off does to their drafts.

    PYTHONPATH=src python tools/gate_drafts.py mtp ngram-cached     # a minute or three each

`mtp` runs vLLM as it is, which caches no prefixes then. The others cache them, by `tools/cpu_drafts.py`,
which stands in for what vLLM lacks on CPU. Where layers draft, a further arm counts how many drafts are
right: of one engine that computes a prompt itself, of two, and of two whose hand-offs leave out the draft
layer's cache. A draft layer sees of each token the one that follows. The prefill engine stops before a
prompt's last token and takes its own guess for it, so the last entry of the draft layer's cache is one
engine's only where it guesses right.

Adds to `benchmarks/results/gate-drafts-DATE.json`. Exit code 0: all passed.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stateferry.gate import SMALL, Drafts, Running, Subject, bundled, parse_speculation, run_gate
from stateferry.gate.prompts import Tokens
from stateferry.gate.speculation import drafts_of
from stateferry.stack import Client, EngineSpec, Role, Stack

TOOLS = Path(__file__).resolve().parent
RESULTS = TOOLS.parent / "benchmarks" / "results"
CHUNK_TOKENS = 1024
ONE_STEP_TOKENS = 1536
"""Without the stand-ins every prompt must fit into one step."""
LEASE_S = 120.0
START_S = 300.0
LENGTHS = (60, 127, 128, 129, 200, 256, 400, 700)
"""Of prompts whose drafts are counted: around the borders of blocks of 128 tokens."""
TOKENS = 64
ARMS: Mapping[str, Mapping[str, Any] | None] = {"one": None, "two": None, "withheld": {"withhold": "drafts"}}
ALIKE = 0.02
"""Of all tokens: by how much two engines may differ from one, whose kernels round last tokens otherwise."""


@dataclass(frozen=True, slots=True)
class Case:
    """One pair of engines."""

    speculate: str
    cached: bool

    @property
    def chunk_tokens(self) -> int:
        """The most prompt tokens in a step."""
        return CHUNK_TOKENS if self.cached else ONE_STEP_TOKENS


CASES: Mapping[str, Case] = {
    "mtp": Case("mtp:2", cached=False),
    "mtp-cached": Case("mtp:2", cached=True),
    "ngram-cached": Case("ngram:3", cached=True),
}


def spec(case: Case, subject: Subject, model: Path, role: Role) -> EngineSpec:
    assert subject.speculation is not None
    path = os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return EngineSpec(
        model=model,
        role=role,
        connector_module="cpu_drafts" if case.cached else None,
        extra_config={"testing": True, "lease_s": LEASE_S},
        prefix_caching=case.cached,
        max_model_len=4096 if case.cached else ONE_STEP_TOKENS,
        args=("--max-num-batched-tokens", str(case.chunk_tokens), *subject.speculation.arguments),
        env={"PYTHONPATH": path},
    )


def drafts_kept(client: Client, urls: Sequence[str], prompts: Sequence[Tokens]) -> dict[str, Drafts]:
    """Drafts after these prompts, by who computed what they rest on."""
    prefill, decode = urls
    found = {}
    for arm, damage in ARMS.items():
        url = prefill if arm == "one" else decode
        before = drafts_of(client.metrics(url))
        for prompt in prompts:
            if arm == "one":
                client.complete(url, prompt, TOKENS, ignore_eos=True)
                continue
            answer = client.handoff(prefill, decode, prompt, TOKENS, tamper=damage, ignore_eos=True)
            if answer.received["outcome"] != "received":
                raise RuntimeError(f"a hand-off was not received: {answer.received}")
        found[arm] = drafts_of(client.metrics(url)).since(before)
    return found


def kept(drafts: Mapping[str, Drafts]) -> bool:
    """Whether two engines draft as well as one, and would not without the draft layer's cache.

    By accepted drafts alone: vLLM counts as proposed, too, with what it fills up a request's first step on a
    decode engine.
    """
    one, two, withheld = (drafts[arm].accepted / (TOKENS * len(LENGTHS)) for arm in ARMS)
    return abs(two - one) <= ALIKE < two - withheld


def count_drafts(client: Client, urls: Sequence[str], subject: Subject) -> dict[str, dict[str, Drafts]]:
    """After prompts whose last token the prefill engine would have said itself, and after others."""
    asked = [subject.source(seed, length) for seed, length in enumerate(LENGTHS)]
    said = [client.complete(urls[0], prompt, 1).token_ids for prompt in asked]
    guessed = [(*prompt, *token) for prompt, token in zip(asked, said, strict=True)]
    return {"guessed": drafts_kept(client, urls, guessed), "asked": drafts_kept(client, urls, asked)}


def judge(name: str, case: Case, logs: Path) -> dict[str, Any]:
    """One pair: the gate, then the drafts."""
    subject = bundled(parse_speculation(case.speculate))
    with Stack(logs / name) as stack, Client(timeout_s=120.0) as client:
        model = subject.write(logs / name)
        engines = [stack.start(spec(case, subject, model, role)) for role in (Role.PREFILL, Role.DECODE)]
        stack.wait_ready(START_S)
        urls = [engine.url for engine in engines]
        found: dict[str, Any] = {"cached": case.cached, "passed": True}
        if case.speculate.startswith("mtp"):
            kinds = count_drafts(client, urls, subject)
            found["kept"] = {
                kind: {arm: asdict(counted) for arm, counted in arms.items()} for kind, arms in kinds.items()
            }
            found["passed"] = kept(kinds["guessed"])
            print(name, found["kept"], flush=True)
        report = run_gate([subject], SMALL, running=Running(urls[0], urls[1], case.chunk_tokens))
        stack.check_alive()
    for failure in report.failures():
        print(name, failure, flush=True)
    found["passed"] &= report.passed
    return {**found, "gate": report.to_json()}


def main() -> None:
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=how)
    parser.add_argument("case", nargs="+", choices=CASES)
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, by date")
    parser.add_argument("--logs", type=Path, default=Path("drafts-logs"))
    given = parser.parse_args()
    passed = True
    for name in given.case:
        found = judge(name, CASES[name], given.logs.absolute())
        date = found["gate"]["date"][:10]
        output = given.output or RESULTS / f"gate-drafts-{date}.json"
        whole = json.loads(output.read_text()) if output.exists() else {}
        output.write_text(json.dumps(whole | {name: found}, indent=2) + "\n")
        print(name, "passed" if found["passed"] else "FAILED", found["gate"]["seconds"], "s", flush=True)
        passed = passed and found["passed"]
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
