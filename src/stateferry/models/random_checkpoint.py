"""Seeded random checkpoints of ordinary weight size: small, quick to make, and sensitive to state.

vLLM's own dummy weights lie within 0.001 of zero; answers then do not depend on the recurrent
state at all, so nothing can be judged with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .gdn import gdn_config, gdn_tensors
from .kda import kda_config, kda_tensors
from .mamba2 import falcon_config, falcon_tensors, granite_config, granite_tensors
from .short_conv import lfm2_config, lfm2_tensors
from .tensors import TensorSpec, materialise
from .tokenizer import BYTE_EOS_ID, BYTE_PAD_ID, BYTE_VOCAB_SIZE, write_byte_tokenizer


@dataclass(frozen=True)
class Family:
    """One architecture: its configuration for a vocabulary, and its tensors for a configuration."""

    config: Callable[..., dict[str, Any]]
    tensors: Callable[[dict[str, Any]], Iterable[TensorSpec]]
    on_cpu: bool = True
    """Whether vLLM 0.32 has kernels for it on a CPU."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gdn": Family(gdn_config, gdn_tensors),
        "mamba2": Family(granite_config, granite_tensors),
        "falcon_h1": Family(falcon_config, falcon_tensors),
        "short_conv": Family(lfm2_config, lfm2_tensors),
        "kda": Family(kda_config, kda_tensors, on_cpu=False),
    }
)
CPU_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.on_cpu)


def random_config(family: str) -> dict[str, Any]:
    """The `config.json` of a family's random checkpoint."""
    if family not in FAMILIES:
        raise ValueError(f"unknown family {family!r}; known: {', '.join(FAMILIES)}")
    return FAMILIES[family].config(
        vocab_size=BYTE_VOCAB_SIZE, eos_token_id=BYTE_EOS_ID, pad_token_id=BYTE_PAD_ID
    )


def write_random_checkpoint(family: str, folder: Path, seed: int = 0) -> Path:
    """Write a checkpoint that depends on `family` and `seed` alone, and return `folder`.

    Weights are bfloat16 (vLLM's CPU kernel for the delta rule takes nothing else).
    """
    import torch
    from safetensors.torch import save_file

    config = random_config(family)
    tensors = {
        spec.name: materialise(spec, seed).to(torch.bfloat16) for spec in FAMILIES[family].tensors(config)
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": BYTE_EOS_ID, "pad_token_id": BYTE_PAD_ID, "do_sample": False},
    )
    write_byte_tokenizer(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    return folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
