"""Ways to lose a part of a prompt's memory, and what each does to the recall model's answers.

The prompt's first N-1 tokens are computed, a part of what they left behind is zeroed, and the last
token is computed on what remains: just what a decode engine does with a hand-off that lost a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch

from .prompts import RecallPrompt
from .torch_gdn import Memory
from .torch_model import TinyQwen3Next

Damage = Callable[[Memory], Memory]

_STATE = ("conv", "delta")
_KV = ("keys", "values")


def zero(*fields: str, layer: int | None = None) -> Damage:
    """Zero these fields of every layer, or of one."""

    def apply(memory: Memory) -> Memory:
        return tuple(
            part.zeroed(*fields) if layer in (None, index) else part for index, part in enumerate(memory)
        )

    return apply


DAMAGES: Mapping[str, Damage] = MappingProxyType(
    {
        "clean": zero(),
        "state": zero(*_STATE),
        "conv": zero("conv"),
        "delta": zero("delta"),
        "layer 0 state": zero(*_STATE, layer=0),
        "layer 1 state": zero(*_STATE, layer=1),
        "layer 2 state": zero(*_STATE, layer=2),
        "kv": zero(*_KV),
    }
)


def damaged_logits(model: TinyQwen3Next, token_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits of the next token, `[batch, vocabulary]`, for each way of `DAMAGES`."""
    out = {}
    with torch.no_grad():
        _, memory = model(token_ids[:, :-1])
        for name, damage in DAMAGES.items():
            hidden, _ = model(token_ids[:, -1:], damage(memory))
            out[name] = model.logits(hidden[:, -1])
    return out


def accuracies(
    model: TinyQwen3Next, batches: Iterable[list[RecallPrompt]], device: str = "cpu"
) -> dict[str, float]:
    """Share of right answers for each way of `DAMAGES`. Prompts of one batch have one length."""
    right = dict.fromkeys(DAMAGES, 0)
    asked = 0
    for batch in batches:
        ids = torch.tensor([prompt.token_ids for prompt in batch], device=device)
        answers = torch.tensor([prompt.answer_id for prompt in batch], device=device)
        asked += len(batch)
        for name, logits in damaged_logits(model, ids).items():
            right[name] += int((logits.argmax(-1) == answers).sum())
    return {name: count / asked for name, count in right.items()}
