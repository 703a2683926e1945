# SPDX-License-Identifier: Apache-2.0
"""The step module: every graph is this module at one GraphSpec.

A step advances decode rows, or prompt chunks, or both. Their tokens pass through the model as one flat sequence
`[1, tokens]`, so that every linear layer runs once; only attention and the choice of output rows tell them apart.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import CachedAttention
from .attention_rows import AttentionRows
from .features.codes.modules import multiplying
from .features.compressed_keys.slot_groups import SlotGroups
from .features.convolution.convolution import SlotConvolutions
from .features.experts.experts import routing, set_experts
from .features.own_code.slot_keys import SlotKeys
from .features.recurrence.recurrence import SCAN_KINDS, ScanRows, SlotScans
from .features.selected_keys.slot_index import SlotIndex
from .features.shared_blocks.owned_blocks import OwnedBlocks
from .kv_cache import KVCache, block_indices, write_indices
from .model_cache import Backends, CacheNeeds
from .ops import DEFAULT_OPS, StepOps
from .sampling.chosen import ChosenTokens, slots_of_rows
from .sampling.scores import Scores
from .spec import CHUNK, DECODE, GraphSpec, TensorSpec
from .stand_ins import set_stand_ins


class RowGroup(NamedTuple):
    """Inputs of one group of rows; the fields that a graph does not use are None.

    `input_ids` and `position_ids` are `[rows, tokens]` int32. A short chunk repeats its last token and position. An
    idle decode row has position -1. `seq_ids [rows]` int32 are the slots of chunk rows. Of a cache of blocks, `block_table
    [rows, n]` int32 are the blocks of each row in order, any behind its last one, and `write_blocks [rows, tokens]` int32 those
    that the tokens are written to; decode rows whose blocks attend in place have the fields of `BlockOwners` in place of a
    table. `sampling_params [rows, 4]` float32 are top_k, top_p, temperature and min_p; `uniforms
    [rows]` float32.
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
    """One step of a causal language model over a static KV cache.

    Args:
        model: a transformers causal LM loaded with `attn_implementation="optimum_neuron"`.
        cache: shared by all graphs of the model.
        ops: how the step attends, writes, computes experts and samples; a target may replace the reference.
        spec: with blocks that attend in place only where `ops` attends so.
        scores: where logits are left for a sampler in a graph of its own, and then each slot's token is kept, too; None: the
            step itself samples, and its caller knows the tokens.
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
        self.ops = ops
        self.model = model
        self.kv_cache = cache
        self.scores = scores
        self.chosen = None if scores is None else ChosenTokens(spec.batch_size)
        self.spec = spec
        self._needs = CacheNeeds.of(model)
        set_experts(model)
        set_stand_ins(model)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Runs the step on the inputs of `GraphSpec.inputs`; returns `GraphSpec.outputs`; both in their order."""
        groups = row_groups(self.spec, inputs)
        backends, output_rows, actual = self._plan(groups)
        scored = self._logits(
            torch.cat([self._ids(name, group).flatten() for name, group in groups]),
            torch.cat([group.position_ids.flatten() for _, group in groups]),
            None if self.spec.scores_prompts else output_rows,
            backends,
            actual,
        )
        logits = scored[output_rows] if self.spec.scores_prompts else scored
        outputs, start = [], 0
        for name, group in groups:
            rows = group.input_ids.shape[0]
            outputs.append(self._outputs(name, group, logits[start : start + rows]))
            start += rows
        if self.chosen is not None:
            slots = [slots_of_rows(group.position_ids, group.seq_ids) for _, group in groups]
            self.chosen.keep(torch.cat([tokens for tokens, *_ in outputs]), torch.cat(slots))
        if self.spec.scores_prompts:
            outputs.append([self.ops.full_logits(scored)])
        return tuple(tensor for tensors in outputs for tensor in tensors)

    def _ids(self, name: str, group: RowGroup) -> Tensor:
        return group.input_ids if self.chosen is None or name != DECODE else self.chosen.fill(group.input_ids)

    def _plan(self, groups: list[tuple[str, RowGroup]]) -> tuple[Backends, Tensor, Tensor]:
        """Who computes what for the tokens, which token of each row reaches lm_head, and which are real."""
        slot_writes, block_writes, rows_of_groups, last_tokens, actual_tokens, offset = [], [], [], [], [], 0
        for name, group in groups:
            rows, tokens = group.input_ids.shape
            actual = actual_tokens_mask(group.position_ids)
            actual_tokens.append(actual.flatten())
            slots = torch.arange(rows, dtype=torch.int32) if group.seq_ids is None else group.seq_ids
            slot_writes.append(write_indices(group.position_ids, actual, slots, self.spec.batch_size, offset))
            block_writes.append(self._block_indices(group, actual, offset) or slot_writes[-1])
            blocks = group.seq_ids if group.block_table is None else group.block_table
            length = self.spec.context_length
            owned = _owned_blocks(group)
            rows_of_groups.append(
                AttentionRows(group.position_ids, blocks, length, name == DECODE, owned, group.seq_ids)
            )
            row_starts = torch.arange(offset, offset + rows * tokens, tokens, dtype=torch.int32)
            # An idle row has no last token: any token of its own will do, nobody reads the result.
            last_tokens.append(row_starts + (actual.sum(-1, dtype=torch.int32) - 1).clamp(min=0))
            offset += rows * tokens
        writes = _joined(block_writes)
        apart = self.ops.attend_decode is not None
        index = SlotIndex(self.kv_cache, *writes, rows_of_groups, self.ops.write_cache, apart)
        attention = CachedAttention(
            self.kv_cache,
            *writes,
            rows_of_groups,
            self.ops.attend_cache,
            self.ops.attend_decode,
            self.ops.write_cache,
            self.ops.reads_visible,
            SlotKeys.of(rows_of_groups, self.spec.batch_size, has_blocks=self.spec.kv_block_size is not None)
            if self._needs.by_itself
            else None,
            self._needs.biased,
        )
        places = _joined(slot_writes)
        actual = torch.cat(actual_tokens)
        backends = Backends(
            attention,
            SlotConvolutions(self.kv_cache, *places, self.ops.convolve),
            self._scans(groups, places),
            index,
            SlotGroups(self.kv_cache, rows_of_groups, actual, self.spec.batch_size, self.ops.write_cache),
        )
        return backends, self.ops.output_rows(torch.cat(last_tokens)), actual

    def _scans(self, groups: list[tuple[str, RowGroup]], slot_writes: tuple[Tensor, Tensor]) -> SlotScans:
        by_name = dict(groups)
        decode, chunk = by_name.get(DECODE), by_name.get(CHUNK)
        rows = ScanRows(
            *slot_writes,
            decode=None if decode is None else decode.position_ids[:, 0],
            chunk=None if chunk is None else chunk.position_ids,
            actual=None if chunk is None else actual_tokens_mask(chunk.position_ids),
            chunk_slots=None if chunk is None else chunk.seq_ids,
            scanned=self.kv_cache.scanned_tokens,
        )
        return SlotScans(self.kv_cache, rows, {kind: getattr(self.ops, kind) for kind in SCAN_KINDS})

    def _block_indices(self, group: RowGroup, actual: Tensor, offset: int) -> tuple[Tensor, Tensor] | None:
        if group.write_blocks is None or self.spec.kv_block_size is None:
            return None
        return block_indices(
            group.position_ids, actual, group.write_blocks, self.spec.kv_block_size, self.spec.kv_blocks, offset
        )

    def _logits(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        output_rows: Tensor | None,
        backends: Backends,
        actual: Tensor,
    ) -> Tensor:
        """`[rows, vocab]` float32, from the model's own head with its own scaling and soft-capping; or a shard of it.

        Args:
            output_rows: the tokens that reach the head; None: all.
        """
        # An idle row's position is -1: a learned position table has no such row, and nobody reads the result.
        position_ids = position_ids.clamp(min=0)
        kwargs: dict[str, Any] = {"use_cache": False}
        if accepts(self.model, "attention_backend"):
            kwargs["attention_backend"] = backends.attention
        keeps = accepts(self.model, "logits_to_keep", by_name=True)
        if keeps and output_rows is not None:
            kwargs["logits_to_keep"] = output_rows
        kwargs |= self._needs.arguments(position_ids, backends, self.spec.sequence_length)
        with (
            backends.serving(position_ids),
            routing(self.ops.experts, actual),
            multiplying(self.ops.quantized_linear),
        ):
            logits = self.model(input_ids=input_ids[None], **kwargs).logits[0]
        return (logits if keeps or output_rows is None else logits[output_rows]).float()

    def _outputs(self, name: str, group: RowGroup, logits: Tensor) -> list[Tensor]:
        outputs = []
        if group.sampling_params is not None and group.uniforms is not None:
            outputs.append(self.ops.sample(logits, group.sampling_params, group.uniforms))
            if self.scores is not None:
                self.scores.keep(name, logits, group.position_ids[:, 0] >= 0)
        if self.spec.returns_logits(name):
            outputs.append(self.ops.full_logits(logits))
        return outputs


