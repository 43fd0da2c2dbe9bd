"""What Ctrl-C does to a command while it imports, and to one that starts other processes."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EXIT_INTERRUPTED = 130


@contextmanager
def ends_on_interrupt() -> Iterator[None]:
    """Inside, Ctrl-C ends the process at once with `EXIT_INTERRUPTED` and without a word. Main thread only.
    For imports: seconds in which nothing runs yet that would have to be stopped.

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


def hear_interrupts(end_at_once: Callable[[], None], tell: Callable[[], None]) -> None:
    """From here on Ctrl-C is heard by this process and by none that it starts. While an event loop hears
    SIGTERM it is SIGTERM, after `tell`; before, `end_at_once` is called, and right after it this process ends
    with `EXIT_INTERRUPTED`. Both are called in another thread.

    A terminal sends Ctrl-C to every process of a command at once: those that are still being started die of
    it, each with a traceback, before the first one can end them in order. A signal that is blocked stays
    blocked in every process that is started, whatever that one does about signals. For the whole life of the
    process; main thread, before there are others. Where somebody hears or ignores the signal already, that
    stays.
    """
    here = threading.get_ident()
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def listen() -> None:
        # All others are for the thread in which Python runs handlers: Linux gives one that is sent to the
        # process to any thread that lets it through, and a main thread that waits inside a library sleeps on.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        while True:
            signal.sigwait({signal.SIGINT})
            if not _loop_hears(signal.SIGTERM):
                end_at_once()
                os._exit(EXIT_INTERRUPTED)
            tell()
            signal.pthread_kill(here, signal.SIGTERM)

    block_interrupts()
    threading.Thread(target=listen, name="stateferry interrupts", daemon=True).start()


def block_interrupts() -> None:
    """In this thread, and in threads and processes that it starts from here on; not where somebody hears or
    ignores them already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})


def _loop_hears(number: int) -> bool:
    """Whether an event loop was told to handle a signal: a server does that when it is up."""
    module = getattr(signal.getsignal(number), "__module__", None) or ""
    return module.startswith(("uvloop.", "asyncio."))
