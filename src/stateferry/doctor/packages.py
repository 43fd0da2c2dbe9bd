"""Which of the libraries that hand-offs need are installed, and what for."""

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from stateferry.doctor.findings import Finding, Verdict, ok, problem, warning
from stateferry.vllm.versions import DISTRIBUTIONS, TESTED, is_tested

OLDEST, NEWEST = (3, 11), (3, 13)
FindVersion = Callable[[str], str | None]
"""Distribution -> its version; None where it is not installed."""


@dataclass(frozen=True, slots=True)
class _Need:
    name: str
    distributions: tuple[str, ...]
    purpose: str
    missing: Verdict
    cure: str


_NEEDS = (
    _Need("torch", ("torch",), "everything: it comes with vLLM", Verdict.PROBLEM, "install vLLM, see below"),
    _Need(
        "vllm",
        DISTRIBUTIONS,
        "everything: the connector runs inside it",
        Verdict.PROBLEM,
        "pip install 'stateferry[cpu]' or 'stateferry[cuda]', or `make setup` in StateFerry's source",
    ),
    _Need(
        "nixl",
        ("nixl",),
        "transport nixl: the default for CUDA caches, and between machines",
        Verdict.WARNING,
        "pip install nixl, unless all engines are CPU engines of one host",
    ),
    _Need(
        "vllm-router",
        ("vllm-router",),
        "`stateferry demo`; any router that speaks kv_transfer_params serves",
        Verdict.OK,
        "",
    ),
    _Need(
        "mooncake",
        ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"),
        "transport mooncake, CPU caches over TCP; only where it is asked for",
        Verdict.OK,
        "",
    ),
    _Need("mori", ("amd-mori",), "transport mori: the default for caches on AMD GPUs", Verdict.OK, ""),
)


def installed(distribution: str) -> str | None:
    """Its version; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def examine_packages(find: FindVersion = installed) -> list[Finding]:
    """Python and the libraries."""
    return [_python(), *(_package(need, find) for need in _NEEDS)]


def _python() -> Finding:
    found = platform.python_version()
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return ok("python", found)
    wanted = " to ".join(".".join(map(str, v)) for v in (OLDEST, NEWEST))
    return problem("python", found, f"use Python {wanted}")


def _package(need: _Need, find: FindVersion) -> Finding:
    versions = [(name, number) for name in need.distributions if (number := find(name)) is not None]
    if not versions:
        return Finding(need.name, need.missing, f"not installed, needed for {need.purpose}", need.cure)
    name, number = versions[0]
    found = number if name == need.name else f"{number} ({name})"
    if need.name == "vllm" and not is_tested(number):
        return warning(
            need.name,
            f"{found}: never tested with this StateFerry",
            f"install {' or '.join(TESTED)}, or run `stateferry gate` before you rely on it",
        )
    return ok(need.name, found)
