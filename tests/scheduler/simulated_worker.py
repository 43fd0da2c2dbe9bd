"""What vLLM's worker does with a scheduled step, on pages of the simulated model.

Follows vLLM's V1 runner: connector orders, then zeroing, block copies, the aligned states' move to the
column they are written in, loads that this step needs, the forward, and at the end what the connector has to
say. The V2 runner shows the connector its orders only after the move.
"""

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from simulated_model import (
    VOCABULARY,
    WRONG_TOKEN,
    AttentionLayer,
    StateLayer,
    chain,
    link,
    sampled,
    seed,
)
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput


@dataclass
class Row:
    """One request as the worker knows it."""

    tokens: list[int]
    links: list[bytes]
    """c(0) … c(len(tokens))."""
    tables: list[list[int]]
    computed: int
    column: int | None = None
    """Where the aligned states were written last."""
    accepted: int = 1
    """Of the tokens that the last step sampled, its own and accepted drafts: the state that counts is in that
    slot, from 1, behind the column."""

    def append(self, token: int) -> None:
        """A token was sampled."""
        self.tokens.append(token)
        self.links.append(link(self.links[-1], token))


@dataclass
class Group:
    """One KV-cache group's layers."""

    block_tokens: int
    window: int
    aligned: bool
    scratch: int
    attention: list[AttentionLayer] = field(default_factory=list)
    states: list[StateLayer] = field(default_factory=list)

    @property
    def layers(self) -> Sequence[AttentionLayer | StateLayer]:
        """All of them; a group has one kind only."""
        return self.attention or self.states


def guess(draft: int) -> int:
    """A draft as a token: vLLM fills steps up with -1."""
    return draft if draft >= 0 else VOCABULARY + 2


def groups_of(config: KVCacheConfig, caches: dict[str, Any], rank: int) -> list[Group]:
    """The groups of a cache config over the tensors that vLLM allocated. Ranks hold other contents."""
    found = []
    for spec_of_group in config.kv_cache_groups:
        spec = spec_of_group.kv_cache_spec
        group = Group(
            block_tokens=spec.block_size,
            window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0,
            aligned=isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align",
            scratch=spec.num_speculative_blocks if isinstance(spec, MambaSpec) else 0,
        )
        for name in spec_of_group.layer_names:
            if isinstance(spec, MambaSpec):
                content = spec.state_content_size_bytes
                group.states.append(StateLayer(f"{name}@{rank}", caches[name], content))
            else:
                group.attention.append(AttentionLayer(f"{name}@{rank}", caches[name], 0))
        found.append(group)
    return found


