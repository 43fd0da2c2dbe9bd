"""What is refused at the start although each part is known: refusals name the setting and the way out."""

from collections.abc import Sequence
from typing import Any

from stateferry.errors import LayoutError
from stateferry.layout.spec import Group, GroupKind

LAYERLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways to speculate that bring no layers of their own: all that they add to a cache is scratch slots."""
PROVEN_DRAFTERS = frozenset({"Qwen3NextMTP"})
"""Draft models of method `mtp` whose layers have been handed off beside a recurrent state and compared with
one engine (`stateferry gate --speculate mtp`). Their attention lies in a group with the model's own."""


def refuse_together(groups: Sequence[Group], config: Any) -> None:
    """Raise LayoutError for a model and settings (vLLM's) that are not shown to be right together."""
    if not any(group.transfers for group in groups):
        raise LayoutError(
            "no KV-cache group of this model takes part in KV transfer: there is nothing to hand off. "
            "Start it without --kv-transfer-config"
        )
    speculative = config.speculative_config
    recurrent = any(group.kind is GroupKind.STATE and group.transfers for group in groups)
    if recurrent and speculative is not None and not drafts_are_proven(speculative):
        raise LayoutError(
            f"--speculative-config has method {speculative.method!r} with layers of "
            f"{_drafter(speculative) or 'its own'}: of draft layers beside a recurrent state only those of "
            f"{', '.join(sorted(PROVEN_DRAFTERS))} were shown to be handed off rightly. Choose a method "
            f"without layers ({', '.join(sorted(LAYERLESS_DRAFTS))}), or leave --speculative-config out, on "
            "both engines"
        )


def drafts_are_proven(speculative: Any) -> bool:
    """Whether hand-offs beside a recurrent state are known to be right when both engines (vLLM's
    SpeculativeConfig) draft like this."""
    if speculative.method in LAYERLESS_DRAFTS:
        return True
    return speculative.method == "mtp" and _drafter(speculative) in PROVEN_DRAFTERS


def _drafter(speculative: Any) -> str:
    """The architecture that drafts; empty where none is known."""
    model = getattr(speculative, "draft_model_config", None)
    return str(getattr(model, "architecture", "")) if model is not None else ""
