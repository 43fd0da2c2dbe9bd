"""Tiny models to test and show hand-offs with: one trained, and random ones of every state kind."""

from __future__ import annotations

from pathlib import Path

from .prompts import Question, RecallPrompt, recall_prompt
from .random_checkpoint import CPU_FAMILIES, FAMILIES, write_random_checkpoint

RECALL_GDN = Path(__file__).parent / "recall_gdn"

__all__ = [
    "CPU_FAMILIES",
    "FAMILIES",
    "RECALL_GDN",
    "Question",
    "RecallPrompt",
    "recall_prompt",
    "write_random_checkpoint",
]
