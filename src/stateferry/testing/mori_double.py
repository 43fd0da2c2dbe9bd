"""A double of `mori.io`: the names that our transport uses, behaving as the real ones do, in one process.

    world = World()
    transport = MoriTransport(io=MoriDouble(world), clock=world.clock, pause=world.advance)

Real bytes move between registered memory of this process, so that a transport over it can pass the
conformance suite. It does what MoRI's sources and headers show (1.0.0 to 1.2.4), also where that is awkward:

- a status is FAILED at the first error, and says nothing of what of it still lands (`World.land_late`);
- freeing a status or a session too early may be a crash there, and is a line in `World.defects` here;
- `wait_all` is there or not; it returns at once for INIT, does not return early for a failure, and with XGMI
  looks once and sleeps to its deadline;
- XGMI's requests move only when somebody looks at them;
- `create_session` may give None, or raise.

It has no name that is not in `stateferry.testing.mori_contract`, which is compared with the published ones.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from stateferry.testing.mori_values import (
    BackendType,
    EngineDesc,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    XgmiBackendConfig,
)
from stateferry.testing.mori_world import Behaviour, Code, Kind, Posted, World, is_cookie_read


class _Progress:
    """What MoRI knows of a request, apart from its status."""

    def __init__(self, world: World, batch: Posted | None, behaviour: Behaviour) -> None:
        self.world, self.batch, self.behaviour = world, batch, behaviour
        self.looks_left, self.init_left = behaviour.looks, behaviour.init_looks
        self.code, self.message = Code.IN_PROGRESS, ""

    @property
    def in_flight(self) -> bool:
        return self.code in (Code.IN_PROGRESS, Code.INIT)

    def step(self) -> None:
        """Somebody looks, or time passes."""
        if not self.in_flight or self.behaviour.kind is Kind.NEVER:
            return
        if self.init_left:
            self.init_left -= 1
            self.code = Code.INIT
            return
        self.code = Code.IN_PROGRESS
        if self.looks_left:
            self.looks_left -= 1
            return
        self.end()

    def end(self) -> None:
        why = ""
        code = Code.ERR_RDMA_OP
        if self.batch is not None:
            if self.behaviour.kind is Kind.RUNS:
                why = self.world.write(self.batch)
            else:
                self.world.write_some(self.batch, self.behaviour.part)
                why, code = self.behaviour.message, self.behaviour.code
        self.code, self.message = (code, why) if why else (Code.SUCCESS, "")


class TransferStatus:
    """How one batch stands."""

    def __init__(self, progress: _Progress) -> None:
        self.progress = progress

    def Code(self) -> Code:
        """Looks."""
        self.progress.step()
        return self.progress.code

    def Message(self) -> str:
        """Why it failed."""
        return self.progress.message

    def Succeeded(self) -> bool:
        """Looks."""
        return self.Code() is Code.SUCCESS

    def Failed(self) -> bool:
        """Whether the last look found it failed."""
        return self.progress.code > 10


class IOEngineSession:
    """One pair of regions."""

    def __init__(self, engine: "IOEngine", local: MemoryDesc, remote: MemoryDesc) -> None:
        self._engine, self._local, self._remote = engine, local, remote

    def allocate_transfer_uid(self) -> int:
        """A number."""
        self._engine._uid += 1
        return self._engine._uid

    def batch_read(
        self, local_offsets: list[int], remote_offsets: list[int], sizes: list[int], transfer_uid: int
    ) -> TransferStatus:
        """Post one batch."""
        world = self._engine._world
        batch = Posted(self._engine._key, self._local, self._remote, local_offsets, remote_offsets, sizes)
        if is_cookie_read(batch):
            world.cookie_reads += 1
        else:
            world.posted.append(batch)
        invalid = self._invalid(batch)
        behaviour = world.next_behaviour(is_cookie_read(batch))
        progress = _Progress(world, batch, behaviour)
        at_once = behaviour.kind is Kind.RUNS and not behaviour.looks + behaviour.init_looks
        if invalid:
            progress.code, progress.message = Code.ERR_INVALID_ARGS, invalid
        elif behaviour.kind in (Kind.REFUSED, Kind.RAISES) or at_once:
            progress.end()
        if behaviour.kind is Kind.RAISES:
            raise RuntimeError(behaviour.message)
        status = TransferStatus(progress)
        world.watch(status, batch, "status", progress)
        world.watch(self, batch, "session", progress)
        return status

    def _invalid(self, batch: Posted) -> str:
        lengths = {len(batch.local_offsets), len(batch.remote_offsets), len(batch.sizes)}
        if len(lengths) > 1:
            return "lengths of local offsets, remote offsets or sizes mismatch"
        if any(size > self._engine._world.largest_piece for size in batch.sizes):
            return "size exceeds UINT32_MAX"
        for offsets, desc in ((batch.local_offsets, batch.local), (batch.remote_offsets, batch.remote)):
            if any(o + size > desc.size for o, size in zip(offsets, batch.sizes, strict=True)):
                return "length out of range"
        return ""


class IOEngine:
    """One engine, without `wait_all`, as before 1.2.0."""

    def __init__(self, key: str, config: IOEngineConfig, *, world: World) -> None:
        self._world, self._key, self._config = world, key, config
        self._backends: dict[BackendType, object] = {}
        self._remote: dict[str, EngineDesc] = {}
        self.memory: dict[int, MemoryDesc] = {}
        self._memory_ids = 0
        self._uid = 0
        world.engines[key] = self

    def get_engine_desc(self) -> EngineDesc:
        """How to reach it."""
        return EngineDesc(self._key, self._config.host, 40000)

    def create_backend(self, type: BackendType, config: object = None) -> None:
        """Start a back end."""
        self._backends[type] = config

    def remove_backend(self, type: BackendType) -> None:
        """End it, and the engine with its last one."""
        del self._backends[type]
        self._world.engines.pop(self._key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        """Register memory by address."""
        desc = MemoryDesc(self._key, self._memory_ids, ptr, size)
        self._memory_ids += 1
        self.memory[desc.id] = desc
        self._world.registrations.append(desc)
        return desc

    def deregister_memory(self, mem_desc: MemoryDesc) -> None:
        """Undo that."""
        del self.memory[mem_desc.id]

    def register_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Make a peer known, whether or not it lives."""
        self._remote[engine_desc.key] = engine_desc

    def deregister_remote_engine(self, engine_desc: EngineDesc) -> None:
        """Forget it."""
        del self._remote[engine_desc.key]

    def create_session(self, local_mem: MemoryDesc, remote_mem: MemoryDesc) -> IOEngineSession | None:
        """Connect two regions."""
        how = self._world.next_sessions.popleft() if self._world.next_sessions else ""
        if how == "none":
            return None
        if how == "raise" or remote_mem.engine_key not in self._remote:
            raise RuntimeError("remote engine is not registered, or its queue pair could not be built")
        self._world.sessions.append((local_mem, remote_mem))
        return IOEngineSession(self, local_mem, remote_mem)


