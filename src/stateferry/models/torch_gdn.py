"""The tiny Qwen3-Next in plain PyTorch: trains the recall model, and is the oracle of its states.

Parameter names are those of the checkpoint (vLLM and transformers read the same file). The memory
between two calls is explicit, so that a test can damage one part of it and look at the answer.
"""

# torch is untyped to mypy here, so its Module is, too.
# mypy: disallow-subclassing-any=False

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CHUNK = 64
FORGET = -30.0  # a decay that leaves nothing


@dataclass(frozen=True)
class LayerMemory:
    """What one layer keeps: a recurrent layer the first two, an attention layer the last two.

    conv `[batch, channels, window - 1]`, delta `[batch, heads, K, V]`, keys and values
    `[batch, heads, tokens, head]`.
    """

    conv: Tensor | None = None
    delta: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None

    def zeroed(self, *fields: str) -> LayerMemory:
        present = {name: getattr(self, name) for name in fields}
        return replace(self, **{n: torch.zeros_like(t) for n, t in present.items() if t is not None})


Memory = tuple[LayerMemory, ...]


class Norm(nn.Module):
    """RMS norm with weight stored as `w - 1`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float() + 1.0, self.eps).to(x.dtype)


class GatedNorm(nn.Module):
    """RMS norm over the last axis, then times `silu(gate)`; weight stored as it is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(gate.dtype)


def linear(inner: int, outer: int) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False)


