"""What a checkpoint is made of: named tensors with a shape and a rule for their first values."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Init(Enum):
    """How a random tensor gets its values. `scale` of the spec means what the comment says."""

    NORMAL = "normal"  # standard deviation
    CONSTANT = "constant"  # the value
    LOG_DECAY = "log_decay"  # log of a decay rate, log-uniform in [scale / 30, scale]
    STEP_BIAS = "step_bias"  # inverse softplus of a step, log-uniform in [scale / 30, scale]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as it lies in `model.safetensors`. `[out, in]` for projections."""

    name: str
    shape: tuple[int, ...]
    init: Init = Init.NORMAL
    scale: float = 0.02
    zero_rows: tuple[range, ...] = ()  # parts of the first axis that are zero


def normal(name: str, *shape: int, std: float = 0.02) -> TensorSpec:
    return TensorSpec(name, shape, Init.NORMAL, std)


def constant(name: str, *shape: int, value: float) -> TensorSpec:
    return TensorSpec(name, shape, Init.CONSTANT, value)


def output_head(name: str, config: dict[str, Any]) -> TensorSpec:
    """Wide enough that logits differ by about one; the end and padding tokens get a logit of zero."""
    shape = (config["vocab_size"], config["hidden_size"])
    return TensorSpec(name, shape, Init.NORMAL, shape[1] ** -0.5, (special_tokens(config),))


def special_tokens(config: dict[str, Any]) -> range:
    """The end and padding tokens, which come last."""
    return range(config["eos_token_id"], config["vocab_size"])


def materialise(spec: TensorSpec, seed: int) -> torch.Tensor:
    """Float32 values of a spec. They depend on the spec and the seed alone, not on the order of calls."""
    import torch

    digest = hashlib.sha256(f"{seed}:{spec.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    if spec.init is Init.CONSTANT:
        values = torch.full(spec.shape, spec.scale)
    elif spec.init is Init.NORMAL:
        values = torch.randn(spec.shape, generator=generator) * spec.scale
    else:
        exponent = torch.rand(spec.shape, generator=generator)
        values = spec.scale * torch.exp((exponent - 1.0) * math.log(30.0))
        if spec.init is Init.LOG_DECAY:
            values = values.log()
        else:
            values += torch.log(-torch.expm1(-values))
    for rows in spec.zero_rows:
        values[rows.start : rows.stop] = 0.0
    return values
