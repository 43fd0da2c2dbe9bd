"""What all tests share: the tier of a test follows from its folder."""

import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("hypothesis"):  # the environment of the site's tests has none
    from hypothesis import settings

    # On a crowded machine an example may take seconds that are not its own; tests have a time limit anyway.
    settings.register_profile("patient", deadline=None)
    settings.load_profile("patient")

collect_ignore = [] if importlib.util.find_spec("kubernetes_validate") else ["site"]
"""`make docs` runs the tests of that folder, in an environment of its own."""
ENGINE_TEST_TIMEOUT_S = 300


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Where tests run in the background, SIGINT is ignored and children would inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by the folder they lie in; engine tests get more time. Engines go last."""
    tests = Path(__file__).parent
    for item in items:
        tier = item.path.relative_to(tests).parts[0]
        if tier in ("scheduler", "engines"):
            item.add_marker(getattr(pytest.mark, tier))
        if tier == "engines" and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(ENGINE_TEST_TIMEOUT_S))
    order = {"unit": 0, "scheduler": 1, "engines": 2}
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).parts[0], 0))
