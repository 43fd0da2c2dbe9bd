"""Bringing vLLM in for commands that only want to know: quietly, and only when they run."""

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType

from stateferry.cli.interrupts import ends_on_interrupt
from stateferry.errors import EngineError


def need_vllm() -> None:
    """Raise EngineError where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed in this Python environment. With StateFerry's source: `make setup`; "
            "otherwise pip install 'stateferry[cpu]' or 'stateferry[cuda]'."
        )


@contextmanager
def offline_vllm() -> Iterator[ModuleType]:
    """The module `stateferry.vllm.offline`. Whatever vLLM prints goes to stderr, and that is only defects.

    An operator's own VLLM_LOGGING_LEVEL stays. Raises EngineError where vLLM is not installed.
    """
    need_vllm()
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        os.environ["VLLM_LOGGING_LEVEL"] = "CRITICAL"
        logging.getLogger("vllm").setLevel(logging.CRITICAL)  # what it says before it reads the variable
    for variable in ("VLLM_NO_USAGE_STATS", "HF_HUB_OFFLINE"):
        os.environ.setdefault(variable, "1")
    with redirect_stdout(sys.stderr):
        with ends_on_interrupt():
            from stateferry.vllm import offline
        yield offline
