"""A reader and a target over the MoRI double, with time standing still."""

from stateferry.layout.spec import Pieces
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import Behaviour, World
from stateferry.testing.transport_reads import pieces
from stateferry.testing.transport_rigs import Local, content, regions_of
from stateferry.transport import Transfer, TransferState, TransportOptions
from stateferry.transport.mori import MoriTransport
from stateferry.transport.mori_options import MoriOptions

SIZES = (65536, 4096)
QUIET_S = 5.0
TIMEOUT_S = 10.0
STEP_S = 0.0005
SOME = pieces([(0, 1000 * i, 0, 1000 * (19 - i) + 7, 900) for i in range(20)])


class Pair:
    """A reader connected to a target, in one world, with time standing still."""

    def __init__(
        self, world: World | None = None, mori: MoriOptions | None = None, wait_all: bool = True
    ) -> None:
        self.world = world or World(default=Behaviour(looks=1))
        self.double = MoriDouble(self.world, wait_all=wait_all)
        self.options = TransportOptions(
            mori=mori or MoriOptions(quiet_s=QUIET_S), epoch=7, transfer_timeout_s=TIMEOUT_S
        )
        self.content = content(1, SIZES)
        self.local = Local(SIZES)
        self.target, self.reader = self.transport(), self.transport()
        self.registration = self.target.register(regions_of(self.content))
        self.reader.register(self.local.regions())
        self.peer = self.reader.connect(self.registration, 1.0)

    def transport(self) -> MoriTransport:
        return MoriTransport(self.options, io=self.double, clock=self.world.clock, pause=self.world.advance)

    def drive(
        self, transfer: Transfer, batch: Pieces, *, lands_at_s: float = 1e9, until_s: float = 100.0
    ) -> list[TransferState]:
        """Poll until it is terminal and quiet; late bytes land when it is time. At every look: nothing is
        told to be quiet while bytes may land, and DONE means that they are all there."""
        world, seen = self.world, []
        started_s = world.clock()
        step_s = STEP_S
        while world.clock() - started_s < until_s:
            state = transfer.poll()
            seen.append(state)
            if transfer.quiet:
                assert not world.restless, f"{state.name} and quiet, while bytes of it may land"
                assert state is not TransferState.PENDING, "quiet while pending"
            if state is TransferState.DONE:
                assert transfer.quiet, "DONE, but not quiet"
                found = self.local.differences(batch, self.content)
                assert not found, f"DONE, but {found}"
            if state is not TransferState.PENDING and transfer.quiet:
                return seen
            world.advance(step_s)
            if len(seen) > 1000:
                step_s = 0.05
            if world.clock() - started_s >= lands_at_s:
                world.land_late()
        return seen

    def posts(self) -> int:
        return len(self.world.posted)
