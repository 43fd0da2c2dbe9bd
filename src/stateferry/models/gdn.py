"""Qwen3-Next: gated delta rule layers (convolution window and delta matrix), then full attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .tensors import Init, TensorSpec, constant, normal, output_head

ARCHITECTURE = "Qwen3NextForCausalLM"


def gdn_config(
    *, vocab_size: int, eos_token_id: int, pad_token_id: int, hidden_size: int = 128, experts: int = 4
) -> dict[str, Any]:
    """Three recurrent layers and one attention layer.

    The linear head size is 128 because vLLM's CPU kernel takes no other. Two heads of 256 keep an
    attention token at 2 KiB, so that vLLM's blocks (an attention page must be no smaller than a
    state) stay near 100 tokens. The last layer has experts, the others a plain MLP.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1, 2],
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "moe_intermediate_size": hidden_size,
        "shared_expert_intermediate_size": hidden_size,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "use_cache": True,
    }


def gdn_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Every tensor of the checkpoint. Norm weights are stored as `w - 1`, but for the gated norm."""
    hidden = config["hidden_size"]
    vocab = config["vocab_size"]
    yield normal("model.embed_tokens.weight", vocab, hidden)
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.input_layernorm.weight", hidden, value=0.0)
        yield constant(f"{layer}.post_attention_layernorm.weight", hidden, value=0.0)
        if kind == "linear_attention":
            yield from _delta_tensors(f"{layer}.linear_attn", config)
        else:
            yield from _attention_tensors(f"{layer}.self_attn", config)
        if index in config["mlp_only_layers"]:
            yield from mlp_tensors(f"{layer}.mlp", hidden, config["intermediate_size"])
        else:
            yield from _expert_tensors(f"{layer}.mlp", config)
    yield constant("model.norm.weight", hidden, value=0.0)
    yield output_head("lm_head.weight", config)


def mlp_tensors(prefix: str, hidden: int, inner: int) -> Iterator[TensorSpec]:
    yield normal(f"{prefix}.gate_proj.weight", inner, hidden)
    yield normal(f"{prefix}.up_proj.weight", inner, hidden)
    yield normal(f"{prefix}.down_proj.weight", hidden, inner)


def _delta_tensors(prefix: str, config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Rates are small: half of the state is left after some 50 to 1,500 tokens."""
    hidden = config["hidden_size"]
    value_heads = config["linear_num_value_heads"]
    key_size = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value_size = value_heads * config["linear_value_head_dim"]
    yield normal(f"{prefix}.in_proj_qkvz.weight", 2 * key_size + 2 * value_size, hidden)
    yield normal(f"{prefix}.in_proj_ba.weight", 2 * value_heads, hidden)
    yield normal(
        f"{prefix}.conv1d.weight",
        2 * key_size + value_size,
        1,
        config["linear_conv_kernel_dim"],
        std=0.5,
    )
    yield TensorSpec(f"{prefix}.A_log", (value_heads,), Init.LOG_DECAY, 0.01)
    yield constant(f"{prefix}.dt_bias", value_heads, value=1.0)
    yield constant(f"{prefix}.norm.weight", config["linear_value_head_dim"], value=1.0)
    yield normal(f"{prefix}.out_proj.weight", hidden, value_size)


def _attention_tensors(prefix: str, config: dict[str, Any]) -> Iterator[TensorSpec]:
    """`q_proj` holds query and output gate, head by head.

    The query norm is large enough that a few tokens get most of the attention.
    """
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield normal(f"{prefix}.q_proj.weight", 2 * heads * head, hidden)
    yield normal(f"{prefix}.k_proj.weight", kv_heads * head, hidden)
    yield normal(f"{prefix}.v_proj.weight", kv_heads * head, hidden, std=0.5 * hidden**-0.5)
    yield normal(f"{prefix}.o_proj.weight", hidden, heads * head)
    yield constant(f"{prefix}.q_norm.weight", head, value=1.0)
    yield constant(f"{prefix}.k_norm.weight", head, value=0.0)


def _expert_tensors(prefix: str, config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield normal(f"{prefix}.gate.weight", config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from mlp_tensors(f"{prefix}.experts.{expert}", hidden, inner)
    yield from mlp_tensors(f"{prefix}.shared_expert", hidden, config["shared_expert_intermediate_size"])
    yield normal(f"{prefix}.shared_expert_gate.weight", 1, hidden)
