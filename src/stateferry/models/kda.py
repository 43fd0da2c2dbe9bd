"""Kimi-Linear: KDA layers (convolution window and delta matrix), then latent attention without rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .gdn import mlp_tensors
from .tensors import Init, TensorSpec, constant, normal, output_head


def kda_config(*, vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Three KDA layers and one of latent attention, without experts: those keep nothing.

    Head and latent sizes are those of Kimi-Linear-48B, because vLLM's kernels are made for them. Layers are
    counted from one.
    """
    hidden, heads = 256, 4
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "hidden_size": hidden,
        "head_dim": 128,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_nextn_predict_layers": 0,
        "max_position_embeddings": 32768,
        "linear_attn_config": {
            "full_attn_layers": [4],
            "kda_layers": [1, 2, 3],
            "head_dim": 128,
            "num_heads": heads,
            "short_conv_kernel_size": 4,
        },
    }


def kda_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint, by the names of the published ones."""
    hidden = config["hidden_size"]
    yield normal("model.embed_tokens.weight", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, value=1.0)
        yield constant(f"{layer}.post_attention_layernorm.weight", hidden, value=1.0)
        if index + 1 in config["linear_attn_config"]["kda_layers"]:
            yield from _delta_tensors(f"{layer}.self_attn", hidden, config["linear_attn_config"])
        else:
            yield from _latent_tensors(f"{layer}.self_attn", config)
        yield from mlp_tensors(f"{layer}.mlp", hidden, config["intermediate_size"])
    yield constant("model.norm.weight", hidden, value=1.0)
    yield output_head("lm_head.weight", config)


def _delta_tensors(prefix: str, hidden: int, layer: dict[str, Any]) -> Iterator[TensorSpec]:
    """Decay is low rank (`f_a`, `f_b`), and so is the output gate (`g_a`, `g_b`). Rates are small, as in
    `gdn`."""
    heads, head = layer["num_heads"], layer["head_dim"]
    size = heads * head
    for name in "qkv":
        yield normal(f"{prefix}.{name}_proj.weight", size, hidden, std=hidden**-0.5)
        yield normal(f"{prefix}.{name}_conv1d.weight", size, 1, layer["short_conv_kernel_size"], std=0.5)
    yield normal(f"{prefix}.b_proj.weight", heads, hidden)
    for name in "fg":
        yield normal(f"{prefix}.{name}_a_proj.weight", head, hidden)
        yield normal(f"{prefix}.{name}_b_proj.weight", size, head)
    yield TensorSpec(f"{prefix}.A_log", (heads,), Init.LOG_DECAY, 0.01)
    yield constant(f"{prefix}.dt_bias", size, value=1.0)
    yield constant(f"{prefix}.o_norm.weight", head, value=1.0)
    yield normal(f"{prefix}.o_proj.weight", hidden, size)


def _latent_tensors(prefix: str, config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Queries are large enough that a few tokens get most of the attention, and what is read weighs enough
    to be seen behind the recurrent layers."""
    hidden, heads, latent = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    flat, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    unit = hidden**-0.5
    yield normal(f"{prefix}.q_proj.weight", heads * (flat + turned), hidden, std=2 * unit)
    yield normal(f"{prefix}.kv_a_proj_with_mqa.weight", latent + turned, hidden, std=2 * unit)
    yield constant(f"{prefix}.kv_a_layernorm.weight", latent, value=1.0)
    yield normal(
        f"{prefix}.kv_b_proj.weight", heads * (flat + config["v_head_dim"]), latent, std=latent**-0.5
    )
    yield normal(f"{prefix}.o_proj.weight", hidden, heads * config["v_head_dim"], std=0.04)
