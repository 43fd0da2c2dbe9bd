"""What the `mori` transport uses of MoRI is declared, is in the double, and is in the published packages."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.programs import loaded

from stateferry.testing import mori_double, mori_values
from stateferry.testing.mori_contract import (
    CONFIGS,
    ENUMS,
    FIELDS,
    FIRST_WITH_OPTIONAL,
    HOLDERS,
    METHODS,
    NATIVE_METHODS,
    OPTIONAL,
    Package,
    exported,
    optional_there,
    problems,
    undeclared,
)
from stateferry.testing.mori_double import MoriDouble
from stateferry.testing.mori_world import World

ROOT = Path(__file__).parents[2]
TRANSPORT = ROOT / "src" / "stateferry" / "transport"
SCRIPT = ROOT / "tools" / "mori_contract.py"


def tool() -> ModuleType:
    return loaded(SCRIPT)


# -- the transport -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(TRANSPORT.glob("mori*.py")), ids=lambda path: path.name)
def test_the_transport_uses_nothing_that_is_not_declared(path: Path) -> None:
    if path.name in HOLDERS:
        assert undeclared(path.name, path.read_text()) == []
    else:
        # Whoever does not hold a thing of MoRI's has no name of its to use either.
        assert not re.search(r"\.(IOEngine|batch_read|Succeeded|create_session)\b", path.read_text())


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("mori_engine.py", "self._session.batch_read(", "self._session.read("),
        ("mori_engine.py", "self._engine.register_memory(", "self._engine.register_torch_tensor("),
        ("mori_engine.py", "self.io.PollCqMode.POLLING", "self.io.PollCqMode.EVENT"),
        ("mori_engine.py", "self.io.XgmiBackendConfig(", "self.io.FabricBackendConfig("),
        ("mori_engine.py", "places.GPU", "places.DEVICE"),
        ("mori_request.py", "self.status.Failed()", "self.status.InProgress()"),
        ("mori_wait.py", '"wait_all"', '"wait_for"'),
        ("mori_wait.py", "codes.SUCCESS", "codes.OK"),
        ("mori.py", "descriptor.engine_key", "descriptor.owner"),
    ],
)
def test_an_undeclared_name_is_caught(file: str, before: str, after: str) -> None:
    source = (TRANSPORT / file).read_text()
    assert before in source
    assert len(undeclared(file, source.replace(before, after))) >= 1


def test_everything_declared_is_used() -> None:
    """A name that nothing uses would be compared for nothing."""
    source = "\n".join((TRANSPORT / file).read_text() for file in HOLDERS)
    members = [
        m for table in (METHODS, OPTIONAL, NATIVE_METHODS, FIELDS, ENUMS) for ms in table.values() for m in ms
    ]
    for name in {*exported(), *members} - {"__init__", "IOEngineSession"}:
        assert re.search(rf"\b{name}\b", source), f"{name} is declared, but not used"


# -- the double ----------------------------------------------------------------------------------


def public(thing: type) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("_")}


def test_the_double_has_what_is_declared_and_nothing_else() -> None:
    assert set(vars(MoriDouble(World()))) == exported() - {"IOEngineSession"}
    for name, members in ENUMS.items():
        if name != "StatusCode":  # tests need all of its codes
            assert {member.name for member in getattr(mori_values, name)} == set(members)
    for name, native in NATIVE_METHODS.items():
        thing = getattr(mori_double, name)
        fields = set(FIELDS.get(name, ()))
        assert public(thing) - set(getattr(thing, "__struct_fields__", ())) == set(native)
        assert fields <= set(getattr(thing, "__struct_fields__", ()))


def test_the_doubles_methods_take_the_same_arguments() -> None:
    tables: list[tuple[type, Any]] = [
        (mori_double.IOEngine, METHODS["IOEngine"]),
        (mori_double.IOEngineSession, METHODS["IOEngineSession"]),
        (mori_double.WaitingIOEngine, OPTIONAL["IOEngine"]),
    ]
    for thing, methods in tables:
        assert public(thing) == set(methods) - {"__init__"}
        for method in public(thing):
            arguments = tuple(inspect.signature(getattr(thing, method)).parameters)[1:]
            assert arguments == methods[method], f"{thing.__name__}.{method}"
    for name, wanted in CONFIGS.items():
        assert tuple(inspect.signature(getattr(mori_values, name)).parameters) == wanted


def test_one_double_waits_and_the_other_does_not() -> None:
    for wait_all in (True, False):
        io = MoriDouble(World(), wait_all=wait_all)
        assert hasattr(io.IOEngine("e", io.IOEngineConfig("h", 0)), "wait_all") is wait_all


# -- the packages --------------------------------------------------------------------------------

ENGINE = """
class IOEngineSession:
    def allocate_transfer_uid(self): ...
    def _batch(self, func, local_offsets, remote_offsets, sizes, transfer_uid): ...
    def batch_read(self, *args):
        return self._batch(self._sess.BatchRead, *args)
class IOEngine:
    def __init__(self, key, config): ...
    def get_engine_desc(self): ...
    def create_backend(self, type, config=None): ...
    def remove_backend(self, type): ...
    def register_memory(self, ptr, size, device_id, mem_loc): ...
    def deregister_memory(self, mem_desc): ...
    def register_remote_engine(self, engine_desc): ...
    def deregister_remote_engine(self, engine_desc): ...
    def create_session(self, local_mem, remote_mem): ...
    def wait_all(self, statuses, timeout_ms=-1): ...
