"""The caches of Kimi-Linear and Kimi-K3 as vLLM 0.32 shapes, groups and pads them, without a model.

Sizes are those of the published configs; block sizes follow vLLM's rule that an attention page must be at
least as large as a state page, in steps of 128 tokens for latents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stateferry.layout.spec import GroupKind
from stateferry.testing.packed import Layers, Packed, page_bytes
from stateferry.testing.unsharded import Recurrent, gated_delta, latent_attention

LATENT = 512 + 64
"""Numbers in one token's latent: kv_lora_rank + qk_rope_head_dim."""
STEP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Kimi:
    """One model. A KDA head is 128 x 128 in float32; everything else is bfloat16."""

    name: str
    recurrent_layers: int
    latent_layers: int
    heads: int

    def layer(self, conv_dim_first: bool = False) -> Recurrent:
        """One KDA layer: a convolution over Q|K|V that keeps 3 inputs, and a matrix a head."""
        return gated_delta(self.heads, self.heads, 128, 128, 3, conv_dim_first, (2, 4))

    def page_tokens(self, sizes: Sequence[int]) -> int:
        """Tokens in one rank's attention page when engines of all these sizes must agree on it."""
        state = max(page_bytes(self.layer(), 0, size) for size in sizes)
        return STEP_TOKENS * -(-state // (STEP_TOKENS * LATENT * 2))

    def packed(self, sizes: Sequence[int], dcp_ranks: int = 1, conv_dim_first: bool = False) -> Packed:
        """The groups: recurrent layers in as many as keep a group no larger than the latent one."""
        tokens = self.page_tokens(sizes)
        count = -(-self.recurrent_layers // self.latent_layers)
        state = self.layer(conv_dim_first)
        groups = [
            Layers((state,) * len(range(number, self.recurrent_layers, count)), block_tokens=tokens)
            for number in range(count)
        ]
        latents = (latent_attention(tokens, LATENT, 2),) * self.latent_layers
        attention = Layers(latents, GroupKind.ATTENTION, tokens * dcp_ranks)
        return Packed((*groups, attention), conv_dim_first, dcp_ranks)


KIMI_LINEAR = Kimi("Kimi-Linear", recurrent_layers=20, latent_layers=7, heads=32)
KIMI_K3 = Kimi("Kimi-K3", recurrent_layers=69, latent_layers=24, heads=96)
