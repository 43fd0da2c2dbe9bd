"""What is refused at the start although each part is known: refusals name the setting and the way out."""

from collections.abc import Sequence
from typing import Any

from stateferry.errors import LayoutError
from stateferry.layout.spec import Group, GroupKind

LAYERLESS_DRAFTS = frozenset({"ngram", "ngram_gpu", "suffix"})
"""Ways to speculate that bring no layers of their own: all that they add to a cache is scratch slots."""


def refuse_together(groups: Sequence[Group], config: Any) -> None:
    """Raise LayoutError for a model and settings (vLLM's) that are not shown to be right together."""
    if not any(group.transfers for group in groups):
        raise LayoutError(
            "no KV-cache group of this model takes part in KV transfer: there is nothing to hand off. "
            "Start it without --kv-transfer-config"
        )
    speculative = config.speculative_config
    recurrent = any(group.kind is GroupKind.STATE and group.transfers for group in groups)
    if recurrent and speculative is not None and speculative.method not in LAYERLESS_DRAFTS:
        raise LayoutError(
            f"--speculative-config has method {speculative.method!r}: its draft layers beside a recurrent "
            "state were never shown to be handed off rightly. Choose a method without layers "
            f"({', '.join(sorted(LAYERLESS_DRAFTS))}), or leave --speculative-config out, on both engines"
        )