class SimulatedWorker:
    """One rank. `wrong` says what a forward read that it should not have read."""

    def __init__(self, groups: list[Group], connector: Any, runner: str = "v1") -> None:
        self.groups = groups
        self.runner = runner
        self.before_forward: Callable[[Any], None] = lambda output: None
        """Called with a step whose loads are in place."""
        self.connector = connector
        self.rows: dict[str, Row] = {}
        self.wrong: list[str] = []
        self.drafted = self.accepted = 0
        """Drafts that were verified, and those that were right."""

    def execute(self, output: Any) -> ModelRunnerOutput:
        """One step."""
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if self.runner == "v1":
            self.connector.handle_preemptions(metadata)
        self._update_rows(output)
        ids = list(output.num_scheduled_tokens)
        for request_id in ids:
            self._move_states(self.rows[request_id], output.num_scheduled_tokens[request_id])
        drafts = output.scheduled_spec_decode_tokens
        if self.runner == "v2":
            self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.connector.start_load_kv(None)
            self.before_forward(output)
        tokens = [
            self._forward(request_id, output.num_scheduled_tokens[request_id], drafts.get(request_id, []))
            for request_id in ids
        ]
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            kv_connector_output=self._connector_output(output),
        )

    def _connector_output(self, output: Any) -> KVConnectorOutput:
        if not output.has_sync_kv_loads:
            self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        news = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(news)),
        )

    # -- states of requests ----------------------------------------------------------------------

    def _update_rows(self, output: Any) -> None:
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for block in output.new_block_ids_to_zero or ():
            for group in self.groups:
                for layer in group.attention:
                    layer.fill(block, 0)
        for copy in output.kv_cache_block_copies or ():
            for group in self.groups:
                for layer in group.layers:
                    layer.copy(copy.src_block_id, copy.dst_block_id)
        for new in output.scheduled_new_reqs:
            start = seed(new.lora_request.lora_name if new.lora_request else None)
            tokens = list(new.prompt_token_ids)
            tables = [list(ids) for ids in new.block_ids]
            self.rows[new.req_id] = Row(tokens, chain(tokens, start), tables, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            new_ids = cached.new_block_ids[i]
            row.computed = cached.num_computed_tokens[i]
            if request_id in cached.resumed_req_ids:
                # What was sampled in flight when it was thrown out may have been dropped.
                tokens = list(cached.all_token_ids[request_id])
                tables = [list(ids) for ids in new_ids]
                self.rows[request_id] = Row(tokens, chain(tokens, row.links[0]), tables, row.computed)
            elif new_ids is not None:
                for table, ids in zip(row.tables, new_ids, strict=True):
                    table.extend(ids)

    # -- the forward -----------------------------------------------------------------------------

    def _move_states(self, row: Row, count: int) -> None:
        """Bring h(computed) into the column where h(computed + count) will be written."""
        for group, table in zip(self.groups, row.tables, strict=True):
            if not group.aligned:
                continue
            before = row.column if row.column is not None else (row.computed - 1) // group.block_tokens
            column = -(-(row.computed + count) // group.block_tokens) - 1
            if before not in (-1, column):
                for layer in group.states:
                    layer.copy(table[before + row.accepted - 1], table[column])
        columns = {-(-(row.computed + count) // g.block_tokens) - 1 for g in self.groups if g.aligned}
        column_now = columns.pop() if columns else None
        if column_now != row.column:
            row.column, row.accepted = column_now, 1

    def _forward(self, request_id: str, count: int, drafts: list[int]) -> list[int]:
        """The tokens sampled. Drafts are computed like prompt tokens; each state on the way gets a slot."""
        row = self.rows[request_id]
        start, end = row.computed, row.computed + count
        certain = end - len(drafts)
        links = row.links[: certain + 1] + chain([*map(guess, drafts)], row.links[certain])[1:]
        wrong: list[str] = []
        for group, table in zip(self.groups, row.tables, strict=True):
            for layer in group.states:
                column = (row.column or 0) if group.aligned else 0
                if start:
                    wrong += layer.wrong(table[column + row.accepted - 1], start, row.links)
                for slot, link_after in enumerate(links[certain:]):
                    layer.write(table[column + slot], link_after)
            first = max(0, start - group.window + 1) if group.window else 0
            for layer in group.attention:
                wrong += layer.wrong(table, group.block_tokens, range(first, start), row.links)
                for token in range(start, end):
                    block = table[token // group.block_tokens]
                    layer.write(block, token % group.block_tokens, links[token + 1])
        self.wrong += [f"{request_id}, tokens {start} to {end - 1}: {what}" for what in wrong]
        if certain < len(row.tokens):
            return []
        tokens = [WRONG_TOKEN if wrong else sampled(links[certain])]
        for draft, after in zip(drafts, links[certain + 1 :], strict=True):
            if draft != tokens[-1]:
                break
            tokens.append(sampled(after))
        for token in tokens:
            row.append(token)
        row.accepted = len(tokens)
        self.drafted += len(drafts)
        self.accepted += len(tokens) - 1
        self._keep_border(row, certain)
        return tokens

    def _keep_border(self, row: Row, certain: int) -> None:
        """The state at a border that accepted drafts crossed goes to the border's block."""
        reached, accepted = certain + row.accepted - 1, row.accepted
        for group, table in zip(self.groups, row.tables, strict=True):
            border = reached // group.block_tokens * group.block_tokens
            if not group.aligned or border < certain or row.column is None:
                continue
            source, target = row.column + border - certain, border // group.block_tokens - 1
            if source != target:
                for layer in group.states:
                    layer.copy(table[source], table[target])
            if target == row.column:
                accepted = 1
        row.accepted = accepted
