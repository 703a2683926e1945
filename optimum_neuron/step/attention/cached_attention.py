# SPDX-License-Identifier: Apache-2.0
"""Attention over the static cache, as transformers' attention interface calls it.

A layer first writes keys and values of the step's tokens. Then every query attends over cache columns under masks made from positions
alone, so no chunk and no neighbour changes what a token sees. Columns that it does not see are selected away: zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor, nn

from ..layer_state import StateRecorder
from ..serving import LayerCalls
from . import kv_cache
from .coded_states import CodedStates, Stored, raw_scores, weighted_sum
from .rows import AttentionCall, AttentionRows, CompressedKeys, StepLayout


# Finite: a row of minus infinities is NaN after softmax. Far below any score, also when added to one that is finite.
MASKED = -1e9
MASKED_HALF = -3e4  # float16 ends at -65504

# A sink follows whole vectors: in whichever context, the sum of a softmax has it at the same place.
_VECTOR = 16

# From a call, a row group, and the layer's cached keys and values to `[rows, tokens, heads, value_dim]`.
CacheAttention = Callable[[AttentionCall, AttentionRows, Tensor, Stored, Stored], Tensor]
# The same of decode rows, from the cache as it was before the step and the rows' own `[rows, kv_heads, dim]` key and value, not yet rounded.
DecodeAttention = Callable[[AttentionCall, AttentionRows, Tensor, Stored, Stored, Tensor, Tensor], Tensor]
# Whether a call's attention reads no key that a token does not see, so that what is written need not be marked.
ReadsVisible = Callable[[AttentionCall, Stored, Stored], bool]
# As kv_cache.write_tokens: from a layer's cache, `states [tokens, kv_heads, dim]`, and the block and column of each token.
CacheWrite = Callable[[Stored, Tensor, Tensor, Tensor], None]


@dataclass
class CachedAttention:
    """The attention backend of step graphs."""

    step: StepLayout
    calls: LayerCalls = field(default_factory=LayerCalls)

    def _write_keys(self, states: tuple[Tensor, Tensor], keys: Stored, values: Stored) -> None:
        for cache, each in zip((keys, values), states, strict=True):
            self.step.ops.write_cache(cache, each, *self.step.block_places)

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values of a model that attends by itself; return those of all slots, as `AllSlots.read_slots`."""
        assert self.step.all_slots is not None
        keys, values = self.step.cache.get_keys(self.calls.number_call(layer_idx))
        assert isinstance(keys, Tensor) and isinstance(values, Tensor)  # checks of configs refuse others
        self._write_keys(kv_cache.whole_or_nan(_by_token(key), _by_token(value)), keys, values)
        return self.step.all_slots.read_slots(keys, values)

    def attend(self, call: AttentionCall) -> Tensor:
        step, ops = self.step, self.step.ops
        keys, values = step.cache.get_keys(self.calls.number_call(call.layer_idx))
        states = _by_token(call.key), _by_token(call.value)
        if ops.reads_visible is None or not ops.reads_visible(call, keys, values):
            states = kv_cache.whole_or_nan(*states)
        groups = list(zip(step.groups, step.token_ranges, strict=True))
        apart = [each for each in groups if ops.attend_decode is not None and each[0].decodes]
        outputs = []
        for group, tokens in apart:  # decode rows come first in a step
            key, value = (each[tokens] for each in states)
            own, query = _call_of_group(call, group.position_ids, tokens)
            outputs.append(ops.attend_decode(own, group, query, keys, values, key, value))
        self._write_keys(states, keys, values)
        for group, tokens in groups[len(apart) :]:
            own, query = _call_of_group(call, group.position_ids, tokens)
            outputs.append(ops.attend_cache(own, group, query, keys, values))
        flat = [output.flatten(0, 1) for output in outputs]
        return torch.cat(flat)[None] if len(flat) > 1 else flat[0][None]


def _call_of_group(call: AttentionCall, rows: Tensor, tokens: slice) -> tuple[AttentionCall, Tensor]:
    """Return the call and the query `[rows, heads, tokens, key_dim]` of rows with some tokens of the step."""
    if not call.attends_to_all:  # selections are those of its tokens
        compressed, selected = call.compressed, call.selected
        if compressed is not None and compressed.selected is not None:
            compressed = replace(compressed, selected=compressed.selected[tokens].unflatten(0, rows.shape))
        if selected is not None:
            selected = selected[tokens].unflatten(0, rows.shape).transpose(1, 2)
        call = replace(call, compressed=compressed, selected=selected)
    return call, call.query[0, :, tokens].unflatten(1, tuple(rows.shape)).transpose(0, 1)


def _by_token(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1)


