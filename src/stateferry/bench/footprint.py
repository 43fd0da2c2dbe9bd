"""What an open hand-off costs while nothing happens to it: the scheduler halves' time per step, and memory.

Real scheduler halves and real ferries, no engine. Requests are opened and then left alone: their offers are
claimed, no blocks are asked for. What crosses a process in vLLM is copied here, so that nothing is shared.
"""

import gc
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec

from stateferry.bench.figures import percentile, spread
from stateferry.config import Config
from stateferry.ids import RequestId
from stateferry.layout.spec import CacheLayout
from stateferry.session import Grant, Open, Orders
from stateferry.stack import PREFILL_PARAMS
from stateferry.testing.peers import BLOCK_TOKENS, EngineRank, small_layout, wait_until
from stateferry.wire import RankAddress, parse_offer

COUNTS = (0, 10, 100, 1_000)
BLOCK_IDS = (32, 288)
"""Attention blocks of one request; the difference gives the cost of one id."""
MEASURED = 100
"""Hand-offs whose memory is added up."""
STEPS = 200
PLACES = ("producer, scheduler half", "producer, ferry", "consumer, scheduler half", "consumer, ferry")
"""The last has the claim's part on the producer in it."""
LEASE_S = 3600.0
STEP_TARGET_US, BASE_TARGET_BYTES, ID_TARGET_BYTES = 50.0, 4096.0, 16.0


