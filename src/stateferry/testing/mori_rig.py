"""The conformance suite's rig for the `mori` transport over its double: reader and targets in one process."""

import os
from collections.abc import Callable, Sequence

from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, World
from stateferry.testing.transport_rigs import Rig, Target, content, regions_of
from stateferry.transport import Transport, TransportOptions
from stateferry.transport.mori import MoriTransport
from stateferry.transport.mori_options import MoriBackend, MoriOptions

QUIET_S = 0.02
"""Long enough to be seen, short enough to be waited for."""


class MoriRig(Rig):
    """One world; its requests take two looks."""

    def __init__(
        self,
        name: str = "mori",
        timeout_s: float = 20.0,
        *,
        make: Callable[..., Transport] = MoriTransport,
        backend: MoriBackend = MoriBackend.RDMA,
        wait_all: bool = True,
        looks: int = 2,
    ) -> None:
        """`make` makes the reader, as `MoriTransport` is made."""
        super().__init__(name, timeout_s)
        self.world = World(default=Behaviour(looks=looks), real_time=True)
        self._make = make
        self._double = MoriDouble(self.world, wait_all=wait_all)
        self._options = TransportOptions(mori=MoriOptions(backend=backend, quiet_s=QUIET_S), epoch=7)

    def new_reader(self) -> Transport:
        return self._make(self._options, io=self._double, clock=self.world.clock)

    def new_target(self, sizes: Sequence[int], seed: int) -> Target:
        return _DoubleTarget(self.world, self._double, self._options, sizes, seed)


class _DoubleTarget(Target):
    def __init__(
        self, world: World, double: MoriDouble, options: TransportOptions, sizes: Sequence[int], seed: int
    ) -> None:
        self.content = content(seed, sizes)
        self.process_id = os.getpid()
        self._world, self._double, self._options = world, double, options
        self.reopen()

    def close_transport(self) -> None:
        self._transport.close()

    def reopen(self) -> None:
        self._transport = MoriTransport(self._options, io=self._double, clock=self._world.clock)
        self.registration = self._transport.register(regions_of(self.content))

    def kill(self) -> None:
        self._world.kill(self._transport.engine.name)

    def end(self) -> None:
        self.kill()
        self._transport.close()
