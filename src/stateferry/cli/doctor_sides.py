"""Two engines as `stateferry doctor` looks at them."""

from dataclasses import dataclass

from stateferry.layout.spec import CacheLayout
from stateferry.layout.survey import Survey
from stateferry.wire import RankAddress


@dataclass(frozen=True, slots=True)
class Side:
    """One of two engines: running, or only configured."""

    source: str
    """Its URL or its config file."""
    layouts: tuple[CacheLayout, ...]
    ranks: tuple[RankAddress, ...] = ()
    """Where it listens; empty for one that is not running."""
    kv_role: str = ""
    """What it does in a hand-off, as vLLM calls it; empty where it does not say."""
    query: str = ""
    """Where routers that send both legs at once ask it; empty: nowhere."""
    amiss: str = ""
    """What is wrong with it right now; empty: nothing, or it is not running."""
    unknown: str = ""
    """Why nothing is known of it: it does not answer, or would not start. Empty where something is."""


@dataclass(frozen=True, slots=True)
class Match:
    """Whether two engines can exchange, and what."""

    prefill: Side
    decode: Side
    survey: Survey | None
    """None: something of an engine is not known, or their caches do not fit."""
    misfit: str = ""
    """Why their caches do not fit; empty if they do."""
    wrong_roles: str = ""
    """Why their roles do not; empty if they do."""
    warning: str = ""
    """What may keep one from reaching the other."""
    untold: str = ""
    """Why routers that ask the prefill engine are not told where it listens; empty where nothing is amiss."""

    @property
    def sides(self) -> tuple[Side, Side]:
        """Both engines."""
        return self.prefill, self.decode

    @property
    def problems(self) -> list[str]:
        """Everything that keeps them from handing off."""
        found = (self.prefill.unknown, self.decode.unknown, self.wrong_roles, self.misfit)
        return list(dict.fromkeys(text for text in found if text))
