"""What engines give for `/metrics`, fed to vLLM's own Prometheus classes over a registry of this test."""

import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from harness import HYBRID, Engine, Pair
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from stateferry.ids import RequestId, TransferId
from stateferry.session import Outcome, Report, VirtualClock
from stateferry.telemetry import METRICS, TOLD, MetricKind
from stateferry.vllm import stats as vllm_stats
from stateferry.vllm.connector import StateFerryConnector
from stateferry.vllm.metadata import StateFerryWorkerMetadata
from stateferry.vllm.numbers import Numbers
from stateferry.vllm.stats import StateFerryPromMetrics, StateFerryStats

pytestmark = pytest.mark.scheduler

LABELS = ["model_name", "engine"]


def prompt_of(length: int, number: int = 0) -> list[int]:
    return random.Random(number * 1000 + length).choices(range(1000), k=length)


class Page:
    """A registry as an API server in front of some engines has it, and its page."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        registry = self._registry = CollectorRegistry()

        class OurCounter(Counter):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{"registry": registry, **more})

        class OurGauge(Gauge):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{"registry": registry, **more})

        class OurHistogram(Histogram):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, **{"registry": registry, **more})

        config = next(iter(engines.values())).config
        types = {Counter: OurCounter, Gauge: OurGauge, Histogram: OurHistogram}
        values = {number: ["model", str(number)] for number in engines}
        metrics = StateFerryConnector.build_prom_metrics(config, types, LABELS, values)
        assert isinstance(metrics, StateFerryPromMetrics)
        for number, engine in engines.items():
            for data in engine.told:
                metrics.observe(data, number)
        self.samples = [
            sample
            for family in text_string_to_metric_families(generate_latest(registry).decode())
            for sample in family.samples
        ]

    def text(self, plain: bool = False) -> str:
        """The page as a server gives it, without the dates of counters' birth."""
        text = (prometheus_client.generate_latest if plain else generate_latest)(self._registry).decode()
        return "".join(line for line in text.splitlines(True) if "_created" not in line)

    def value(self, name: str, engine: int = 0, **labels: str) -> float:
        """The one sample of that name with exactly these labels, vLLM's aside."""
        wanted = {"model_name": "model", "engine": str(engine), **labels}
        (found,) = [s for s in self.samples if s.name == name and s.labels == wanted]
        return float(found.value)

    def examples(self, name: str) -> Iterator[dict[str, str]]:
        """All exemplars of a metric."""
        for sample in self.samples:
            if sample.name == name and sample.exemplar:
                yield sample.exemplar.labels


PAGES = Path(__file__).parents[1] / "pages"
"""What `stateferry top` is tested with. `RECORD_PAGES=1` writes them anew."""


def series_of(page: str) -> set[str]:
    """Every name with its labels, numbers and examples left out."""
    lines = (line.partition(" # ")[0].rpartition(" ")[0] for line in page.splitlines() if line[0] != "#")
    return {re.sub(r" [0-9.e+]+$", "", line) for line in lines}


def test_the_recorded_pages_are_what_a_registry_gives(leap: Callable[[float], None]) -> None:
    with Pair(HYBRID, transfer_timeout_s=30, lease_s=600, read_retries=0) as pair:
        for number in range(3):
            pair.hand_off(prompt_of(14, number))
        pair.consumer.tap.held = True
        posted = pair.consumer.tap.posted
        pair.consumer.add(prompt_of(14, 3), params=pair.prefill(prompt_of(14, 3)), request_id="late")
        pair.run_until(lambda: pair.consumer.tap.posted > posted, "the read that is to be late")
        leap(31)
        pair.run()
        pair.consumer.tap.held = False
        pages = {"decode_before.txt": Page({0: pair.consumer}).text()}
        for number in range(4, 6):
            pair.hand_off(prompt_of(14, number))
        after = Page({0: pair.consumer})
        pages |= {"decode_after.txt": after.text(), "decode_after_plain.txt": after.text(plain=True)}
        pages["prefill.txt"] = Page({0: pair.producer}).text()
        pages["two_engines.txt"] = Page({0: pair.consumer, 1: pair.producer}).text()
    for name, page in pages.items():
        if os.environ.get("RECORD_PAGES"):
            (PAGES / name).write_text(page)
        recorded = (PAGES / name).read_text()
        assert series_of(recorded) == series_of(page), f"{name} is out of date: RECORD_PAGES=1 writes it anew"


