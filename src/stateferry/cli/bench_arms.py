"""The engines of a bench, as somebody at a terminal sees them start and end."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

from stateferry.bench import Arm, ArmSpec, started_arms
from stateferry.cli.preflight import check_model
from stateferry.cli.starting import shown_progress
from stateferry.cli.stopping import said_while_stopping


@contextmanager
def running_arms(
    screen: Console,
    model: Path,
    specs: Sequence[ArmSpec],
    log_folder: Path | None,
    timeout_s: float,
    *,
    router: bool = False,
) -> Iterator[list[Arm]]:
    """Two engines per arm, shown while they start and while they are stopped. See `started_arms`.

    Raises ConfigError where there is no such model, before anything starts.
    """
    check_model(str(model), [])
    with said_while_stopping(screen) as watch, ExitStack() as started:
        with shown_progress(screen) as starting:
            arms = started.enter_context(
                started_arms(model, specs, log_folder, starting, watch, router=router, timeout_s=timeout_s)
            )
        yield arms