def _owned_blocks(group: RowGroup) -> OwnedBlocks | None:
    if group.block_owner is None or group.block_base is None or group.joined is None:
        return None
    return OwnedBlocks(
        group.position_ids,
        group.block_owner,
        group.block_base,
        group.joined,
        group.shared_blocks,
        group.shared_base,
    )


def _joined(writes: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    rows, columns = zip(*writes, strict=True)
    return torch.cat(rows), torch.cat(columns)


def actual_tokens_mask(position_ids: Tensor) -> Tensor:
    """`[rows, tokens]`: a token is real where its position is larger than the one before; an idle row has none."""
    first = position_ids[:, :1] >= 0
    return torch.cat([first, position_ids[:, 1:] > position_ids[:, :-1]], dim=1)


def accepts(model: nn.Module, keyword: str, *, by_name: bool = False) -> bool:
    """Whether a model's forward takes a keyword; `by_name`: whether it has a parameter of that name."""
    parameters = inspect.signature(model.forward).parameters
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (others and not by_name)


def row_groups(spec: GraphSpec, inputs: tuple[Tensor, ...]) -> list[tuple[str, RowGroup]]:
    """Sorts a graph's flat inputs into its row groups: decode rows, chunk rows, or both in this order."""
    fields: dict[str, dict[str, Tensor]] = {}
    for tensor_spec, tensor in zip(spec.inputs(), inputs, strict=True):
        group, name = tensor_spec.name.split(".")
        fields.setdefault(group, {})[name] = tensor
    return [(group, RowGroup(**tensors)) for group, tensors in fields.items()]


def example_inputs(specs: tuple[TensorSpec, ...]) -> tuple[Tensor, ...]:
    """Zeroed tensors, each its own object: torch.export wires two inputs that are one object to one placeholder."""
    return tuple(torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for spec in specs)
