"""Ways to lose a part of a prompt's memory, and what each does to the recall model's answers.

The prompt's first N-1 tokens are computed, a part of what they left behind is zeroed, and the last
token is computed on what remains: just what a decode engine does with a hand-off that lost a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TypedDict

import torch

from .prompts import Question, RecallPrompt, recall_prompt
from .torch_gdn import Memory
from .torch_model import TinyQwen3Next

Damage = Callable[[Memory], Memory]

LENGTHS = (20, 32, 64, 100, 160, 250, 400, 650, 900, 1200, 1290)
BATCH = 32
CLEAN_AT_LEAST = 0.99
STATE_LOST_AT_MOST = 0.20
KV_LOST_AT_MOST = 0.85

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


class Survey(TypedDict):
    accuracy: dict[str, float]
    by_length: dict[int, dict[str, float]]
    other_questions: dict[str, dict[str, float]]


def survey(model: TinyQwen3Next, device: str, per_length: int, lengths: tuple[int, ...] = LENGTHS) -> Survey:
    """Accuracy for each way of `DAMAGES`: over all lengths, by length, and for the simpler questions."""

    def asked(kind: Question, length: int) -> list[list[RecallPrompt]]:
        prompts = [recall_prompt(1_000_000 + number, length, kind) for number in range(per_length)]
        return [prompts[start : start + BATCH] for start in range(0, per_length, BATCH)]

    by_length = {n: accuracies(model, asked(Question.WHERE_PERSON, n), device) for n in lengths}
    return {
        "accuracy": {name: sum(row[name] for row in by_length.values()) / len(lengths) for name in DAMAGES},
        "by_length": by_length,
        "other_questions": {
            kind.name: accuracies(model, [b for n in lengths[1::3] for b in asked(kind, n)], device)
            for kind in (Question.WHAT_PERSON, Question.WHERE_THING)
        },
    }


def table(results: Survey) -> str:
    """A survey for people: a line for each way of losing memory."""
    lengths, others = results["by_length"], results["other_questions"]
    lines = [f"{'':15}{'all':>7}" + "".join(f"{n:>7}" for n in lengths) + "".join(f"{k:>13}" for k in others)]
    for name, overall in results["accuracy"].items():
        cells = "".join(f"{row[name]:7.3f}" for row in lengths.values())
        lines.append(
            f"{name:15}{overall:7.4f}{cells}" + "".join(f"{row[name]:13.3f}" for row in others.values())
        )
    return "\n".join(lines)


def refusals(accuracy: Mapping[str, float]) -> list[str]:
    """Why a model with these accuracies is no recall model; empty if it is one."""
    found = []
    if accuracy["clean"] < CLEAN_AT_LEAST:
        found.append(f"clean accuracy {accuracy['clean']:.4f} is below {CLEAN_AT_LEAST}")
    if accuracy["state"] > STATE_LOST_AT_MOST:
        found.append(f"accuracy without state {accuracy['state']:.4f} is above {STATE_LOST_AT_MOST}")
    if accuracy["kv"] > KV_LOST_AT_MOST:
        found.append(f"accuracy without attention KV {accuracy['kv']:.4f} is above {KV_LOST_AT_MOST}")
    return found
