"""Speculation over cached prefixes on CPU, for `tests/engines/test_drafts.py`: what vLLM 0.32 lacks there.

vLLM moves recurrent states between blocks by two Triton kernels when drafts may be rejected, and has no
other code for them: an engine on CPU that speculates and caches prefixes ends at its first step. Here both
moves are written in Python. Its CPU convolution ends an engine whose next drafts are fewer than were just
accepted: so the n-gram drafter here always proposes as many as it may. And a step of one prompt token and
nothing else ends an engine by the stride of an index, which is passed on without. Everything else is vLLM's:
blocks, schedule, verification, the kernels of every layer.

Engines load it as the module of their connector (`kv_connector_module_path`), from this folder.
"""

import ctypes
import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer
    from vllm.v1.worker.mamba_utils import MambaSpecDecodeGPUContext

from stateferry.vllm.connector import StateFerryConnector

__all__ = ["StateFerryConnector"]

Context = Any
"""vLLM's MambaSpecDecodeGPUContext: where every recurrent state of every layer lies."""


def move(context: Context, row: int, source: int, target: int, drafts: int) -> None:
    """Move all recurrent states of the request in this row of the block tables from one column to another.

    `drafts`: how many accepted drafts the wanted state is past the source's own. A matrix has a block for
    each draft, in the columns that follow; a convolution window has all of them in one block.
    """
    for state in range(context.num_states):
        group = int(context.state_group_indices[state])
        pointer = int(context.block_table_ptrs[group]) + 4 * row * context.block_table_stride_req
        table = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int32))
        base, stride = int(context.state_base_addrs[state]), int(context.state_block_strides[state])
        width, size = int(context.state_conv_widths[state]), int(context.state_elem_sizes[state])
        size *= int(context.state_inner_sizes[state])
        into = base + table[target] * stride
        if not width:
            ctypes.memmove(into, base + table[source + drafts] * stride, size)
            continue
        start = base + table[source] * stride + drafts * size
        rows, between = 1, 0
        if is_conv_state_dim_first():
            rows, between = int(context.state_dim_row_count[state]), int(context.state_dim_row_stride[state])
        for channel in range(rows):
            ctypes.memmove(into + channel * between, start + channel * between, (width - drafts) * size)


def before_step(
    context: Context,
    num_reqs: int,
    state_idx_gpu: Any,
    src_col_gpu: Any,
    token_bias_gpu: Any,
    idx_mapping: Any,
) -> None:
    """A request that enters a new block takes its state along."""
    for row in range(num_reqs):
        source, target = int(src_col_gpu[row]), int(state_idx_gpu[row])
        if source >= 0 and source != target:
            move(context, row, source, target, int(token_bias_gpu[row]))


def after_step(
    context: Context,
    num_reqs: int,
    num_accepted_tokens_gpu: Any,
    mamba_state_idx_gpu: Any,
    num_scheduled_tokens_gpu: Any,
    num_computed_tokens_gpu: Any,
    num_draft_tokens_gpu: Any,
) -> None:
    """The state at a border that accepted drafts crossed goes to the border's block, for the prefix cache."""
    accepted_after = context.num_accepted_tokens_out
    accepted_after[:num_reqs].copy_(num_accepted_tokens_gpu[:num_reqs])
    for row in range(num_reqs):
        certain = int(
            num_computed_tokens_gpu[row] + num_scheduled_tokens_gpu[row] - num_draft_tokens_gpu[row]
        )
        reached = certain + int(num_accepted_tokens_gpu[row]) - 1
        border = reached // context.block_size * context.block_size
        if border < certain:
            continue
        source, target = int(mamba_state_idx_gpu[row]), border // context.block_size - 1
        if source == target:
            accepted_after[row] = 1  # the running block ends here, and its first state is now the last one
        if (source, certain) != (target, border):
            move(context, row, source, target, border - certain)


def proposing_enough(propose: Any) -> Any:
    """Guesses stand where the drafter has fewer proposals than it may make; hardly any is accepted."""

    def all_of_them(self: Any, count: int, sampled: Any, num_tokens: Any, tokens: Any, **more: Any) -> Any:
        drafts = propose(self, count, sampled, num_tokens, tokens, **more)
        for index, ids in enumerate(sampled):
            if ids and num_tokens[index] + count < self.max_model_len:
                drafts[index] = [*drafts[index], *[ids[-1]] * (count - len(drafts[index]))]
        return drafts

    return all_of_them


def with_dense_indices(step: Any) -> Any:
    """A column of one row is contiguous to PyTorch whatever its stride, and to vLLM's kernel it is not."""

    def dense(*, initial_state_indices: Any, **more: Any) -> Any:
        indices = torch.tensor(initial_state_indices.tolist(), dtype=initial_state_indices.dtype)
        return step(initial_state_indices=indices, **more)

    return dense


_custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = with_dense_indices(
    _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu
)
MambaSpecDecodeGPUContext.run_fused_precopy = before_step
MambaSpecDecodeGPUContext.run_fused_postprocess = after_step
NgramProposer.propose = proposing_enough(NgramProposer.propose)
