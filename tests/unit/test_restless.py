"""The look at resting threads itself."""

import hashlib
import threading

from tests.unit.restless import restless_threads


def test_a_thread_that_waits_rests() -> None:
    done = threading.Event()
    waiting = threading.Thread(target=done.wait)
    waiting.start()
    try:
        assert restless_threads() == []
    finally:
        done.set()
        waiting.join()


def test_a_thread_that_computes_without_a_pause_is_noticed() -> None:
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():  # without the interpreter's lock, as a library's own thread would
            hashlib.pbkdf2_hmac("sha256", b"word", b"salt", 100_000)

    busy = threading.Thread(target=compute)
    busy.start()
    try:
        assert restless_threads() == [busy.native_id]
    finally:
        done.set()
        busy.join()
