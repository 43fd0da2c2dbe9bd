"""What a bench of engines compares: pairs of engines, all started in one run, running one at a time.

The engines of the pairs whose turn it is not are stopped by signal: on a small machine idle engines of vLLM
take time from the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stateferry.errors import ConfigError
from stateferry.stack import (
    NIXL,
    START_TIMEOUT_S,
    STATEFERRY,
    Engine,
    EngineSpec,
    ProgressCallback,
    Role,
    ServersCallback,
    Stack,
)

REST_S = 1.5
"""Before something is measured of engines at rest. vLLM's processes spin on each other for a second after a
step (`SpinCondition` in its shm_broadcast)."""
IN_TREE = "in-tree NixlConnector"
ONE_ENGINE = "one engine"
TRANSPORTS = ("cma", "nixl", "mooncake", "cudaipc", "auto")
SYNC = "-sync"


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A pair that is not started yet."""

    name: str
    connector: str = STATEFERRY
    extra_config: Mapping[str, Any] = field(default_factory=dict)


def arm_spec(text: str, **settings: Any) -> ArmSpec:
    """`cma` or another transport of ours; `cma-sync`: with `load_mode: sync`; `in-tree`: vLLM's connector.

    `settings` go to our connector. Raises ConfigError for anything else.
    """
    if text in ("in-tree", IN_TREE):
        return ArmSpec(IN_TREE, NIXL)
    transport = text.removesuffix(SYNC)
    if transport not in TRANSPORTS:
        known = f"{', '.join(TRANSPORTS)}, each with {SYNC} behind it or not, and in-tree"
        raise ConfigError(f"unknown arm {text!r}; known: {known}")
    mode = {"load_mode": "sync"} if text.endswith(SYNC) else {}
    return ArmSpec(text, STATEFERRY, {"transport": transport, **mode, **settings})


@dataclass(frozen=True, slots=True)
class Arm:
    """A pair of engines behind the same two-leg client."""

    name: str
    engines: tuple[Engine, Engine]
    """Prefill and decode."""
    front: str = ""
    """URL of a router before them; empty: the client does both legs itself."""

    @property
    def urls(self) -> tuple[str, str]:
        """Of the prefill and the decode engine."""
        return self.engines[0].url, self.engines[1].url

    def stop(self) -> None:
        """Take the pair off the processors until `go_on`."""
        for engine in self.engines:
            engine.child.freeze()

    def go_on(self) -> None:
        """Undo `stop`."""
        for engine in self.engines:
            engine.child.thaw()


ROUTER_ARGS = ("--health-check-interval-secs", "86400", "--disable-circuit-breaker", "--disable-retries")
"""A pair that is stopped must not be taken for a dead one, and an error must be counted, not tried again."""


@contextmanager
def started_arms(
    model: Path,
    specs: Sequence[ArmSpec],
    log_folder: Path | None = None,
    progress: ProgressCallback | None = None,
    watch: ServersCallback = lambda names, ending: None,
    *,
    router: bool = False,
    timeout_s: float = START_TIMEOUT_S,
    **engine: Any,  # more of EngineSpec, for all engines
) -> Iterator[list[Arm]]:
    """Two engines per arm, with a router before them if asked for; ended with the block.

    Started pair by pair and stopped by signal again, unless there is only one. `timeout_s`: what each
    server gets to start.
    """
    with Stack(log_folder, watch=watch) as stack:
        arms: list[Arm] = []
        try:
            for spec in specs:
                tag = spec.name.split()[0]
                common: dict[str, Any] = {"model": model, "connector": spec.connector, **engine}
                common["extra_config"] = spec.extra_config
                prefill = stack.start(EngineSpec(role=Role.PREFILL, name=f"{tag}-prefill", **common))
                decode = stack.start(EngineSpec(role=Role.DECODE, name=f"{tag}-decode", **common))
                arms.append(Arm(spec.name, (prefill, decode)))
                for started in arms[-1].engines:
                    started.wait_ready(timeout_s, progress)
                if router:
                    front = stack.start_router([prefill], [decode], ROUTER_ARGS)
                    front.wait_ready(timeout_s, progress)
                    arms[-1] = Arm(spec.name, (prefill, decode), front.url)
                if len(specs) > 1:
                    arms[-1].stop()
            yield arms
        finally:
            for arm in arms:
                arm.go_on()
