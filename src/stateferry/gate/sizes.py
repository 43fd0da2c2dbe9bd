"""L1: how many bytes a hand-off must have, from a model's `config.json` alone.

Shares nothing with the connector, which knows the cache from vLLM's specs and tensors: a layer that it
never sees would be missing from every hand-off alike.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stateferry.gate.speculation import Speculation

BF16, FP32 = 2, 4
WIDTHS = (BF16, FP32)
"""A recurrent matrix may have either, by the engine's flags; windows and KV have the model's."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of one hand-off, all layers and ranks together."""

    state_bytes: frozenset[int]
    """Any of these, for every hand-off."""
    token_bytes: int
    """Attention KV of one token."""


def expected_sizes(config: Config, speculation: Speculation | None = None) -> Sizes | None:
    """What a hand-off of this model must have; None for a `model_type` that is not in the table.

    An engine that speculates keeps a token more in each window for every draft. A draft layer has attention.
    """
    rule = _STATES.get(str(config.get("model_type")))
    if rule is None:
        return None
    drafts = speculation.tokens if speculation is not None else 0
    recurrent, attention, (window, matrix) = rule(config, drafts)
    if speculation is not None and speculation.has_layers:
        attention += int(config.get("num_nextn_predict_layers", 0))
    return Sizes(
        state_bytes=frozenset(recurrent * (window * BF16 + matrix * width) for width in WIDTHS),
        token_bytes=attention * _numbers_of_a_token(config) * BF16,
    )


def _numbers_of_a_token(config: Config) -> int:
    """In one attention layer: keys and values of all heads, or one latent for all of them."""
    if config.get("kv_lora_rank"):
        return int(config["kv_lora_rank"] + config["qk_rope_head_dim"])
    heads = config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config.get("num_key_value_heads", heads) * head_size)


_State = tuple[int, int]
"""Numbers in a layer's convolution window and in its matrix."""


def _gated_delta(config: Config, drafts: int) -> tuple[int, int, _State]:
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    window = (2 * key + value) * (config["linear_conv_kernel_dim"] - 1 + drafts)
    kinds = config["layer_types"]
    state = window, value * config["linear_key_head_dim"]
    return kinds.count("linear_attention"), kinds.count("full_attention"), state


def _mamba2(config: Config, drafts: int) -> _State:
    inner = config["mamba_n_heads"] * config["mamba_d_head"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    return channels * (config["mamba_d_conv"] - 1 + drafts), inner * config["mamba_d_state"]


def _granite(config: Config, drafts: int) -> tuple[int, int, _State]:
    """Older checkpoints name their layers otherwise."""
    kinds = config.get("layer_types") or config["layers_block_type"]
    recurrent = sum(kind in ("linear_attention", "mamba") for kind in kinds)
    return recurrent, len(kinds) - recurrent, _mamba2(config, drafts)


def _falcon(config: Config, drafts: int) -> tuple[int, int, _State]:
    """Every layer has both."""
    return config["num_hidden_layers"], config["num_hidden_layers"], _mamba2(config, drafts)


def _short_convolution(config: Config, drafts: int) -> tuple[int, int, _State]:
    kinds = config["layer_types"]
    window = config["hidden_size"] * (config["conv_L_cache"] - 1 + drafts)
    return kinds.count("conv"), kinds.count("full_attention"), (window, 0)


def _kimi(config: Config, drafts: int) -> tuple[int, int, _State]:
    layers = config["linear_attn_config"]
    size = layers["num_heads"] * layers["head_dim"]
    state = 3 * size * (layers["short_conv_kernel_size"] - 1 + drafts), size * layers["head_dim"]
    return len(layers["kda_layers"]), len(layers["full_attn_layers"]), state


_STATES: Mapping[str, Callable[[Config, int], tuple[int, int, _State]]] = {
    "qwen3_next": _gated_delta,
    "granitemoehybrid": _granite,
    "falcon_h1": _falcon,
    "lfm2": _short_convolution,
    "kimi_linear": _kimi,
}
"""By `model_type`: from a config and drafts a step, recurrent layers, attention layers, and one recurrent
layer's state."""