def check_received(page: Page, pair: Pair, count: int, ranks: int) -> None:
    """`count` hand-offs of 14 tokens were received, by a consumer of `ranks` ranks."""
    engine = pair.consumer
    assert page.value("stateferry_handoffs_total", outcome="received") == count
    assert page.value("stateferry_handoff_seconds_count", outcome="received") == count
    for stage in METRICS["stateferry_stage_seconds"].values:
        assert page.value("stateferry_stage_seconds_count", stage=stage) == count
    total = page.value("stateferry_handoff_seconds_sum", outcome="received")
    assert 0 < page.value("stateferry_stage_seconds_sum", stage="wire") < total
    expected: dict[str, int] = dict.fromkeys(("attention", "state", "window"), 0)
    for load in engine.loads:
        for part in load.groups:
            layout = engine.half.numbers._groups[part.group]
            kind = layout.kind.value
            for block in part.local_block_ids:
                expected[kind] += sum(len(page) for page in engine.pages(part.group, block))
    assert expected["attention"]
    assert expected["state"]
    for kind, size in expected.items():
        assert page.value("stateferry_received_bytes_total", kind=kind) == size
        pieces = page.value("stateferry_received_pieces_total", kind=kind)
        assert (pieces >= count * ranks) if size else (pieces == 0)
    assert page.value("stateferry_peers", state="ready") == ranks


@pytest.mark.parametrize("ranks", [1, 2])
def test_hand_offs_are_counted_once_and_bytes_over_all_ranks(ranks: int) -> None:
    with Pair(HYBRID, ranks=ranks) as pair:
        for number in range(3):
            pair.hand_off(prompt_of(14, number))
        # An engine that takes no steps tells nothing; one more request makes both take some.
        pair.hand_off(prompt_of(14, 3))
        pair.check_idle()
        consumer, producer = Page({0: pair.consumer}), Page({0: pair.producer})
        check_received(consumer, pair, 4, ranks)
        assert producer.value("stateferry_grants_total", end="released") >= 3 * ranks
        assert producer.value("stateferry_grants_total", end="expired") == 0
        assert producer.value("stateferry_handoffs_total", outcome="received") == 0
        assert consumer.value("stateferry_refused_offers_total", side="consumer") == 0
        requests = [labels["request"] for labels in consumer.examples("stateferry_handoff_seconds_bucket")]
        assert requests
        assert set(requests) <= set(pair.consumer.finished)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda stats: stats.add("stateferry_handoffs", 1, "received"),
        lambda stats: stats.add("stateferry_received_bytes", 1, "state"),
        lambda stats: stats.observe("stateferry_stage_seconds", 0.1, "plan"),
        lambda stats: stats.observe("stateferry_handoff_seconds", 0.1, "received"),
    ],
    ids=["counted twice", "a byte more", "a stage twice", "a time twice"],
)
def test_numbers_that_are_wrong_are_noticed(break_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = vllm_stats.record_handoff

    def record(stats: StateFerryStats, groups: Any, reports: list[Report]) -> None:
        right(stats, groups, reports)
        break_it(stats)

    monkeypatch.setattr("stateferry.vllm.numbers.record_handoff", record)
    with pytest.raises(AssertionError):
        test_hand_offs_are_counted_once_and_bytes_over_all_ranks(1)


def test_a_hand_off_that_fails_is_counted_with_its_cause_and_an_example() -> None:
    with Pair(HYBRID, transfer_timeout_s=1.0, read_retries=0) as pair:
        pair.consumer.tap.held = True
        request_id = pair.consumer.add(prompt_of(14), params=pair.prefill(prompt_of(14))).request_id
        pair.run()
        pair.consumer.tap.held = False
        pair.hand_off(prompt_of(14, 1))
        pair.check_idle()
        page = Page({0: pair.consumer})
        assert page.value("stateferry_handoffs_total", outcome="failed") == 1
        causes = METRICS["stateferry_failures"].values
        counted = {c: page.value("stateferry_failures_total", cause=c) for c in causes}
        assert sum(counted.values()) == 1
        assert counted["deadline"] == 1
        (example,) = page.examples("stateferry_failures_total")
        assert example["request"] == request_id
        # On a crowded machine not even the claim is answered in time.
        assert example["reason"].startswith(("no end of the read", "no answer to the claim"))
        assert page.value("stateferry_stage_seconds_count", stage="wire") == 1, "only what was received"
        for outcome in ("received", "failed"):
            assert page.value("stateferry_handoff_seconds_count", outcome=outcome) == 1


def test_an_id_that_is_shortened_is_no_option_of_grep() -> None:
    """Symptom: `-9098f20f-…`, and `grep` said that it knows no option 9."""
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(14), request_id="cmpl-9098f20f-" + "b" * 47)
        (example,) = Page({0: pair.consumer}).examples("stateferry_handoff_seconds_bucket")
        assert example["request"] == "b" * 47