class DeltaLayer(nn.Module):
    """Gated delta rule with a short causal convolution before it."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.key_heads = config["linear_num_key_heads"]
        self.value_heads = config["linear_num_value_heads"]
        self.key_dim = config["linear_key_head_dim"]
        self.value_dim = config["linear_value_head_dim"]
        self.window = config["linear_conv_kernel_dim"]
        hidden = config["hidden_size"]
        key_size, value_size = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        self.sizes = (key_size, key_size, value_size)
        channels = sum(self.sizes)
        self.in_proj_qkvz = linear(hidden, channels + value_size)
        self.in_proj_ba = linear(hidden, 2 * self.value_heads)
        self.conv1d = nn.Conv1d(channels, channels, self.window, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.zeros(self.value_heads))
        self.dt_bias = nn.Parameter(torch.ones(self.value_heads))
        self.norm = GatedNorm(self.value_dim, config["rms_norm_eps"])
        self.out_proj = linear(value_size, hidden)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows of both projections are grouped by key head: q, k, values, gates; then b, a."""
        batch, length, _ = x.shape
        per_key = self.value_heads // self.key_heads
        shape = (batch, length, self.key_heads, -1)
        split = [self.key_dim, self.key_dim, per_key * self.value_dim, per_key * self.value_dim]
        q, k, v, z = self.in_proj_qkvz(x).view(shape).split(split, dim=-1)
        b, a = self.in_proj_ba(x).view(shape).split([per_key, per_key], dim=-1)
        mixed = torch.cat([part.reshape(batch, length, -1) for part in (q, k, v)], dim=-1)
        gate = z.reshape(batch, length, self.value_heads, self.value_dim)
        return mixed.transpose(1, 2), gate, b.reshape(batch, length, -1), a.reshape(batch, length, -1)

    def forward(self, x: Tensor, memory: LayerMemory, forget: Tensor | None) -> tuple[Tensor, LayerMemory]:
        batch, length, _ = x.shape
        mixed, gate, b, a = self._project(x)
        past = memory.conv
        if past is None:
            past = mixed.new_zeros(batch, mixed.shape[1], self.window - 1)
        seen = torch.cat([past.to(mixed.dtype), mixed], dim=-1)
        conv = F.silu(F.conv1d(seen, self.conv1d.weight.to(seen.dtype), groups=seen.shape[1]))
        q, k, v = conv.transpose(1, 2).split(self.sizes, dim=-1)
        repeat = self.value_heads // self.key_heads
        q, k = (
            F.normalize(part.float().view(batch, length, self.key_heads, self.key_dim), dim=-1)
            .repeat_interleave(repeat, dim=2)
            .transpose(1, 2)
            for part in (q, k)
        )
        v = v.float().view(batch, length, self.value_heads, self.value_dim).transpose(1, 2)
        beta = b.float().sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias.float())
        if forget is not None:
            decay = decay.masked_fill(forget[..., None], FORGET)
        q, decay, beta = q * self.key_dim**-0.5, decay.transpose(1, 2), beta.transpose(1, 2)
        with torch.autocast(x.device.type, enabled=False):  # the state wants more than bfloat16
            out, delta = delta_rule(q, k, v, decay, beta, memory.delta)
        merged = self.norm(out.transpose(1, 2), gate).reshape(batch, length, -1)
        return self.out_proj(merged), LayerMemory(conv=seen[..., length:], delta=delta)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`S = S * exp(decay); S += k (beta (v - k S))^T; out = q S`, a chunk of tokens at a time.

    q, k `[batch, heads, tokens, K]`, v `[batch, heads, tokens, V]`, decay (at most 0) and beta
    `[batch, heads, tokens]`. Within a chunk the writes depend on one another through a
    unit-triangular system, solved at once.
    """
    batch, heads, length, key_dim = k.shape
    chunk = min(CHUNK, length)
    pad = -length % chunk
    if pad:
        q, k, v = (F.pad(part, (0, 0, 0, pad)) for part in (q, k, v))
        decay, beta = (F.pad(part, (0, pad)) for part in (decay, beta))
    count = (length + pad) // chunk
    q, k, v = (part.reshape(batch, heads, count, chunk, -1) for part in (q, k, v))
    decay, beta = (part.reshape(batch, heads, count, chunk) for part in (decay, beta))
    total = decay.cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    scaled = k * beta[..., None]
    system = ((scaled @ k.transpose(-1, -2)) * gap).tril(-1)
    sides = torch.cat([v * beta[..., None], scaled * total[..., None].exp()], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    fresh, erase = solved.split([v.shape[-1], key_dim], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * gap
    q = q * total[..., None].exp()
    k = k * (total[..., -1:] - total)[..., None].exp()
    keep = total[..., -1].exp()[..., None, None]
    if state is None:
        state = k.new_zeros(batch, heads, key_dim, v.shape[-1])
    outs = []
    for index in range(count):
        written = fresh[:, :, index] - erase[:, :, index] @ state
        outs.append(q[:, :, index] @ state + inside[:, :, index] @ written)
        state = state * keep[:, :, index] + k[:, :, index].transpose(-1, -2) @ written
    return torch.cat(outs, dim=2)[:, :, :length], state


class AttentionLayer(nn.Module):
    """Causal attention with an output gate, normed queries and keys, and partial rotation."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.head = config["head_dim"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.q_proj = linear(hidden, 2 * self.heads * self.head)
        self.k_proj = linear(hidden, self.kv_heads * self.head)
        self.v_proj = linear(hidden, self.kv_heads * self.head)
        self.o_proj = linear(self.heads * self.head, hidden)
        self.q_norm = Norm(self.head, eps)
        self.k_norm = Norm(self.head, eps)
        rope = config["rope_parameters"]
        self.rotary = int(self.head * rope["partial_rotary_factor"])
        self.theta = float(rope["rope_theta"])

    def forward(self, x: Tensor, memory: LayerMemory) -> tuple[Tensor, LayerMemory]:
        batch, length, _ = x.shape
        past = 0 if memory.keys is None else memory.keys.shape[2]
        q, gate = self.q_proj(x).view(batch, length, self.heads, 2 * self.head).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.kv_heads, self.head))
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head).transpose(1, 2)
        q = self._rotate(self.q_norm(q).transpose(1, 2), past)
        k = self._rotate(k.transpose(1, 2), past)
        if memory.keys is not None and memory.values is not None:
            k = torch.cat([memory.keys, k], dim=2)
            v = torch.cat([memory.values, v], dim=2)
        keys, values = k, v
        if self.heads != self.kv_heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        mask = None
        if past:
            mask = torch.ones(length, past + length, dtype=torch.bool, device=x.device).tril(past)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not past)
        out = out.transpose(1, 2) * gate.sigmoid()
        return self.o_proj(out.reshape(batch, length, -1)), LayerMemory(keys=keys, values=values)

    def _rotate(self, x: Tensor, offset: int) -> Tensor:
        half = self.rotary // 2
        steps = torch.arange(half, device=x.device, dtype=torch.float32) / half
        positions = torch.arange(offset, offset + x.shape[2], device=x.device)
        angle = positions[:, None] * self.theta**-steps
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        one, two, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, rest], dim=-1)