class Half(Protocol):
    """As much of the connector's scheduler half as is measured."""

    def set_ranks(self, ranks: Sequence[RankAddress]) -> None: ...
    def on_new_request(self, request: Any) -> None: ...
    def request_finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]: ...
    def take_metadata(self) -> Any: ...
    def reported(self, sent: set[str], received: set[str]) -> None: ...
    def take_stats(self) -> Any: ...
    @property
    def open_count(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Halves:
    """How to make them: this package's benches do not import vLLM."""

    producer: Callable[[CacheLayout], Half]
    consumer: Callable[[CacheLayout], Half]
    finished: Any
    """vLLM's status of a request that has all its tokens."""


@dataclass(slots=True)
class Result:
    """Seconds of a step by open hand-offs; bytes of a hand-off by place and block ids."""

    steps_s: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Per half and number of open hand-offs: one figure a repeat, the median of its steps."""
    bytes: dict[str, dict[int, list[float]]] = field(default_factory=dict)
    """Per place and number of block ids: bytes of one hand-off, one figure a repeat."""

    def summary(self) -> dict[str, Any]:
        """Microseconds of a step, and memory as a base and a cost per block id."""
        low, high = BLOCK_IDS
        memory = {}
        for place, sizes in self.bytes.items():
            per_id = [(b - a) / (high - low) for a, b in zip(sizes[low], sizes[high], strict=True)]
            base = [a - low * slope for a, slope in zip(sizes[low], per_id, strict=True)]
            memory[place] = {"base_bytes": spread(base, 1), "bytes_per_block_id": spread(per_id, 2)}
        steps = {
            half: {str(n): spread([s * 1e6 for s in found], 3) for n, found in counts.items()}
            for half, counts in self.steps_s.items()
        }
        return {"step_us": steps, "memory": memory}


def measure(
    halves: Halves,
    repeats: int = 5,
    counts: Sequence[int] = COUNTS,
    on_repeat: Callable[[int], None] = lambda done: None,
) -> Result:
    """All of it, `repeats` times; one repeat before the first is not counted."""
    result = Result()
    for number in range(-1, repeats):
        for count in counts:
            for name, seconds in _steps(halves, count).items():
                if number >= 0:
                    result.steps_s.setdefault(name, {}).setdefault(count, []).append(seconds)
        for ids in BLOCK_IDS:
            for place, size in _bytes(halves, MEASURED, ids).items():
                if number >= 0:
                    result.bytes.setdefault(place, {}).setdefault(ids, []).append(size)
        if number >= 0:
            on_repeat(number + 1)
    return result


def _steps(halves: Halves, count: int) -> dict[str, float]:
    """Median seconds of a step's hooks in either scheduler half, with so many open hand-offs."""
    layout = small_layout("p")
    producer, consumer = halves.producer(layout), halves.consumer(layout)
    producer.set_ranks([RankAddress("127.0.0.1", 1, layout.epoch)])
    prompts = Prompts(count, 4, halves.finished)
    params = [msgspec.json.encode(one) for one in prompts.finish(producer)]
    for request in prompts.decodes(params):
        consumer.on_new_request(request)
    found = {}
    for name, half in (("producer", producer), ("consumer", consumer)):
        if half.open_count != count:
            raise RuntimeError(f"{name}: {half.open_count} hand-offs are open, expected {count}")
        step(half)  # what is new leaves with the first one
        times = []
        for _ in range(STEPS):
            start = perf_counter()
            step(half)
            times.append(perf_counter() - start)
        found[name] = percentile(times, 50)
    return found


def step(half: Half) -> None:
    """What vLLM calls in a step that brings nothing new."""
    half.take_metadata()
    half.reported(set(), set())
    half.take_stats()


class _Request(SimpleNamespace):
    """As much of vLLM's request as the halves look at; whatever else they ask for is not set."""

    def __getattr__(self, name: str) -> None:
        return None


class Prompts:
    """Requests for both halves, all of one prompt, each with blocks of its own."""

    def __init__(self, count: int, block_ids: int, finished: Any) -> None:
        self._prompt = list(range(BLOCK_TOKENS * block_ids))
        self._finished = finished
        self.prefills = [self._request(number, dict(PREFILL_PARAMS)) for number in range(count)]
        self.tables = [_table(number, block_ids) for number in range(count)]

    def finish(self, half: Half) -> Iterator[dict[str, Any]]:
        """All prefills arrive at a producer's half and are finished there, once; what responses carry."""
        for request, table in zip(self.prefills, self.tables, strict=True):
            half.on_new_request(request)
            kept, params = half.request_finished(request, table)
            if not kept or params is None:
                raise RuntimeError(f"the prefill was not offered: {params}")
            yield params
        self.prefills.clear()  # what the half did to a request is the request's, which vLLM drops now

    def decodes(self, params: Sequence[bytes]) -> list[Any]:
        """The requests that take what was offered."""
        return [self._request(number, msgspec.json.decode(one)) for number, one in enumerate(params)]

    def _request(self, number: int, params: dict[str, Any]) -> Any:
        return _Request(
            request_id=f"request-{number}",
            kv_transfer_params=params,
            prompt_token_ids=self._prompt,
            num_prompt_tokens=len(self._prompt),
            _all_token_ids=list(self._prompt[-1:]),
            mm_features=[],
            block_hashes=[],
            max_tokens=1,
            status=self._finished,
        )


def _table(number: int, block_ids: int) -> tuple[list[int], ...]:
    """Attention blocks and the state's column; no id is one of Python's shared small integers."""
    first = 1_000 + number * block_ids
    attention = list(range(first, first + block_ids))
    return attention, list(attention)


def _bytes(halves: Halves, count: int, block_ids: int) -> dict[str, float]:
    """Bytes that one open hand-off keeps, per place; `count` are opened."""
    config = Config(lease_s=LEASE_S)
    with EngineRank("p", config=config) as producer, EngineRank("d", config=config) as consumer:
        assert producer.address is not None
        prompts, measured = Prompts(count, block_ids, halves.finished), halves.producer(producer.layout)
        offering = halves.producer(producer.layout)
        for half in (measured, offering):
            half.set_ranks([producer.address])
        # The responses are vLLM's: those of the measured half are dropped, another half's are used.
        found = {PLACES[0]: grown(lambda: _all(prompts.finish(measured), measured))}
        prompts = Prompts(count, block_ids, halves.finished)
        params = [msgspec.json.encode(one) for one in prompts.finish(offering)]
        grants = [msgspec.json.encode(g, enc_hook=list) for g in offering.take_metadata().orders.grants]
        decodes, taking = prompts.decodes(params), halves.consumer(consumer.layout)

        def granted() -> None:
            for grant in grants:
                order: Grant = msgspec.json.decode(grant, type=Grant, dec_hook=lambda kind, ids: kind(ids))
                producer.ferry.submit(Orders(grants=(order,)))
            wait_until(lambda: producer.ferry.counters.granted == count)

        def claimed() -> None:
            for number, one in enumerate(params):
                offer = parse_offer(msgspec.json.decode(one))
                consumer.ferry.submit(Orders(opens=(Open(RequestId(f"request-{number}"), offer),)))
            wait_until(lambda: producer.ferry.counters.claimed == count)

        found[PLACES[1]] = grown(granted)
        found[PLACES[2]] = grown(lambda: _all(map(taking.on_new_request, decodes), taking))
        found[PLACES[3]] = grown(claimed)
        return {place: size / count for place, size in found.items()}


def _all(steps: Iterator[Any], half: Half) -> None:
    """Take every step, keep nothing of it, and let the orders leave."""
    for _ in steps:
        pass
    half.take_metadata()


def grown(action: Callable[[], None]) -> int:
    """Bytes that Python has more after `action` than before, in all threads."""
    gc.freeze()  # a collection then looks at what is new, not at all of vLLM
    tracemalloc.start()
    try:
        action()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.unfreeze()
