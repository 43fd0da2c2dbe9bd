"""Tiny models to test and show hand-offs with: one trained, and random ones of every state kind."""

from __future__ import annotations

from .random_checkpoint import FAMILIES, write_random_checkpoint

__all__ = ["FAMILIES", "write_random_checkpoint"]
