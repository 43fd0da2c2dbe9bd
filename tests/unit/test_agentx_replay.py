"""Lanes on a clock that the test moves, the replay with a client that answers at once, and its report."""

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec
import pytest

from stateferry.bench.agentx.generate import make_session
from stateferry.bench.agentx.lanes import Lanes, Sent, Tree
from stateferry.bench.agentx.prompts import Prompts
from stateferry.bench.agentx.replay import Answered, Replayed, replay
from stateferry.bench.agentx.report import Counted, figures, summary, verdict
from stateferry.bench.agentx.turns import MAIN, turns_of
from stateferry.bench.streams import Pair, Streamed
from stateferry.stack import Metrics

SESSIONS = [make_session(number, 1, 64) for number in range(9)]
TREES = [Tree(number, turns_of(session)[:40]) for number, session in enumerate(SESSIONS)]
Event = tuple[float, str, Sent]
"""When, "sent" or "ended", what."""


def played(lanes: Lanes, seed: int = 0) -> list[Event]:
    """Run lanes to their end on a clock of our own; every answer takes a random while."""
    rng = random.Random(seed)
    now_s, log = 100.0, []
    lanes.begin(now_s)
    flying: list[tuple[float, int, Sent]] = []
    while not lanes.done:
        for sent in lanes.take(now_s):
            log.append((now_s, "sent", sent))
            flying.append((now_s + rng.uniform(0.1, 5.0), len(log), sent))
        moments = [end for end, _, _ in flying] + ([] if lanes.next_s is None else [lanes.next_s])
        now_s = min(moments)
        for entry in sorted(flying):
            if entry[0] <= now_s:
                flying.remove(entry)
                log.append((now_s, "ended", entry[2]))
                lanes.ended(entry[2], now_s)
    return log


def faults(log: Sequence[Event], lanes: int, trees: Sequence[Tree]) -> list[str]:
    """What a closed loop must not do. `trees` are what was recorded."""
    found = []
    over: dict[int, dict[int, float]] = {tree.number: {} for tree in trees}
    sent: dict[int, set[int]] = {tree.number: set() for tree in trees}
    holder: dict[int, int] = {}
    begun: set[int] = set()
    for now_s, what, event in log:
        tree, turn = event.tree.number, event.turn
        if what == "ended":
            over[tree][turn.number] = now_s
            continue
        recorded = trees[tree].turns[turn.number]
        inside = tree not in begun and event.lane not in holder
        skipped = {t.number for t in trees[tree].turns if t.start_s < recorded.start_s} if inside else set()
        if inside:
            over[tree] |= dict.fromkeys(skipped, now_s)
            sent[tree] |= skipped
        if holder.setdefault(event.lane, tree) != tree:
            if len(over[holder[event.lane]]) < len(trees[holder[event.lane]].turns):
                found.append(f"lane {event.lane} left session {holder[event.lane]} before its end")
            holder[event.lane] = tree
        if turn.number in sent[tree]:
            found.append(f"turn {turn.number} of session {tree} was sent twice")
        begun.add(tree)
        sent[tree].add(turn.number)
        missing = [number for number in recorded.after if number not in over[tree]]
        if missing:
            found.append(f"turn {turn.number} of session {tree} did not wait for {missing}")
        elif recorded.after and not inside and turn.number > min(sent[tree]):
            least = max(over[tree][number] for number in recorded.after) + min(recorded.pause_s, 10.0) * 0.5
            if now_s < least - 1e-6 and now_s > 100.0:
                found.append(f"turn {turn.number} of session {tree} did not pause")
    if len(set(holder)) > lanes:
        found.append("more lanes than asked for")
    found += [
        f"session {tree.number} was not finished"
        for tree in trees
        if len(over[tree.number]) < len(tree.turns)
    ]
    return found


def lanes_of(trees: Sequence[Tree], seed: int = 4, **changes: float) -> Lanes:
    settings = {"time_scale": 0.5, "longest_pause_s": 10.0, **changes}
    return Lanes(trees, 4, seed, **settings)


@pytest.mark.parametrize("seed", range(5))
def test_every_turn_is_sent_once_after_what_it_follows_and_its_pause(seed: int) -> None:
    assert faults(played(lanes_of(TREES, seed), seed), 4, TREES) == []


def test_lanes_that_do_not_wait_or_pause_are_caught() -> None:
    """Mutants of what is recorded; the checks know the truth."""
    eager = [replace(t, turns=[replace(turn, after=()) for turn in t.turns]) for t in TREES]
    assert any("did not wait" in text for text in faults(played(lanes_of(eager)), 4, TREES))
    restless = lanes_of(TREES, time_scale=0.0)
    assert any("did not pause" in text for text in faults(played(restless), 4, TREES))
    forgetful = [replace(t, turns=t.turns[:-1]) for t in TREES]
    assert any("not finished" in text for text in faults(played(lanes_of(forgetful)), 4, TREES))


def test_a_lane_begins_inside_its_first_session_with_the_turn_before_sent_ahead() -> None:
    lanes = lanes_of(TREES)
    warm = lanes.warm_ups()
    assert 0 < len(warm) <= 4
    assert len({sent.tree.number for sent in warm}) == len(warm)
    assert all(sent.turn.agent == MAIN for sent in warm)
    log = played(lanes)
    for sent in warm:
        measured = [e.turn.number for _, what, e in log if what == "sent" and e.tree is sent.tree]
        assert sent.turn.number not in measured
        assert min(measured, default=99) > 0
    later = {e.tree.number for _, _, e in log} - {sent.tree.number for sent in warm}
    for number in later:
        assert {e.turn.number for _, _, e in log if e.tree.number == number} >= {0}