def test_requests_that_a_router_wanted_handed_off_and_were_not_are_counted() -> None:
    with Pair(HYBRID) as pair:
        pair.producer.add([7], params={"do_remote_decode": True})
        pair.run()
        params = pair.prefill(prompt_of(14))
        pair.consumer.add(prompt_of(14, 1), params=params)
        pair.run_until(lambda: not pair.consumer.busy, "the answer to another prompt")
        pair.consumer.add(prompt_of(14), params=params)
        pair.run()
        pair.check_idle()
        assert pair.producer.ferry.counters.released == 1, "another prompt does not use an offer up"
        assert Page({0: pair.producer}).value("stateferry_refused_offers_total", side="producer") == 1
        assert Page({0: pair.consumer}).value("stateferry_refused_offers_total", side="consumer") == 1


def test_data_parallel_engines_behind_one_page_are_told_apart() -> None:
    with Pair(HYBRID) as one, Pair(HYBRID) as two:
        one.hand_off(prompt_of(14))
        for number in range(2):
            two.hand_off(prompt_of(14, number))
        page = Page({0: one.consumer, 1: two.consumer, 2: two.producer})
        counts = [page.value("stateferry_handoffs_total", engine=n, outcome="received") for n in range(3)]
        assert counts == [1, 2, 0]


def test_everything_is_served_as_zero_before_anything_happens() -> None:
    with Pair(HYBRID) as pair:
        page = Page({0: pair.consumer})
        names = {sample.name for sample in page.samples}
        for metric in METRICS.values():
            histogram = metric.kind is MetricKind.HISTOGRAM
            series = f"{metric.name}_count" if histogram else metric.series
            assert series in names
            for value in metric.values or ("",):
                assert page.value(series, **({metric.label: value} if metric.label else {})) == 0
        assert not [name for name in names if not name.startswith("stateferry_")]


def test_metrics_that_take_no_exemplars_are_fed_all_the_same() -> None:
    """As with Ray, whose classes stand in for Prometheus'."""

    class Plain:
        def __init__(self, **_: Any) -> None:
            self.seen: list[float] = []

        def labels(self, *_: Any) -> "Plain":
            return self

        def inc(self, value: float) -> None:
            self.seen.append(value)

        observe = set = inc

    types = dict.fromkeys((Counter, Gauge, Histogram), Plain)
    with Pair(HYBRID) as pair:
        pair.hand_off(prompt_of(14))
        metrics = StateFerryPromMetrics(pair.consumer.config, types, LABELS, {0: ["model", "0"]})
        for data in pair.consumer.told:
            metrics.observe(data)
        assert metrics._metrics["stateferry_handoff_seconds"].seen


