"""How engines that run are right now, for `stateferry doctor`: from the pages that `stateferry top` reads."""

import time

from stateferry.cli.top_tables import at_present, listed, no_step
from stateferry.watch import Engines, Figures, Found

TIMEOUT_S = 5.0


def why_not_asked(url: str) -> str:
    """Why an engine would not answer a prompt: it has requests and takes no steps. Empty: it may answer."""
    for f in looked_at(url):
        if said := no_step(f):
            return (
                f"{url} has {f.running} requests running and {f.waiting} waiting, and {said}: it hangs, or "
                "one step takes so long. Its log may say where it is; the process is VLLM::EngineCore"
            )
    return ""


def amiss(url: str) -> str:
    """What is amiss with an engine now, in the words of `stateferry top`; empty: nothing that it tells. As of
    its last step: ask it something first."""
    return ", ".join(filter(None, (listed(at_present(f)) for f in looked_at(url))))


def looked_at(url: str) -> list[Figures]:
    """Figures of the engines behind a URL; none where it has no page of ours."""
    with Engines([Found(url.rstrip("/"))], TIMEOUT_S) as engines:
        figures, _ = engines.look(time.monotonic())
    return figures