class Instant:
    """Answers at once; every `fail`-th request has an error, every `empty`-th nothing."""

    def __init__(self, fail: int = 0, empty: int = 0) -> None:
        self.asked: list[tuple[str | Pair, int, int, str]] = []
        self._fail, self._empty = fail, empty

    async def ask(
        self,
        where: str | Pair,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Streamed:
        self.asked.append((where, len(prompt), max_tokens, (headers or {})["X-Correlation-ID"]))
        await asyncio.sleep(0)
        number = len(self.asked)
        if self._fail and number % self._fail == 0:
            return Streamed(0.0, len(prompt), error="HTTP 500")
        count = 0 if self._empty and number % self._empty == 0 else max_tokens
        return Streamed(0.0, len(prompt), [0.5 + 0.1 * i for i in range(count)])


def run(client: Instant, longest_s: float = float("inf"), **changes: float) -> Replayed:
    prompts = {number: Prompts(session, 0) for number, session in enumerate(SESSIONS)}
    lanes = lanes_of(TREES, **{"time_scale": 0.0, **changes})
    return asyncio.run(replay(lanes, prompts, client, "http://x", longest_s))


def test_a_replay_sends_exactly_what_was_recorded() -> None:
    client = Instant()
    replayed = run(client)
    assert not replayed.cut_short
    expected = sorted((e.turn.request.input_tokens, e.turn.request.output_tokens) for e in sent(replayed))
    assert sorted((length, tokens) for _, length, tokens, _ in client.asked) == expected
    everything = sum(len(tree.turns) for tree in TREES)
    assert everything * 0.5 < len(client.asked) <= everything
    assert len({name for *_, name in client.asked}) > len(TREES)  # subagents have conversations of their own


def sent(replayed: Replayed) -> list[Sent]:
    return [entry.sent for entry in (*replayed.warm_ups, *replayed.answered)]


def test_a_replay_that_runs_out_of_time_says_so() -> None:
    replayed = run(Instant(), longest_s=0.0)
    assert replayed.cut_short
    assert replayed.answered == []


def test_errors_empty_answers_and_wrong_lengths_fail_the_verdict() -> None:
    good = run(Instant())
    assert verdict({"arm": summary([(good, Counted())])}) == []
    found = verdict({"arm": summary([(good, Counted()), (run(Instant(fail=9, empty=7)), Counted())])})
    assert [text.split()[1] for text in found] == ["errors", "empty", "wrong_length"] or [
        text.split()[1] for text in found
    ] == ["errors", "empty", "wrong_length", "warm_up_errors"]


def test_figures_of_a_replay() -> None:
    """Two answers: 4 and 2 tokens, a tenth of a second apart, the first after half a second."""
    tree = TREES[0]
    answered = [
        Answered(
            Sent(0, tree, replace(turn, request=msgspec.structs.replace(turn.request, output_tokens=tokens))),
            Streamed(0.0, 256, [0.5 + 0.1 * i for i in range(tokens)]),
        )
        for turn, tokens in zip(tree.turns, (4, 2), strict=False)
    ]
    counted = Counted(1000, 600, 256, 2, 0.2, (100.0, 0.0, 40.0))
    found = figures(Replayed([], answered, seconds=2.0), counted)
    assert found["output_tokens_per_s"] == 3.0
    assert found["input_tokens_per_s"] == 256.0
    assert found["first_token_p90_s"] == 0.5
    assert found["interactivity_p90_tokens_per_s"] == pytest.approx(10.0)
    assert found["served_prefix_hit"] == 0.6
    assert found["decode_prefix_hit"] == 0.5
    assert (found["bytes_per_request_attention"], found["bytes_per_request_state"]) == (50.0, 20.0)
    assert found["bytes_per_request"] == 70.0
    assert found["transfer_share_of_first_token"] == pytest.approx(0.2)


def test_counts_of_two_metrics_pages() -> None:
    prefill = Metrics("vllm:prefix_cache_queries_total 50\nvllm:prefix_cache_hits_total 20\n")
    ours = Metrics(
        'stateferry_received_bytes_total{kind="state"} 7\n'
        'stateferry_received_bytes_total{kind="attention"} 5\n'
        "stateferry_handoff_seconds_count 2\nstateferry_handoff_seconds_sum 0.5\n"
    )
    now = Counted.of(prefill, ours)
    assert (now.bytes_by_kind, now.handoffs, now.handoff_s) == ((5.0, 0.0, 7.0), 2.0, 0.5)
    assert now.since(Counted(30, 15, 0, 1, 0.25, (5.0, 0.0, 0.0))).bytes_by_kind == (0.0, 0.0, 7.0)
    theirs = Metrics("vllm:nixl_bytes_transferred_sum 9\nvllm:nixl_xfer_time_seconds_count 1\n")
    assert Counted.of(prefill, theirs).bytes_unsorted == 9.0


def test_a_session_without_a_turn_takes_no_lane() -> None:
    """Symptom: a recorded session whose only entry is a subagent without requests ended the bench."""
    log = played(lanes_of([Tree(0, []), *TREES[1:4], Tree(4, [])]))
    assert {event.tree.number for _, _, event in log} == {1, 2, 3}
