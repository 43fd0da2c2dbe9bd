"""Which models are judged: the bundled one, random ones of every state kind, or a folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateferry.gate.damages import lacking
from stateferry.gate.prompts import PromptSource, model_config, random_source, recall_source
from stateferry.gate.sizes import Sizes, expected_sizes
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
    sizes: Sizes | None = None
    """Of its hand-offs, where they can be told."""


def bundled() -> Subject:
    """The trained model in this package."""
    from stateferry.models import RECALL_GDN

    config = model_config(RECALL_GDN)
    return _subject(RECALL_GDN.name, config, recall_source, lambda scratch: RECALL_GDN)


def seeded(family: str) -> Subject:
    """A random checkpoint of a family, made for this run."""
    config = random_config(family)
    return _subject(
        f"random-{family}",
        config,
        random_source(config),
        lambda scratch: write_random_checkpoint(family, scratch / family),
    )


def in_folder(folder: Path) -> Subject:
    """A checkpoint of the caller's; its prompts are random tokens. Raises ConfigError."""
    config = model_config(folder)
    return _subject(folder.name, config, random_source(config), lambda scratch: folder)


def _subject(
    name: str, config: Mapping[str, Any], source: PromptSource, write: Callable[[Path], Path]
) -> Subject:
    return Subject(name, source, lacking(str(config.get("model_type"))), write, expected_sizes(config))
