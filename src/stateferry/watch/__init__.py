"""Looking at engines that run, over the `/metrics` that they serve anyway. Needs neither torch nor vllm."""

from stateferry.watch.figures import Between, Figures, figures_of
from stateferry.watch.gather import Engines, Found, discover
from stateferry.watch.page import Example, Snapshot, read_page

__all__ = [
    "Between",
    "Engines",
    "Example",
    "Figures",
    "Found",
    "Snapshot",
    "discover",
    "figures_of",
    "read_page",
]
