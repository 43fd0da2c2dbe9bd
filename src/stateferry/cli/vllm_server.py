"""vLLM's server, whose imports can be interrupted: `python -m stateferry.cli.vllm_server` is
`python -m vllm.entrypoints.openai.api_server`, but for what Ctrl-C does in its first seconds.

Once it is imported, Ctrl-C is vLLM's again: there are processes then that it must end.
"""

import importlib
import runpy
import sys

from stateferry.cli.interrupts import ends_on_interrupt

MODULE = "stateferry.cli.vllm_server"
SERVER = "vllm.entrypoints.openai.api_server"


def main() -> None:
    """Become vLLM's server, with this process's arguments."""
    with ends_on_interrupt():
        importlib.import_module(SERVER)
    # It is to run as a program, and runpy warns of a program that somebody has imported before. What took
    # the time, everything that it imports in turn, stays.
    del sys.modules[SERVER]
    # With its own name in the place of ours, because vLLM's child processes look there what to import.
    runpy.run_module(SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
