"""The `stateferry` command: what happens before and after a command of `app`. Light to import, so that Ctrl-C
is heard from the first moment on."""

import signal
import sys
from types import FrameType

from stateferry.cli.interrupts import EXIT_INTERRUPTED, ends_on_interrupt

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_ENGINE = 3


def main() -> None:
    """Run the command line; errors of ours become one message and an exit code."""
    with ends_on_interrupt():
        from stateferry.cli.app import app
        from stateferry.errors import ConfigError, EngineError, StateFerryError
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except ConfigError as e:
        _fail(e, EXIT_USAGE)
    except EngineError as e:
        _fail(e, EXIT_ENGINE)
    except StateFerryError as e:
        _fail(e, EXIT_FAILED)


def _fail(error: Exception, code: int) -> None:
    print("\n".join([f"stateferry: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
    raise SystemExit(code)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    """Leave through every `with` block, so that what we started is stopped."""
    raise SystemExit(128 + number)
