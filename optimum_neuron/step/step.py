# SPDX-License-Identifier: Apache-2.0
"""The step module: every graph is this module at one GraphSpec.

A step's tokens pass through the model as one flat sequence `[1, tokens]`, so that every linear layer runs once. Only attention, layer
states and the choice of output rows distinguish decode rows and prompt chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention.kv_cache import KVCache, block_indices, write_indices
from .attention.rows import AttentionRows, OwnedBlocks, StepLayout, actual_tokens_mask
from .attention.state import KeyValueState
from .block_owners import BlockOwners
from .cache_needs import CacheNeeds
from .features.codes.modules import multiplying
from .features.experts.experts import routing, set_experts
from .features.own_code.layers_by_token import set_own_states
from .features.own_code.own_scores import BiasMask
from .features.own_code.slot_keys import SlotKeys
from .features.recurrence.recurrent_functions import set_recurrences
from .features.selected_keys.indexers import set_indexers
from .interface import accepts_keyword, set_position_tables
from .model_spec import KINDS
from .ops import DEFAULT_OPS, StepOps
from .sampling.buffers import ChosenTokens, Scores, slots_of_rows
from .serving import Backends, serving
from .spec import DECODE, GraphSpec, TensorSpec


class RowGroup(NamedTuple):
    """Inputs of one group of rows. Fields that a graph does not use are None.

    `input_ids` and `position_ids` are `[rows, tokens]` int32. A short chunk repeats its last token and position. An idle decode row has
    position -1. `seq_ids [rows]` int32 are the slots of chunk rows. With a cache of blocks, `block_table [rows, n]` int32 are the blocks of
    each row in order, any after its last one, and `write_blocks [rows, tokens]` int32 those that the tokens are written to; decode rows
    with blocks in place have the fields of `BlockOwners` and no table. `sampling_params [rows, 4]` are float32, as `uniforms [rows]`.
    """

    input_ids: Tensor
    position_ids: Tensor
    seq_ids: Tensor | None = None
    block_table: Tensor | None = None
    block_owner: Tensor | None = None
    block_base: Tensor | None = None
    shared_blocks: Tensor | None = None
    shared_base: Tensor | None = None
    joined: Tensor | None = None
    write_blocks: Tensor | None = None
    sampling_params: Tensor | None = None
    uniforms: Tensor | None = None


class StepModule(nn.Module):
    """One step of a causal language model over a static KV cache, which all graphs of the model share.

    `model` is a transformers causal LM loaded with `attn_implementation="optimum_neuron"`. `scores` takes the logits for a sampler in a
    graph of its own; then each slot's token is kept, too.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        spec: GraphSpec,
        ops: StepOps = DEFAULT_OPS,
        scores: Scores | None = None,
    ) -> None:
        super().__init__()
        self.model, self.kv_cache, self.spec, self.ops, self.scores = model, cache, spec, ops, scores
        self.chosen = None if scores is None else ChosenTokens(spec.batch_size)
        self._needs = CacheNeeds.read_code(model)
        set_stand_ins(model)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the step on the inputs of `GraphSpec.inputs`; return `GraphSpec.outputs`. Both are in their order."""
        groups = row_groups(self.spec, inputs)
        backends, output_rows, actual = self._plan_step(groups)
        input_ids = [
            group.input_ids if self.chosen is None or name != DECODE else self.chosen.fill_ids(group.input_ids)
            for name, group in groups
        ]
        scored = self._compute_logits(
            torch.cat([ids.flatten() for ids in input_ids]),
            torch.cat([group.position_ids.flatten() for _, group in groups]),
            None if self.spec.scores_prompts else output_rows,
            backends,
            actual,
        )
        logits = scored[output_rows] if self.spec.scores_prompts else scored
        outputs, tokens, start = [], [], 0
        for name, group in groups:
            own = logits[start : start + len(group.input_ids)]
            start += len(group.input_ids)
            if group.sampling_params is not None and group.uniforms is not None:
                tokens.append(self.ops.sample(own, group.sampling_params, group.uniforms))
                outputs.append(tokens[-1])
                if self.scores is not None:
                    self.scores.keep_logits(name, own, group.position_ids[:, 0] >= 0)
            if self.spec.returns_logits(name):
                outputs.append(self.ops.full_logits(own))
        if self.chosen is not None:
            slots = [slots_of_rows(group.position_ids, group.seq_ids) for _, group in groups]
            self.chosen.keep_tokens(torch.cat(tokens), torch.cat(slots))
        if self.spec.scores_prompts:
            outputs.append(self.ops.full_logits(scored))
        return tuple(outputs)

    def _plan_step(self, groups: list[tuple[str, RowGroup]]) -> tuple[Backends, Tensor, Tensor]:
        """Return the backends, the token of each row that reaches lm_head, and which tokens are real."""
        spec, offset = self.spec, 0
        slot_writes, block_writes, rows_of_groups, last_tokens, actual_tokens = [], [], [], [], []
        for name, group in groups:
            rows, tokens = group.input_ids.shape
            actual = actual_tokens_mask(group.position_ids)
            actual_tokens.append(actual.flatten())
            slots = torch.arange(rows, dtype=torch.int32) if group.seq_ids is None else group.seq_ids
            places = write_indices(group.position_ids, actual, slots, spec.batch_size, offset)
            slot_writes.append(places)
            if group.write_blocks is not None and spec.kv_block_size is not None:
                sizes = spec.kv_block_size, spec.kv_blocks
                places = block_indices(group.position_ids, actual, group.write_blocks, *sizes, offset)
            block_writes.append(places)
            blocks = group.seq_ids if group.block_table is None else group.block_table
            owners = {name: getattr(group, name) for name in BlockOwners._fields}
            owned = None if group.joined is None else OwnedBlocks(group.position_ids, **owners)
            rows_of_groups.append(
                AttentionRows(group.position_ids, blocks, spec.context_length, name == DECODE, owned, group.seq_ids)
            )
            row_starts = torch.arange(offset, offset + rows * tokens, tokens, dtype=torch.int32)
            # An idle row has no last token: any token of its own will do, as the result is not read.
            last_tokens.append(row_starts + (actual.sum(-1, dtype=torch.int32) - 1).clamp(min=0))
            offset += rows * tokens
        block_places, slot_keys = _join_places(block_writes), None
        if self._needs.by_itself:
            has_blocks = spec.kv_block_size is not None
            slot_keys = SlotKeys.for_step(rows_of_groups, spec.batch_size, has_blocks=has_blocks)
        slot_places, actual = _join_places(slot_writes), torch.cat(actual_tokens)
        step = StepLayout(
            self.kv_cache, rows_of_groups, block_places, slot_places, actual, spec.batch_size, self.ops, slot_keys
        )
        make_bias = BiasMask if self._needs.biased else None if slot_keys is None else slot_keys.make_bias
        backends = Backends({kind: kind.load_backends()[1](step) for kind in KINDS}, make_bias)
        return backends, self.ops.output_rows(torch.cat(last_tokens)), step.actual

    def _compute_logits(
        self, input_ids: Tensor, position_ids: Tensor, output_rows: Tensor | None, backends: Backends, actual: Tensor
    ) -> Tensor:
        """Return `[rows, vocab]` float32, or a shard of it, by the model's own head, for the tokens `output_rows`; None: for all."""
        # An idle row's position is -1: a learned position table has no such row, and the result is not read.
        position_ids = position_ids.clamp(min=0)
        kwargs: dict[str, Any] = {"use_cache": False}
        if accepts_keyword(self.model, "attention_backend"):
            kwargs["attention_backend"] = backends[KeyValueState]
        keeps = accepts_keyword(self.model, "logits_to_keep", by_name=True)
        if keeps and output_rows is not None:
            kwargs["logits_to_keep"] = output_rows
        kwargs |= self._needs.arguments(position_ids, backends, self.spec.sequence_length)
        with (
            serving(backends, position_ids),
            routing(self.ops.experts, actual),
            multiplying(self.ops.quantized_linear),
        ):
            logits = self.model(input_ids=input_ids[None], **kwargs).logits[0]
        return (logits if keeps or output_rows is None else logits[output_rows]).float()


def set_stand_ins(model: nn.Module) -> None:
    set_experts(model)
    set_recurrences(model)
    set_own_states(model)
    set_position_tables(model)
    set_indexers(model)


def _join_places(writes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows, columns = zip(*writes, strict=True)
    return torch.cat(rows), torch.cat(columns)


def row_groups(spec: GraphSpec, inputs: tuple[Tensor, ...]) -> list[tuple[str, RowGroup]]:
    fields: dict[str, dict[str, Tensor]] = {}
    for tensor_spec, tensor in zip(spec.inputs(), inputs, strict=True):
        group, name = tensor_spec.name.split(".")
        fields.setdefault(group, {})[name] = tensor
    return [(group, RowGroup(**tensors)) for group, tensors in fields.items()]


def example_inputs(specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Return zeroed tensors, each its own object: torch.export wires two inputs that are one object to one placeholder."""
    return tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)
