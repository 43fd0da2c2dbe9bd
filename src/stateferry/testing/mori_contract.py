"""Every name of MoRI's that the `mori` transport uses, in one table; what published packages have of them.

MoRI cannot be imported where there is no ROCm, so its wheels are read as files: the Python wrappers by their
syntax, the native classes by the C++ headers that the wheels bring, and the names under which those are bound
by the text inside the shared library. `tools/mori_contract.py` downloads the wheels and prints what is found.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from zipfile import ZipFile

Arguments = tuple[str, ...]

METHODS: Mapping[str, Mapping[str, Arguments]] = {
    "IOEngine": {
        "__init__": ("key", "config"),
        "get_engine_desc": (),
        "create_backend": ("type", "config"),
        "remove_backend": ("type",),
        "register_memory": ("ptr", "size", "device_id", "mem_loc"),
        "deregister_memory": ("mem_desc",),
        "register_remote_engine": ("engine_desc",),
        "deregister_remote_engine": ("engine_desc",),
        "create_session": ("local_mem", "remote_mem"),
    },
    "IOEngineSession": {
        "allocate_transfer_uid": (),
        "batch_read": ("local_offsets", "remote_offsets", "sizes", "transfer_uid"),
    },
}
"""Of MoRI's Python classes, with their arguments in order: we pass them by position."""

OPTIONAL: Mapping[str, Mapping[str, Arguments]] = {"IOEngine": {"wait_all": ("statuses", "timeout_ms")}}
"""As METHODS; used only where it is there. `timeout_ms` is passed by name."""

FIRST_WITH_OPTIONAL = (1, 2, 0)

NATIVE_METHODS: Mapping[str, Arguments] = {
    "TransferStatus": ("Code", "Message", "Succeeded", "Failed"),
    "EngineDesc": ("pack", "unpack"),
    "MemoryDesc": ("pack", "unpack"),
}
FIELDS: Mapping[str, Arguments] = {"EngineDesc": ("key",), "MemoryDesc": ("engine_key", "size")}

ENUMS: Mapping[str, Arguments] = {
    "BackendType": ("RDMA", "XGMI"),
    "MemoryLocationType": ("CPU", "GPU"),
    "PollCqMode": ("POLLING",),
    "StatusCode": ("SUCCESS",),
}

CONFIGS: Mapping[str, Arguments] = {
    "IOEngineConfig": ("host", "port"),
    "RdmaBackendConfig": (
        "qp_per_transfer",
        "post_batch_size",
        "num_worker_threads",
        "poll_cq_mode",
        "enable_notification",
    ),
    "XgmiBackendConfig": ("num_streams", "num_events"),
}
"""What configurations are made with, by position; further arguments have defaults."""

TEXTS = ("SQ full (", "MORI_IO_SQ_BACKOFF_TIMEOUT_US")
"""Text that we look for in what MoRI says, and a variable that it must read."""

VERSIONS = ("1.0.0", "1.2.4", "")
"""What is compared; an empty one is the newest."""

UNREADABLE = (
    "whether a native call takes its arguments by these positions (no stubs; its C++ constructor does)",
    "the defaults of native arguments",
    "what a call does, when a status changes, what still lands: `testing/mori_double.py` is what we think",
)
"""What no file of a wheel tells."""


def exported() -> set[str]:
    """The names that `mori.io` must have."""
    return {*METHODS, *ENUMS, *CONFIGS, "EngineDesc", "MemoryDesc"}


@dataclass(frozen=True, slots=True)
class Package:
    """What is read of one wheel."""

    version: str
    init: str
    """Source of `mori/io/__init__.py`."""
    engine: str
    """Source of `mori/io/engine.py`."""
    headers: str
    """All C++ headers of `mori/io`, one after the other."""
    binary: bytes
    """The shared libraries."""

    @classmethod
    def of_wheel(cls, path: Path) -> "Package":
        """Read a wheel without importing it. Raises KeyError for a file that is not there."""
        with ZipFile(path) as wheel:
            names = wheel.namelist()
            headers = [n for n in names if re.search(r"include/mori/io/\w+\.hpp$", n)]
            libraries = [n for n in names if re.search(r"mori/libmori_(pybinds|io)\.so$", n)]
            return cls(
                path.name.split("-")[1],
                wheel.read("mori/io/__init__.py").decode(),
                wheel.read("mori/io/engine.py").decode(),
                "\n".join(wheel.read(name).decode() for name in headers),
                b"".join(wheel.read(name) for name in libraries),
            )


def problems(package: Package) -> list[str]:
    """What the transport uses and this package does not have; empty when all is there."""
    found = [f"mori.io exports no {name}" for name in sorted(exported() - _exports(package))]
    classes = _classes(package.engine)
    for name, methods in METHODS.items():
        for method, arguments in methods.items():
            found += _method(classes.get(name), f"{name}.{method}", arguments)
    if _numbers(package.version) >= FIRST_WITH_OPTIONAL:
        for name, methods in OPTIONAL.items():
            for method, arguments in methods.items():
                found += _method(classes.get(name), f"{name}.{method}", arguments)
    found += _native(package)
    found += [f"no text {text!r} in its libraries" for text in TEXTS if text.encode() not in package.binary]
    return found


def optional_there(package: Package) -> bool:
    """Whether it has what is used only where it is there."""
    classes = _classes(package.engine)
    return not any(
        problem
        for name, methods in OPTIONAL.items()
        for method, arguments in methods.items()
        for problem in _method(classes.get(name), f"{name}.{method}", arguments)
    )


