"""LFM2: layers whose only state is a short convolution's window, then full attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .mamba2 import attention_tensors
from .tensors import Init, TensorSpec, constant, normal, special_tokens


def lfm2_config(*, vocab_size: int, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """Three convolution layers (window of three tokens, as LFM2 has) and one attention layer.

    With a window of four, vLLM 0.32 on an AVX512-BF16 processor packs the convolution's weights for
    another kernel and then stops at their shape.
    """
    hidden = 128
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "bos_token_id": None,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "block_dim": hidden,
        "block_ff_dim": 2 * hidden,
        "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 64,
        "conv_dim": hidden,
        "conv_bias": False,
        "conv_L_cache": 3,
        "num_hidden_layers": 4,
        "layer_types": ["conv"] * 3 + ["full_attention"],
        "max_position_embeddings": 32768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e30},
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "use_cache": True,
    }


def lfm2_tensors(config: dict[str, Any]) -> Iterator[TensorSpec]:
    """Output and input embeddings are one tensor, so the layers must outweigh it.

    Otherwise a token would predict itself whatever came before. The large final norm gives logits an
    ordinary spread. With this base only the first pairs of a head's numbers turn with the position, and
    those are taken out: vLLM 0.32 on CPU turns LFM2's queries and keys by the position of another token
    if a rank has more than one head, so that an answer would depend on what else is in the batch.
    """
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    unused = (special_tokens(config),)
    turning = (range(6), range(head // 2, head // 2 + 6))
    yield TensorSpec("model.embed_tokens.weight", (config["vocab_size"], hidden), zero_rows=unused)
    for index, kind in enumerate(config["layer_types"]):
        layer = f"model.layers.{index}"
        yield constant(f"{layer}.operator_norm.weight", hidden, value=1.0)
        yield constant(f"{layer}.ffn_norm.weight", hidden, value=1.0)
        if kind == "conv":
            yield normal(f"{layer}.conv.in_proj.weight", 3 * hidden, hidden, std=hidden**-0.5)
            yield normal(f"{layer}.conv.conv.weight", hidden, 1, config["conv_L_cache"], std=0.5)
            yield normal(f"{layer}.conv.out_proj.weight", hidden, hidden)
        else:
            yield from attention_tensors(f"{layer}.self_attn", config, head, out="out_proj")
            for norm, size in (("q_layernorm", 3.0), ("k_layernorm", 1.0)):
                name = f"{layer}.self_attn.{norm}.weight"
                yield TensorSpec(name, (head,), Init.CONSTANT, size, turning)
        yield normal(f"{layer}.feed_forward.w1.weight", inner, hidden)
        yield normal(f"{layer}.feed_forward.w3.weight", inner, hidden)
        yield normal(f"{layer}.feed_forward.w2.weight", hidden, inner)
    yield constant("model.embedding_norm.weight", hidden, value=5.0)
