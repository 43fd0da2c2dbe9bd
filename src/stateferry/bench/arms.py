"""What a bench of engines compares: pairs of engines, all started in one run, running one at a time.

The engines of the pairs whose turn it is not are stopped by signal: on a small machine idle engines of vLLM
take time from the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stateferry.bench.streams import Pair
from stateferry.errors import ConfigError
from stateferry.pause import PAUSE_US
from stateferry.stack import (
    NIXL,
    START_TIMEOUT_S,
    STATEFERRY,
    AtOnce,
    Client,
    Engine,
    EngineSpec,
    Handoff,
    ProgressCallback,
    Prompt,
    Role,
    ServersCallback,
    Stack,
    handoff_at_once,
)

REST_S = 1.5
"""Before something is measured of engines at rest. vLLM's processes spin on each other for a second after a
step (`SpinCondition` in its shm_broadcast)."""
IN_TREE = "in-tree NixlConnector"
ONE_ENGINE = "one engine"
TRANSPORTS = ("cma", "nixl", "mooncake", "cudaipc", "auto")
SYNC = "-sync"
AT_ONCE = "-at-once"
SHIPPED = "-shipped"


@dataclass(frozen=True, slots=True)
class ArmSpec:
    """A pair that is not started yet."""

    name: str
    connector: str = STATEFERRY
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    at_once: bool = False
    """Both legs are sent at once. The same engines serve an arm that is like it but for this."""


def arm_spec(text: str, **settings: Any) -> ArmSpec:
    """`cma` or another transport of ours; `cma-sync`: with `load_mode: sync`; `cma-at-once`, also behind
    `-sync`: both legs sent at once; `in-tree`: vLLM's connector. `-shipped` behind any of them: vLLM's
    processes wait for each other as it is shipped, whatever other arms' do (`stateferry.pause`).

    `settings` go to our connector. Raises ConfigError for anything else.
    """
    ours = text.removesuffix(SHIPPED)
    env = {PAUSE_US: "0"} if ours != text else {}
    if ours in ("in-tree", IN_TREE):
        return ArmSpec(IN_TREE + (" as shipped" if env else ""), NIXL, env=env)
    engines = ours.removesuffix(AT_ONCE)
    transport = engines.removesuffix(SYNC)
    if transport not in TRANSPORTS:
        known = f"{', '.join(TRANSPORTS)}, each with {SYNC}, {AT_ONCE} or both behind it, and in-tree"
        raise ConfigError(f"unknown arm {text!r}; known: {known}; {SHIPPED} behind any of them")
    mode = {"load_mode": "sync"} if engines.endswith(SYNC) else {}
    return ArmSpec(text, STATEFERRY, {"transport": transport, **mode, **settings}, env, ours != engines)


def arm_specs(names: Sequence[str], **settings: Any) -> list[ArmSpec]:
    """As `arm_spec`, of several; an arm that is named twice is there once, for results go by name."""
    return list({spec.name: spec for spec in (arm_spec(name, **settings) for name in names)}.values())


@dataclass(frozen=True, slots=True)
class Arm:
    """A pair of engines behind the same two-leg client."""

    name: str
    engines: tuple[Engine, Engine]
    """Prefill and decode."""
    front: str = ""
    """URL of a router before them; empty: the client does both legs itself."""
    at_once: AtOnce | None = None
    """How it sends both legs at once; None: one after the other."""

    @property
    def urls(self) -> tuple[str, str]:
        """Of the prefill and the decode engine."""
        return self.engines[0].url, self.engines[1].url

    @property
    def where(self) -> str | Pair | AtOnce:
        """What `Streams.ask` asks for a hand-off."""
        return self.front or self.at_once or self.urls

    def handed_off(self, client: Client, prompt: Prompt, max_tokens: int, *, stream: bool = False) -> Handoff:
        """One hand-off without a router. Raises AnswerError."""
        if self.at_once is not None:
            return handoff_at_once(client, self.at_once, prompt, max_tokens, stream=stream)
        return client.handoff(*self.urls, prompt, max_tokens, stream=stream)

    def stop(self) -> None:
        """Take the pair off the processors until `go_on`."""
        for engine in self.engines:
            engine.child.freeze()

    def go_on(self) -> None:
        """Undo `stop`."""
        for engine in self.engines:
            engine.child.thaw()


def same_engines(one: ArmSpec, other: ArmSpec) -> bool:
    """Whether one pair of engines can serve both arms."""
    return (one.connector, one.extra_config, one.env) == (other.connector, other.extra_config, other.env)


def shared(spec: ArmSpec, arm: Arm) -> Arm:
    """The arm of `spec` over the engines of `arm`, which run. A router sends legs one after the other, so an
    arm that sends both at once has none. Raises AnswerError."""
    if not spec.at_once:
        return replace(arm, name=spec.name)
    arm.go_on()
    with Client() as client:
        return Arm(spec.name, arm.engines, at_once=AtOnce.between(client, *arm.urls))


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
        pairs: list[Arm] = []
        """Of each arm so far: its engines and router, asked one leg after the other."""
        arms: list[Arm] = []
        for spec in specs:
            twin = next((i for i, s in enumerate(specs[: len(arms)]) if same_engines(s, spec)), None)
            if twin is not None:
                pairs.append(pairs[twin])
            else:
                common: dict[str, Any] = {"model": model, "connector": spec.connector, **engine}
                common["extra_config"] = spec.extra_config
                common["env"] = {**common.get("env", {}), **spec.env}
                pairs.append(_pair(stack, spec.name, common, router, timeout_s, progress))
            arms.append(shared(spec, pairs[-1]))
            if len(specs) > 1:
                arms[-1].stop()
        yield arms


def _pair(
    stack: Stack,
    name: str,
    common: Mapping[str, Any],
    router: bool,
    timeout_s: float,
    progress: ProgressCallback | None,
) -> Arm:
    """Two engines that are ready, and their router. `common`: of EngineSpec, for both."""
    tag = name.split()[0]
    prefill = stack.start(EngineSpec(role=Role.PREFILL, name=f"{tag}-prefill", **common))
    decode = stack.start(EngineSpec(role=Role.DECODE, name=f"{tag}-decode", **common))
    for started in (prefill, decode):
        started.wait_ready(timeout_s, progress)
    if not router:
        return Arm(name, (prefill, decode))
    front = stack.start_router([prefill], [decode], ROUTER_ARGS)
    front.wait_ready(timeout_s, progress)
    return Arm(name, (prefill, decode), front.url)
