"""The thread that runs hand-offs over a transport and the control sockets."""

from stateferry.ferry.ferry import Ferry
from stateferry.ferry.memory import LocalMemory
from stateferry.ferry.reading import Fence, Tamper, no_fence
from stateferry.ferry.setup import FerrySetup

__all__ = ["Fence", "Ferry", "FerrySetup", "LocalMemory", "Tamper", "no_fence"]