class WaitingIOEngine(IOEngine):
    """One engine, as from 1.2.0 on."""

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> Code:
        """Wait, all statuses with one deadline."""
        world = self._world
        world.waits_ms.append(timeout_ms)
        sleeps_through = BackendType.XGMI in self._backends
        left_ms = timeout_ms
        for status in statuses:
            status.progress.step()
            while not sleeps_through and status.progress.code is Code.IN_PROGRESS and left_ms > 0:
                world.advance(0.001)
                left_ms -= 1
                status.progress.step()
        codes = [status.progress.code for status in statuses]
        if sleeps_through and Code.IN_PROGRESS in codes:
            world.advance(timeout_ms / 1000)
        failed = [code for code in codes if code > 10]
        pending = [code for code in codes if code is not Code.SUCCESS]
        return (failed or pending or [Code.SUCCESS])[0]


class MoriDouble(SimpleNamespace):
    """What `import mori.io` gives."""

    def __init__(self, world: World, *, wait_all: bool = True) -> None:
        """`wait_all`: whether this version has it."""

        def make(key: str, config: IOEngineConfig) -> IOEngine:
            return (WaitingIOEngine if wait_all else IOEngine)(key, config, world=world)

        self.IOEngine: Any = make
        self.IOEngineConfig = IOEngineConfig
        self.BackendType = BackendType
        self.MemoryLocationType = MemoryLocationType
        self.PollCqMode = PollCqMode
        self.StatusCode = Code
        self.EngineDesc = EngineDesc
        self.MemoryDesc = MemoryDesc
        self.RdmaBackendConfig = RdmaBackendConfig
        self.XgmiBackendConfig = XgmiBackendConfig
