"""No exception leaves a vLLM hook because of a request, a peer or a message: it would end the engine."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


def guarded(
    default: Callable[[], Any],
) -> Callable[[Callable[Concatenate[S, P], R]], Callable[Concatenate[S, P], R]]:
    """Log whatever a hook raises and return `default()` instead: a value that claims nothing."""

    def decorate(hook: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
        @functools.wraps(hook)
        def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return hook(self, *args, **kwargs)
            except Exception:
                first = args[0] if args else None
                logger.exception(
                    "defect in %s, which does nothing this time: request=%s",
                    hook.__name__,
                    getattr(first, "request_id", "-"),
                )
                return default()  # type: ignore[no-any-return]

        return call  # type: ignore[return-value]  # wraps() keeps the names that Callable forgets

    return decorate
