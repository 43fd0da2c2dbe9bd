"""What identifies a prompt's prefix, and cutting a prompt to N-1 tokens on the producer."""

import re
from typing import Any

from stateferry.layout.digest import prefix_digest

_CHILD = re.compile(r"^\d+_")
"""vLLM names the samples of one prompt (`n` > 1) `0_…`, `1_…`."""
_COMPLETION = re.compile(r"^cmpl-.+-(\d+)-[0-9a-f]{8}$")
"""vLLM names the prompts of one completion call `cmpl-…-0-…`, `cmpl-…-1-…`."""


def why_not_offered(request: Any) -> str:
    """Why a prefill leg's result cannot be handed to another engine; empty if it can.

    The response of a call with several prompts or samples carries one dictionary only, so the others'
    blocks would be kept for nobody.
    """
    prompt = request.prompt_token_ids
    if prompt is None or request.prompt_embeds is not None:
        return "its prompt has embeddings, which no digest of token ids covers"
    if request.skip_reading_prefix_cache:
        return "it asks for prompt log-probabilities, so the consumer must compute the prompt itself"
    if request.resumable:
        return "it is a session whose prompt goes on, so nothing may be cut off its parts"
    if _CHILD.match(request.request_id):
        return "it is one of several samples (n > 1) of one prompt"
    completion = _COMPLETION.match(request.request_id)
    if completion and completion.group(1) != "0":
        return "it is not the first prompt of its completion call"
    if any(f.mm_position.offset + f.mm_position.length >= len(prompt) for f in request.mm_features):
        return "its prompt ends in a multimodal input"
    if len(prompt) < 2:
        return "a prompt of one token has no prefix to hand off"
    return ""


def digest_of_prefix(request: Any, num_tokens: int) -> str:
    """Digest of the first `num_tokens` tokens and all else that decides their cache."""
    lora = request.lora_request.lora_name if request.lora_request is not None else None
    multimodal = [
        (f.mm_position.offset, f.mm_position.length, f.identifier)
        for f in request.mm_features
        if f.mm_position.offset < num_tokens
    ]
    return prefix_digest(request.prompt_token_ids[:num_tokens], lora, request.cache_salt, multimodal)


def cut_last_token(request: Any, hash_block_tokens: int | None) -> None:
    """Take the last token off a prompt, before anything was looked up or scheduled for it.

    A recurrent state cannot be wound back, so the producer must stop at h(N-1): the consumer computes
    token N itself. Done on arrival, because after a full prefix-cache hit there would be no token left
    to schedule and vLLM asserts.
    """
    request.prompt_token_ids = request.prompt_token_ids[:-1]
    request._all_token_ids.pop()  # all_token_ids is a view of this list
    request.num_prompt_tokens -= 1
    request.max_tokens = 1
    if hash_block_tokens:
        del request.block_hashes[request.num_prompt_tokens // hash_block_tokens :]
