"""Ctrl-C while Python imports: seconds in which nothing runs yet that would have to be stopped."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130


@contextmanager
def ends_on_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once with `EXIT_INTERRUPTED` and without a word. Main thread only.

    An exception would do the same only where nobody is in its way: modules that are being imported catch it,
    or turn it into another, and what is left is a traceback through their code. Nothing that must be closed
    may be open inside. Where somebody hears or ignores the signal already, that stays.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
