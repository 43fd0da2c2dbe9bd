"""The two families with Mamba 2: Granite 4 hybrid (its own layers) and Falcon-H1 (in every layer)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .gdn import mlp_tensors
from .tensors import Init, TensorSpec, constant, normal, output_head


def granite_config(*, vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Three Mamba 2 layers and one attention layer, without experts."""
    hidden = 256
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "shared_intermediate_size": hidden,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "position_embedding_type": "rope",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_multiplier": (hidden // 2) ** -0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "mamba_expand": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 32,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "use_cache": True,
    }


def granite_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, inner = config["hidden_size"], config["shared_intermediate_size"]
    head = hidden // config["num_attention_heads"]
    yield normal("model.embed_tokens.weight", config["vocab_size"], hidden)
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, value=1.0)
        yield constant(f"{layer}.post_attention_layernorm.weight", hidden, value=1.0)
        if kind == "linear_attention":
            d_inner = config["mamba_expand"] * hidden
            yield from _mixer_tensors(f"{layer}.mamba", config, d_inner)
            yield constant(f"{layer}.mamba.norm.weight", d_inner, value=1.0)
        else:
            yield from attention_tensors(f"{layer}.self_attn", config, head, out="o_proj")
        yield normal(f"{layer}.shared_mlp.input_linear.weight", 2 * inner, hidden)
        yield normal(f"{layer}.shared_mlp.output_linear.weight", hidden, inner)
    yield constant("model.norm.weight", hidden, value=1.0)
    yield output_head("lm_head.weight", config)


def falcon_config(*, vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Three layers, each with attention and Mamba 2 side by side; all multipliers are one."""
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "projectors_bias": False,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "mamba_d_ssm": 256,
        "mamba_expand": 2,
        "mamba_n_heads": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 64,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_chunk_size": 256,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
        "mamba_norm_before_gate": True,
        "mamba_rms_norm": False,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "key_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "mlp_multipliers": [1.0, 1.0],
        "use_cache": True,
    }


def falcon_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield normal("model.embed_tokens.weight", config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, value=1.0)
        yield constant(f"{layer}.pre_ff_layernorm.weight", hidden, value=1.0)
        yield from _mixer_tensors(f"{layer}.mamba", config, config["mamba_d_ssm"])
        yield from attention_tensors(f"{layer}.self_attn", config, config["head_dim"], out="o_proj")
        yield from mlp_tensors(f"{layer}.feed_forward", hidden, config["intermediate_size"])
    yield constant("model.final_layernorm.weight", hidden, value=1.0)
    yield output_head("lm_head.weight", config)


def attention_tensors(prefix: str, config: dict[str, Any], head: int, *, out: str) -> Iterator[TensorSpec]:
    """Queries and keys are large enough that a few tokens get most of the attention.

    A mean over hundreds of tokens would hardly show whether their keys and values are there.
    """
    hidden = config["hidden_size"]
    size, kv_size = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    unit = hidden**-0.5
    yield normal(f"{prefix}.q_proj.weight", size, hidden, std=2 * unit)
    yield normal(f"{prefix}.k_proj.weight", kv_size, hidden, std=2 * unit)
    yield normal(f"{prefix}.v_proj.weight", kv_size, hidden, std=unit)
    yield normal(f"{prefix}.{out}.weight", hidden, size)


def _mixer_tensors(prefix: str, config: dict[str, Any], inner: int) -> Iterator[TensorSpec]:
    """Rows of `in_proj`: gate, x, B, C, step. What bypasses the state (`D`) is kept small."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    channels = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield normal(f"{prefix}.in_proj.weight", inner + channels + heads, hidden, std=hidden**-0.5)
    yield normal(f"{prefix}.conv1d.weight", channels, 1, config["mamba_d_conv"], std=0.5)
    yield normal(f"{prefix}.conv1d.bias", channels)
    yield TensorSpec(f"{prefix}.A_log", (heads,), Init.LOG_DECAY, 1.0)
    yield TensorSpec(f"{prefix}.dt_bias", (heads,), Init.STEP_BIAS, 0.05)
    yield constant(f"{prefix}.D", heads, value=0.1)
    yield normal(f"{prefix}.out_proj.weight", hidden, inner)
