"""What a replay says: lengths and counts are exact and may gate; times are one machine's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stateferry.bench.agentx.prompts import ideal_hits
from stateferry.bench.agentx.replay import Answered, Replayed
from stateferry.bench.agentx.trace import BLOCK_TOKENS
from stateferry.bench.figures import percentile, quantiles, spread
from stateferry.stack import Metrics

KINDS = ("attention", "window", "state")


@dataclass(frozen=True, slots=True)
class Counted:
    """What two engines' `/metrics` count, so far or in between."""

    queried_tokens: float = 0.0
    """On the prefill engine: tokens looked for in its prefix cache, and those found."""
    found_tokens: float = 0.0
    decode_found_tokens: float = 0.0
    """On the decode engine: in its own prefix cache."""
    handoffs: float = 0.0
    handoff_s: float = 0.0
    """Sum over hand-offs, from the load order (ours) or the post (in-tree) to the end."""
    bytes_by_kind: tuple[float, ...] = (0.0,) * len(KINDS)
    bytes_unsorted: float = 0.0
    """The in-tree connector does not say of which kind."""

    @classmethod
    def of(cls, prefill: Metrics, decode: Metrics) -> "Counted":
        """Since the engines' start."""
        ours, theirs = "stateferry_handoff_seconds", "vllm:nixl_xfer_time_seconds"
        return cls(
            prefill.total("vllm:prefix_cache_queries_total"),
            prefill.total("vllm:prefix_cache_hits_total"),
            decode.total("vllm:prefix_cache_hits_total"),
            decode.total(f"{ours}_count") + decode.total(f"{theirs}_count"),
            decode.total(f"{ours}_sum") + decode.total(f"{theirs}_sum"),
            tuple(decode.total("stateferry_received_bytes_total", kind=kind) for kind in KINDS),
            decode.total("vllm:nixl_bytes_transferred_sum"),
        )

    def since(self, before: "Counted") -> "Counted":
        """What was counted in between."""
        kinds = zip(self.bytes_by_kind, before.bytes_by_kind, strict=True)
        return Counted(
            self.queried_tokens - before.queried_tokens,
            self.found_tokens - before.found_tokens,
            self.decode_found_tokens - before.decode_found_tokens,
            self.handoffs - before.handoffs,
            self.handoff_s - before.handoff_s,
            tuple(now - then for now, then in kinds),
            self.bytes_unsorted - before.bytes_unsorted,
        )


def figures(replayed: Replayed, counted: Counted) -> dict[str, float]:
    """One replay's figures by name."""
    answers = [entry.answer for entry in replayed.answered]
    firsts = [a.first_token_s for a in answers if a.first_token_s is not None and not a.error]
    gaps = [gap for a in answers for gap in a.gaps_s]
    slow = [sum(a.gaps_s) / len(a.gaps_s) for a in answers if a.gaps_s]
    seconds = max(replayed.seconds, 1e-9)
    found: dict[str, float] = {
        "requests": len(answers),
        "errors": sum(bool(a.error) for a in answers),
        "empty": sum(not a.token_s and not a.error for a in answers),
        "wrong_length": sum(
            len(e.answer.token_s) != max(1, e.sent.turn.request.output_tokens)
            for e in replayed.answered
            if not e.answer.error
        ),
        "warm_up_errors": sum(bool(entry.answer.error) for entry in replayed.warm_ups),
        "seconds": seconds,
        "input_tokens_per_s": sum(a.prompt_tokens for a in answers) / seconds,
        "output_tokens_per_s": sum(len(a.token_s) for a in answers) / seconds,
        "ideal_prefix_hit": _ideal_share(replayed),
    }
    for name, values in (("first_token", firsts), ("inter_token", gaps)):
        for percent in (50, 90, 99) if values else ():
            found[f"{name}_p{percent}_s"] = percentile(values, percent)
    if slow:
        found["interactivity_p90_tokens_per_s"] = 1 / max(percentile(slow, 90), 1e-9)
    if counted.queried_tokens:
        found["served_prefix_hit"] = counted.found_tokens / counted.queried_tokens
    prompt_tokens = sum(entry.answer.prompt_tokens for entry in (*replayed.warm_ups, *replayed.answered))
    if prompt_tokens:
        found["decode_prefix_hit"] = counted.decode_found_tokens / prompt_tokens
    if counted.handoffs:
        sorted_bytes = zip(KINDS, counted.bytes_by_kind, strict=True) if any(counted.bytes_by_kind) else ()
        for kind, size in sorted_bytes:
            found[f"bytes_per_request_{kind}"] = size / counted.handoffs
        found["bytes_per_request"] = (sum(counted.bytes_by_kind) + counted.bytes_unsorted) / counted.handoffs
        warm_s = sum(entry.answer.first_token_s or 0.0 for entry in replayed.warm_ups)
        found["transfer_share_of_first_token"] = counted.handoff_s / max(sum(firsts) + warm_s, 1e-9)
    found["handoffs"] = counted.handoffs
    return found


def summary(replays: Sequence[tuple[Replayed, Counted]]) -> dict[str, Any]:
    """One arm: medians over its replays with their extremes, distributions, texts of errors."""
    rows: dict[str, list[float]] = {}
    for replayed, counted in replays:
        for name, value in figures(replayed, counted).items():
            rows.setdefault(name, []).append(value)
    answers = [entry.answer for replayed, _ in replays for entry in replayed.answered]
    firsts = [a.first_token_s for a in answers if a.first_token_s is not None]
    return {
        "replays": len(replays),
        "cut_short": sum(replayed.cut_short for replayed, _ in replays),
        "figures": {name: spread(values) for name, values in rows.items()},
        "distributions": {
            "first_token": quantiles(firsts),
            "inter_token": quantiles([gap for a in answers for gap in a.gaps_s]),
        },
        "error_texts": sorted({a.error for a in answers if a.error})[:5],
    }


def verdict(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What must not happen, whatever the machine: errors, empty answers, answers of another length."""
    return [
        f"{arm}: {name} is {arms[arm]['figures'][name]['most']:g} in a replay, must be 0"
        for arm in arms
        for name in ("errors", "empty", "wrong_length", "warm_up_errors")
        if arms[arm]["figures"][name]["most"]
    ]


def _ideal_share(replayed: Replayed) -> float:
    """Of the measured prompts' tokens, those that a cache which forgets nothing would have had."""
    by_tree: dict[int, list[Answered]] = {}
    for entry in (*replayed.warm_ups, *replayed.answered):
        by_tree.setdefault(entry.sent.tree.number, []).append(entry)
    measured = {id(entry) for entry in replayed.answered}
    hits = whole = 0
    for entries in by_tree.values():
        sent = [(e.sent.turn.request.hash_ids, e.answer.prompt_tokens) for e in entries]
        for entry, hit in zip(entries, ideal_hits(sent, BLOCK_TOKENS), strict=True):
            if id(entry) in measured:
                hits += hit
                whole += entry.answer.prompt_tokens
    return hits / whole if whole else 0.0