"""
HEADERS = """
enum class BackendType : uint32_t { XGMI = 1, RDMA = 2, };
enum class MemoryLocationType : uint32_t { CPU = 1, GPU = 2 };
enum class PollCqMode : uint32_t { POLLING = 0, EVENT = 1 };
enum class StatusCode : uint32_t { SUCCESS = 0, INIT = 1 };
RdmaBackendConfig(int qpPerTransfer_, int postBatchSize_, int numWorkerThreads_,
                  PollCqMode pollCqMode_, bool enableNotification_, uint32_t notifPerQp_ = 1024)
    : BackendConfig(BackendType::RDMA),
XgmiBackendConfig(int numStreams_, int numEvents_) : BackendConfig(BackendType::XGMI) {}
StatusCode Code() { } std::string Message() { } bool Succeeded() { } bool Failed() { }
"""


def made_up() -> Package:
    """A package that has all we use."""
    tables = (NATIVE_METHODS, FIELDS, ENUMS, CONFIGS)
    bound = {name for table in tables for key, members in table.items() for name in (key, *members)}
    texts = ["SQ full (", "MORI_IO_SQ_BACKOFF_TIMEOUT_US"]
    names = ", ".join(sorted(exported() - {"IOEngine", "IOEngineSession"}))
    return Package(
        "1.2.0",
        f"from .engine import *\nfrom mori.cpp import {names}",
        ENGINE,
        HEADERS,
        "\0".join(["", *sorted(bound), *texts, ""]).encode(),
    )


def without(part: str, before: str, after: str = "") -> Callable[[Package], Package]:
    def change(package: Package) -> Package:
        whole = getattr(package, part)
        old, new = (before.encode(), after.encode()) if part == "binary" else (before, after)
        assert old in whole
        return replace(package, **{part: whole.replace(old, new)})

    return change


def test_a_package_with_everything_is_fit() -> None:
    assert problems(made_up()) == []
    assert optional_there(made_up())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("init", "MemoryDesc, "), "mori.io exports no MemoryDesc"),
        (without("init", "from .engine import *"), "mori.io exports no IOEngine"),
        (without("engine", "def register_memory", "def register_region"), "no IOEngine.register_memory"),
        (without("engine", "class IOEngineSession", "class Session"), "no IOEngineSession.batch_read"),
        (without("engine", "ptr, size, ", "size, ptr, "), "register_memory takes size, ptr"),
        (without("engine", "remote_mem)", "remote_mem, backend)"), "create_session needs backend, too"),
        (
            without("engine", "remote_offsets, sizes, ", "sizes, remote_offsets, "),
            "batch_read takes local_offsets, sizes",
        ),
        (without("engine", "timeout_ms=-1", "timeout_us=-1"), "wait_all takes statuses, timeout_us"),
        (without("headers", "XGMI = 1,"), "BackendType has no XGMI"),
        (without("headers", "SUCCESS = 0", "OK = 0"), "StatusCode has no SUCCESS"),
        (without("headers", "bool Failed()", "bool Broken()"), "TransferStatus has no Failed()"),
        (
            without(
                "headers", "postBatchSize_, int numWorkerThreads_", "numWorkerThreads_, int postBatchSize_"
            ),
            "RdmaBackendConfig takes qp_per_transfer, num_worker_threads",
        ),
        (without("headers", " = 1024", ""), "RdmaBackendConfig needs uint32_t notifPerQp_, too"),
        (without("headers", "XgmiBackendConfig(int", "Xgmi(int"), "XgmiBackendConfig has no constructor"),
        (without("binary", "\0engine_key\0", "\0"), "MemoryDesc: its library binds no engine_key"),
        (without("binary", "\0unpack\0", "\0"), "EngineDesc: its library binds no unpack"),
        (without("binary", "SQ full (", "send queue full"), "no text 'SQ full ('"),
    ],
)
def test_what_a_package_lacks_is_told(change: Callable[[Package], Package], says: str) -> None:
    found = problems(change(made_up()))
    assert any(says in problem for problem in found), found


def test_wait_all_is_asked_only_of_versions_that_should_have_it() -> None:
    lacking = without("engine", "wait_all", "wait_some")(made_up())
    assert problems(lacking) == ["no IOEngine.wait_all"]
    assert problems(replace(lacking, version="1.1.1")) == []
    assert not optional_there(lacking)


@pytest.mark.timeout(600)
def test_the_published_packages_have_what_we_use(tmp_path: Path) -> None:
    """1.0.0, 1.2.4 and the newest, by name from the package index."""
    module = tool()
    try:
        wheels = module.download(tmp_path)
    except module.Offline as e:
        pytest.skip(f"offline: {e}")
    packages = [Package.of_wheel(wheel) for wheel in wheels]
    versions = {package.version for package in packages}
    assert {"1.0.0", "1.2.4"} <= versions
    assert {package.version: found for package in packages if (found := problems(package))} == {}
    for package in packages:
        numbers = tuple(int(part) for part in package.version.split(".")[:3])
        assert optional_there(package) is (numbers >= FIRST_WITH_OPTIONAL)


def test_without_an_index_the_comparison_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    module = tool()
    with pytest.raises(module.Offline, match="no version of amd-mori could be downloaded"):
        module.download(tmp_path)