def _exports(package: Package) -> set[str]:
    """Names that `mori.io` imports into itself; a star stands for all classes of `engine`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(package.init)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names | set(_classes(package.engine)) if "*" in names else names


def _classes(source: str) -> dict[str, dict[str, ast.FunctionDef]]:
    """Class -> method -> its definition."""
    return {
        node.name: {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _method(methods: Mapping[str, ast.FunctionDef] | None, where: str, wanted: Arguments) -> Iterator[str]:
    if methods is None or where.rpartition(".")[2] not in methods:
        yield f"no {where}"
        return
    definition = methods[where.rpartition(".")[2]]
    arguments = [argument.arg for argument in definition.args.args[1:]]
    if definition.args.vararg is not None:
        # It passes everything on to a method of its own, behind the native function.
        inner = _passed_on_to(definition, methods)
        arguments = [argument.arg for argument in inner.args.args[2:]] if inner is not None else []
    required = len(arguments) - len(definition.args.defaults)
    if tuple(arguments[: len(wanted)]) != wanted:
        yield f"{where} takes {', '.join(arguments)}; we pass {', '.join(wanted)}"
    elif required > len(wanted):
        yield f"{where} needs {', '.join(arguments[len(wanted) : required])}, too"


def _passed_on_to(
    definition: ast.FunctionDef, methods: Mapping[str, ast.FunctionDef]
) -> ast.FunctionDef | None:
    for node in ast.walk(definition):
        if isinstance(node, ast.Call) and any(isinstance(argument, ast.Starred) for argument in node.args):
            return methods.get(ast.unparse(node.func).removeprefix("self."))
    return None


def _native(package: Package) -> Iterator[str]:
    """Headers for what is there, the shared library for the name under which it is bound."""
    bound = [*NATIVE_METHODS.items(), *FIELDS.items(), *ENUMS.items(), *CONFIGS.items()]
    for name, members in bound:
        for member in (name, *members):
            if f"{member}\0".encode() not in package.binary:
                yield f"{name}: its library binds no {member}"
    for name, members in ENUMS.items():
        body = re.search(rf"enum class {name}\b[^{{]*{{(.*?)}}", package.headers, re.S)
        found = re.findall(r"^\s*(\w+)\s*=", (body[1] if body else "").replace(",", "\n"), re.M)
        yield from (f"{name} has no {member}" for member in members if member not in found)
    for method in NATIVE_METHODS["TransferStatus"]:
        if not re.search(rf"\b{method}\(\)\s*{{", package.headers):
            yield f"TransferStatus has no {method}()"
    for name, members in CONFIGS.items():
        if name != "IOEngineConfig":
            yield from _constructor(name, members, package.headers)


def _constructor(name: str, wanted: Arguments, headers: str) -> Iterator[str]:
    """The C++ constructor with arguments: ours first and in order, more only with defaults."""
    made = re.search(rf"\b{name}\(([^()]+)\)\s*:", headers)
    if made is None:
        yield f"{name} has no constructor with arguments"
        return
    arguments = [" ".join(argument.split()) for argument in made[1].split(",")]
    names = [_snake(argument.partition("=")[0].split()[-1]) for argument in arguments]
    if tuple(names[: len(wanted)]) != wanted:
        yield f"{name} takes {', '.join(names)}; we pass {', '.join(wanted)}"
    yield from (f"{name} needs {a}, too" for a in arguments[len(wanted) :] if "=" not in a)


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name.rstrip("_")).lower()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


HOLDERS: Mapping[str, Mapping[str, str]] = {
    "mori_engine.py": {
        "self.io": "mori.io",
        "self._engine": "IOEngine",
        "self._session": "IOEngineSession",
        "places": "MemoryLocationType",
        "types": "BackendType",
        "self.io.PollCqMode": "PollCqMode",
        "self.io.EngineDesc": "EngineDesc",
        "self.io.MemoryDesc": "MemoryDesc",
        "self._engine.get_engine_desc()": "EngineDesc",
    },
    "mori_request.py": {"self.status": "TransferStatus"},
    "mori_wait.py": {
        "codes": "StatusCode",
        "engine.native": "IOEngine",
        "engine.io": "mori.io",
        "self._engine.native": "IOEngine",
        "self._engine.io": "mori.io",
    },
    "mori.py": {"descriptor": "Desc", "d": "Desc", "self._cookie_page": "Desc"},
}
"""File -> expression -> what of MoRI's it holds."""


def allowed(holder: str) -> set[str]:
    """The names of such a thing that may be used."""
    if holder == "mori.io":
        return exported()
    if holder == "Desc":
        return allowed("EngineDesc") | allowed("MemoryDesc")
    names: set[str] = set()
    for members in (METHODS, OPTIONAL, NATIVE_METHODS, FIELDS, ENUMS):
        names |= set(members.get(holder, ()))
    return names


def undeclared(file: str, source: str) -> list[str]:
    """What a file of the transport uses of MoRI's that is not in the tables."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            holder = HOLDERS[file].get(ast.unparse(node.value))
            if holder is not None and node.attr not in allowed(holder):
                found.append(f"{file}:{node.lineno} uses {holder}.{node.attr}, which is not declared")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            holder = HOLDERS[file].get(ast.unparse(node.args[0]))
            name = ast.literal_eval(node.args[1]) if isinstance(node.args[1], ast.Constant) else "?"
            if holder is not None and name not in allowed(holder):
                found.append(f"{file}:{node.lineno} asks for {holder}.{name}, which is not declared")
    return found
