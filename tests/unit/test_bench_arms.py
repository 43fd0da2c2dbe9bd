"""Which pairs are started for which arms, and how each arm asks its pair."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from stateferry.bench import arms as bench_arms
from stateferry.bench.arms import IN_TREE, arm_spec, arm_specs, started_arms
from stateferry.stack import AtOnce, EngineSpec


class _Child:
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...


class _Server:
    def __init__(self, name: str) -> None:
        self.url, self.child = f"http://{name}", _Child()

    def wait_ready(self, *args: object) -> None: ...


class _Stack:
    """Names what it is asked to start."""

    def __init__(self, *args: object, **more: object) -> None:
        self.started: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, spec: EngineSpec) -> _Server:
        self.started.append(spec.name)
        return _Server(spec.name)

    def start_router(self, *args: object) -> _Server:
        self.started.append("router")
        return _Server("router")


@pytest.fixture(autouse=True)
def _no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_arms, "Stack", _Stack)
    between: Any = lambda client, prefill, decode: AtOnce(prefill, decode, "prefill@127.0.0.1:1")  # noqa: E731
    monkeypatch.setattr(AtOnce, "between", between)


@pytest.mark.parametrize("names", [("cma", "cma-at-once"), ("cma-at-once", "cma")])
@pytest.mark.parametrize("router", [False, True])
def test_an_arm_sends_its_legs_as_its_name_says_whichever_arm_came_first(
    names: tuple[str, ...], router: bool
) -> None:
    """Symptom: `--arm cma-at-once --arm cma` measured both legs at once twice."""
    with started_arms(Path("m"), [arm_spec(name) for name in names], router=router) as arms:
        found = {arm.name: arm for arm in arms}
    assert found["cma-at-once"].where == AtOnce(*found["cma"].urls, "prefill@127.0.0.1:1")
    assert found["cma"].at_once is None
    assert found["cma"].where == ("http://router" if router else found["cma"].urls)
    assert found["cma"].engines == found["cma-at-once"].engines


def test_other_engines_are_started_for_other_settings() -> None:
    with started_arms(Path("m"), [arm_spec("cma"), arm_spec("cma-sync")]) as (one, other):
        assert not {*one.urls} & {*other.urls}


def test_an_arm_that_is_named_twice_is_measured_once() -> None:
    """Symptom: its figures were those of twice as many repeats as were asked for."""
    names = [spec.name for spec in arm_specs(["cma", "in-tree", "cma", IN_TREE])]
    assert names == ["cma", IN_TREE]
