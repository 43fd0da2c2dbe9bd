"""The rest of the tiny Qwen3-Next in PyTorch: MLPs, experts, layers, and the model itself."""

# torch is untyped to mypy here, so its Module is, too.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .torch_gdn import AttentionLayer, DeltaLayer, LayerMemory, Memory, Norm, linear


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Experts(nn.Module):
    """Every expert is computed for every token, which is affordable at this size."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.top_k = config["num_experts_per_tok"]
        self.gate = linear(hidden, config["num_experts"])
        self.experts = nn.ModuleList(
            Mlp(hidden, config["moe_intermediate_size"]) for _ in range(config["num_experts"])
        )
        self.shared_expert = Mlp(hidden, config["shared_expert_intermediate_size"])
        self.shared_expert_gate = linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).float().softmax(-1)
        best, which = probabilities.topk(self.top_k, dim=-1)
        best = best / best.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, which, best).to(x.dtype)
        out: Tensor = self.shared_expert_gate(x).sigmoid() * self.shared_expert(x)
        for index, expert in enumerate(self.experts):
            out = out + weights[..., index, None] * expert(x)
        return out


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.recurrent = config["layer_types"][index] == "linear_attention"
        if self.recurrent:
            self.linear_attn = DeltaLayer(config)
        else:
            self.self_attn = AttentionLayer(config)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        plain = index in config["mlp_only_layers"]
        self.mlp = Mlp(hidden, config["intermediate_size"]) if plain else Experts(config)

    def forward(self, x: Tensor, memory: LayerMemory, forget: Tensor | None) -> tuple[Tensor, LayerMemory]:
        normed = self.input_layernorm(x)
        if self.recurrent:
            mixed, memory = self.linear_attn(normed, memory, forget)
        else:
            mixed, memory = self.self_attn(normed, memory)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), memory


class Backbone(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config["num_hidden_layers"]))
        self.norm = Norm(config["hidden_size"], config["rms_norm_eps"])


class TinyQwen3Next(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Backbone(config)
        self.lm_head = linear(config["hidden_size"], config["vocab_size"])

    def forward(
        self, token_ids: Tensor, memory: Memory | None = None, forget: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Hidden states `[batch, tokens, hidden]` before `lm_head`, and the memory afterwards.

        Where `forget` `[batch, tokens]` is true, the delta matrices are emptied before that token.
        """
        x = self.model.embed_tokens(token_ids)
        before = memory or (LayerMemory(),) * len(self.model.layers)
        after = []
        for layer, layer_memory in zip(self.model.layers, before, strict=True):
            x, new = layer(x, layer_memory, forget)
            after.append(new)
        return self.model.norm(x), tuple(after)

    def logits(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.lm_head(hidden)
        return out.float()