def attend_cache(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    """Attend with `query [rows, heads, tokens, key_dim]` by operators that every target can lower: `[rows, tokens, heads, value_dim]`."""
    rows, heads, tokens, _ = query.shape
    keys = kv_cache.read_cache(keys, group.blocks, rows, group.context_length)
    values = kv_cache.read_cache(values, group.blocks, rows, group.context_length)
    kv_heads = keys.shape[1]
    # The query heads of one kv head become query tokens: keys and values are never repeated.
    query = query.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
    visible = selected_of(call, group.visible(call.sliding_window))
    broken = kv_cache.broken_columns(keys)
    seen = group.seen(call.sliding_window)
    if call.compressed is not None:
        assert isinstance(keys, Tensor) and isinstance(values, Tensor)  # checks of configs refuse others
        more, sees_more = compressed_of(call.compressed, group)
        keys, values = torch.cat([keys, more], 2), torch.cat([values, more], 2)
        visible = torch.cat([visible, sees_more[:, None].expand(-1, visible.shape[1], -1, -1)], -1)
        seen = torch.cat([seen, sees_more.any(1)], -1)
        broken = torch.cat([broken, kv_cache.broken_columns(more)], -1)
    kept = seen & (broken == 0)
    values = select_columns(values, kept)
    added = None
    if call.column_bias is not None:
        added = added_bias(call.column_bias, group.position_ids, 0, group.context_length)
    if call.softcap is None and call.sinks is None and isinstance(keys, Tensor) and isinstance(values, Tensor):
        # Minus infinity hides any finite score, and only those are left; who sees a broken token has NaN among its own.
        bias = torch.where(visible, broken[:, None, None], -torch.inf)
        bias = bias if added is None else bias + added
        output = _attend_fused(query, select_columns(keys, kept), values, bias, call.scaling)
    else:
        output = _attend_explicit(query, keys, values, visible, added, call)
    return output.unflatten(2, (heads // kv_heads, tokens)).flatten(1, 2).transpose(1, 2)


def added_bias(table: Tensor, position_ids: Tensor, start: int, stop: int) -> Tensor:
    """Return what is added to scores, `[rows, heads, tokens, stop - start]` float32, from a table `[heads, columns]`.

    What a token's own column gets is taken off: so it is small where weights are large. `position_ids [rows, tokens]` are -1 in idle rows.
    """
    table, places = table.float(), position_ids.clamp(min=0)
    own = table.index_select(1, places.flatten()).unflatten(1, tuple(places.shape)).transpose(0, 1)
    return table[:, None, start:stop] - own[..., None]


def selected_of(call: AttentionCall, visible: Tensor, start: int = 0) -> Tensor:
    """Narrow `visible [rows, tokens, columns]`, from column `start` on, to the selection: `[rows, 1 or kv_heads, tokens, columns]`."""
    if call.selected is None:
        return visible[:, None]
    return visible[:, None] & call.selected[..., start : start + visible.shape[-1]]


def compressed_of(compressed: CompressedKeys, group: AttentionRows) -> tuple[Tensor, Tensor]:
    """Return compressed keys of a group of rows, `[rows, 1, groups, dim]`, and those that a token attends to, `[rows, tokens, groups]`."""
    groups = group.context_length // compressed.rate
    keys = kv_cache.read_cache(compressed.keys, group.slots, len(group.position_ids), groups)
    visible = group.visible_groups(compressed.rate)
    return keys, visible if compressed.selected is None else visible & compressed.selected


@overload
def select_columns(states: Tensor, kept: Tensor) -> Tensor: ...
@overload
def select_columns(states: Stored, kept: Tensor) -> Stored: ...
def select_columns(states: Stored, kept: Tensor) -> Stored:
    """Return keys or values `[rows, kv_heads, columns, dim]` with zeros in columns that `kept [rows, columns]` leaves out."""
    if isinstance(states, CodedStates):  # codes are always finite
        return CodedStates(states.codes, select_columns(states.scale, kept))
    return torch.where(kept[:, None, :, None], states, states.new_zeros(()))


def _attend_fused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """Attend in one kernel; a row of minus infinities in `bias [rows, 1, kv_heads or heads, tokens, context]` gives zeros."""
    bias, kv_heads = bias.to(query.dtype), keys.shape[1]
    if bias.shape[1] in (1, kv_heads):
        bias = bias.repeat(1, 1, query.shape[2] // bias.shape[2], 1)
    else:
        bias = bias.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)


def _attend_explicit(
    query: Tensor, keys: Stored, values: Stored, visible: Tensor, added: Tensor | None, call: AttentionCall
) -> Tensor:
    """Attend with soft-capping (Gemma 2), attention sinks (GPT-OSS) or over codes; scores and softmax in float32."""
    rows, kv_heads, _, _ = query.shape
    tokens = visible.shape[2]
    scores = raw_scores(query, keys, torch.float32) * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.unflatten(2, (-1, tokens))  # [rows, kv_heads, group, tokens, context]
    if added is not None:
        scores = scores + added.unflatten(1, (kv_heads, -1))
    scores = torch.where(visible[:, :, None], scores, MASKED)
    if call.sinks is None:
        weights = torch.softmax(scores, dim=-1)
        return weighted_sum(weights.flatten(2, 3), values, torch.float32).to(query.dtype)
    columns = scores.shape[-1]
    if columns % _VECTOR:
        scores = nn.functional.pad(scores, (0, -columns % _VECTOR), value=MASKED)
    sinks = call.sinks.float().view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, tokens, 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :columns]
    return weighted_sum(weights.flatten(2, 3), values, torch.float32).to(query.dtype)


@dataclass
class KeyRecorder(StateRecorder):
    calls: LayerCalls = field(default_factory=LayerCalls)

    def attend(self, call: AttentionCall) -> Tensor:
        self.store(call.layer_idx, call.key, call.value)
        return call.query.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[-1]))

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        number = self.calls.number_call(layer_idx)
        self.add_state("keys and values twice", number, key.shape[1], key.shape[-1], value.shape[-1])
        return key, value
