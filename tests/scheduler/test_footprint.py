"""The bench of open hand-offs runs over the real scheduler halves and ferries."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from command import Run, command_here

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from stateferry.vllm.scheduler import SchedulerHalf

from stateferry.bench import footprint
from stateferry.bench.footprint import PLACES, Halves
from stateferry.cli import bench_footprint
from stateferry.layout.spec import CacheLayout

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    with command_here(capsys) as run:
        yield run


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "MEASURED", 20)
    monkeypatch.setattr(footprint, "BLOCK_IDS", (4, 1028))
    monkeypatch.setattr(bench_footprint.probe, "LENGTHS", (256,))


def test_every_open_hand_off_is_counted_where_it_lies(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_footprint, "COUNTS", (0, 50))
    result = run("bench", "footprint", "--repeats", "1", "--handoffs", "1", "--json")
    assert result.code == 0, result.err
    assert set(result.value["memory"]) == set(PLACES)
    per_id = {place: row["bytes_per_block_id"]["median"] for place, row in result.value["memory"].items()}
    for place in PLACES[1:]:
        assert 3 < per_id[place] < 6, place  # one packed table, and what twenty hand-offs do not average out
    assert per_id["producer, scheduler half"] < 1  # it keeps no table
    assert set(result.value["step_us"]["consumer"]) == {"0", "50"}
    assert [row["tokens"] for row in result.value["probe"]] == [256]


def test_a_table_of_pythons_integers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: consumers keep what they parsed as it came."""
    monkeypatch.setattr("stateferry.wire.params.BlockIds", tuple)
    found = footprint.measure(bench_footprint._halves(), 1, (0,)).summary()["memory"]
    assert found["consumer, ferry"]["bytes_per_block_id"]["median"] > footprint.ID_TARGET_BYTES


class Hoarder:
    """A mutant: a half that keeps a kilobyte more of every request, and looks at all of them in each step."""

    def __init__(self, half: SchedulerHalf) -> None:
        self._half = half
        self._kept: list[bytearray] = []

    def on_new_request(self, request: Any) -> None:
        self._kept.append(bytearray(1024))
        self._half.on_new_request(request)

    def take_stats(self) -> Any:
        for _ in range(50):
            sum(len(one) for one in self._kept)
        return self._half.take_stats()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._half, name)


def test_a_half_that_keeps_more_or_looks_at_everything_is_noticed() -> None:
    good = bench_footprint._halves()

    def hoarding(make: Callable[[CacheLayout], Any]) -> Callable[[CacheLayout], Any]:
        return lambda layout: Hoarder(make(layout))

    bad = Halves(hoarding(good.producer), hoarding(good.consumer), good.finished)
    honest, hoard = (footprint.measure(halves, 1, (0, 300)) for halves in (good, bad))
    for place in (PLACES[0], PLACES[2]):
        more = hoard.bytes[place][4][0] - honest.bytes[place][4][0]
        assert 900 < more < 1400, place
    # 50 looks at 300 entries are 15,000 calls: however busy the machine, they take longer than three.
    assert hoard.steps_s["consumer"][300][0] > 3 * hoard.steps_s["consumer"][0][0]
