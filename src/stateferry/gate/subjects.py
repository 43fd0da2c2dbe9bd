"""Which models are judged: the bundled one, random ones of every state kind, or a folder."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stateferry.gate.damages import lacking
from stateferry.gate.prompts import PromptSource, model_config, random_source, recall_source
from stateferry.models import write_random_checkpoint
from stateferry.models.random_checkpoint import random_config


@dataclass(frozen=True, slots=True)
class Subject:
    """One model under test."""

    name: str
    source: PromptSource
    lacking: frozenset[str]
    """Features that the model may lack, see `damages`."""
    write: Callable[[Path], Path]
    """Put the checkpoint into a folder, or say in which it is."""


def bundled() -> Subject:
    """The trained model in this package."""
    from stateferry.models import RECALL_GDN

    model_type = str(model_config(RECALL_GDN).get("model_type"))
    return Subject(RECALL_GDN.name, recall_source, lacking(model_type), lambda scratch: RECALL_GDN)


def seeded(family: str) -> Subject:
    """A random checkpoint of a family, made for this run."""
    config = random_config(family)
    return Subject(
        f"random-{family}",
        random_source(config),
        lacking(str(config.get("model_type"))),
        lambda scratch: write_random_checkpoint(family, scratch / family),
    )


def in_folder(folder: Path) -> Subject:
    """A checkpoint of the caller's; its prompts are random tokens. Raises ConfigError."""
    config = model_config(folder)
    model_type = str(config.get("model_type"))
    return Subject(folder.name, random_source(config), lacking(model_type), lambda scratch: folder)