def test_several_steps_are_one_line_of_vllms_log() -> None:
    with Pair(HYBRID) as pair:
        for number in range(3):
            pair.hand_off(prompt_of(14, number))
        line = StateFerryStats()
        for data in pair.consumer.told:
            line = line.aggregate(StateFerryStats(data=data))
        numbers = line.reduce()
        assert numbers["stateferry_handoffs{received}"] == 3
        assert numbers["stateferry_handoff_seconds{received} count"] == 3
        assert numbers["stateferry_stage_seconds{wire} count"] == 3
        assert 0 < numbers["stateferry_stage_seconds{wire} median"] < 60


def test_a_step_in_which_nothing_happens_tells_nothing_however_much_is_open() -> None:
    with Pair(HYBRID, lease_s=60, blocks=512) as pair:
        params = [pair.prefill(prompt_of(14, n)) for n in range(20)]
        assert pair.producer.half.open_count == len(params) == 20
        for _ in range(50):
            pair.producer.step()
        del pair.producer.told[:]
        for _ in range(20):
            pair.producer.step()
        assert [data for data in pair.producer.told if data.keys() != {TOLD}] == []
        for number, offered in enumerate(params):
            pair.consumer.add(prompt_of(14, number), params=offered)
        pair.run()
        pair.check_idle()


def told_times(every_s: float, steps: int) -> list[float]:
    """What an engine tells that takes a step every so often, in which nothing happens."""
    clock = VirtualClock()
    numbers, found = Numbers((), 1, clock), []
    for _ in range(steps):
        stats = numbers.take(0)
        if stats is not None:
            assert stats.data.keys() <= {TOLD, "stateferry_open_handoffs"}
            found.append(stats.data[TOLD][""])
        clock.advance(every_s)
    return found


def test_a_rank_that_reports_nothing_any_more_does_not_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Symptom: with one rank's ferry dead, each request left its other rank's report behind for ever."""
    monkeypatch.setattr("stateferry.vllm.numbers.MAX_PARTIAL", 3)
    numbers = Numbers((), 2, VirtualClock())

    def ended(request: str) -> None:
        report = Report(RequestId(request), TransferId("0" * 32), Outcome.ABANDONED)
        numbers.heard(StateFerryWorkerMetadata(reports=(report,)))

    for number in range(10):
        ended(f"r{number}")
    assert len(numbers._reports) == 3
    ended("r9")
    stats = numbers.take(0)
    assert stats is not None
    assert stats.data["stateferry_handoffs"] == {"abandoned": 1}, "one that both ranks have ended"


def test_an_engine_that_takes_steps_says_so_now_and_then() -> None:
    assert told_times(0.1, 101) == pytest.approx([1000.0, 1005.0, 1010.0], abs=0.2)
    assert len(told_times(7.0, 4)) == 4


def test_an_engine_that_never_says_so_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateferry.vllm.numbers.TELL_S", 1e9)
    with pytest.raises(AssertionError):
        test_an_engine_that_takes_steps_says_so_now_and_then()


def test_a_log_line_is_not_written_to_say_what_time_it_is() -> None:
    told = {TOLD: {"": 1000.0}}
    assert StateFerryConnector.build_kv_connector_stats(told).is_empty()
    more = told | {"stateferry_retries": {"": 1}}
    assert StateFerryConnector.build_kv_connector_stats(more).reduce() == {"stateferry_retries": 1}
    assert more.keys() == {TOLD, "stateferry_retries"}, "the page's own copy"


def test_the_registry_of_this_process_is_left_alone() -> None:
    with Pair(HYBRID) as pair:
        Page({0: pair.consumer})
        assert not [n for n in prometheus_client.REGISTRY._names_to_collectors if "stateferry" in n]
