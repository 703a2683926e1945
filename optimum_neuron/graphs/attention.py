# SPDX-License-Identifier: Apache-2.0
"""Attention over the static cache, as transformers' attention interface calls it.

Write, then attend: a layer first writes the keys and values of the step's tokens into the cache, then every query
attends over cache columns under masks made from positions alone. So a token sees the same keys in the same order
whatever chunk it came in and whoever its neighbours are. What it does not see is selected away: zero times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from . import kv_cache
from .convolution import state_of
from .interface import AttentionCall
from .masks import AttentionChunk, CausalMask, UnsupportedModelError, Window
from .spec import ConvolutionState, LayerCache


# Finite: a row of minus infinities is NaN after softmax. Far below any score, also when added to one that is finite.
MASKED = -1e9
MASKED_HALF = -3e4  # float16 ends at -65504
# Between the numbers of the caches of a layer that attends several times; more than any model's layers.
CALLS_APART = 100_000


@dataclass
class LayerCalls:
    """Numbers the caches of one forward pass: a layer that attends several times has one for each time."""

    counts: dict[int, int] = field(default_factory=dict)

    def number(self, layer_idx: int) -> int:
        """The layer's own number where it attends once."""
        before = self.counts.get(layer_idx, 0)
        self.counts[layer_idx] = before + 1
        return layer_idx + before * CALLS_APART


@dataclass
class LayerRecorder:
    """Attention and convolution backend that learns what each layer keeps from one pass of the model."""

    by_itself: bool = False
    layers: list[LayerCache] = field(default_factory=list)
    convolutions: list[ConvolutionState] = field(default_factory=list)
    calls: LayerCalls = field(default_factory=LayerCalls)

    def attend(self, call: AttentionCall) -> Tensor:
        self.store(call.layer_idx, call.key, call.value)
        return call.query.new_zeros((1, call.query.shape[2], call.query.shape[1], call.value.shape[-1]))

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        number = self.calls.number(layer_idx)
        self.layers.append(LayerCache(number, key.shape[1], key.shape[-1], value.shape[-1]))
        return key, value

    def convolve(self, layer_idx: int, index: int, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        state = state_of(layer_idx, index, inputs, weight)
        if any((each.layer_idx, each.index) == (layer_idx, index) for each in self.convolutions):
            raise UnsupportedModelError(f"layer {layer_idx} keeps inputs of several convolutions in one place")
        self.convolutions.append(state)
        return inputs

    def bias(self, mask: CausalMask, dtype: torch.dtype) -> Tensor | None:
        if not self.by_itself:
            return None
        mask.visible_window()
        return torch.zeros((1, 1, 1, 1), dtype=dtype)


@dataclass
class AttentionRows:
    """A group of rows of a step as attention sees it: all rows have the same number of tokens.

    Attributes:
        position_ids: `[rows, tokens]`; padding repeats the last position, an idle row has -1.
        seq_ids: `[rows]`, slots to read; None where row i is slot i.
    """

    position_ids: Tensor
    seq_ids: Tensor | None
    context_length: int
    masks: dict[Window, Tensor] = field(default_factory=dict)
    columns: dict[Window, Tensor] = field(default_factory=dict)

    def visible(self, sliding_window: Window) -> Tensor:
        """`[rows, tokens, context_length]`: which cache columns a token may see. Built once per window and step."""
        if sliding_window not in self.masks:
            columns = torch.arange(self.context_length, dtype=torch.int32)
            positions = self.position_ids[:, :, None]
            visible = columns <= positions
            if isinstance(sliding_window, AttentionChunk):
                first = positions - positions % sliding_window.size
                visible = visible & (columns >= first)
            elif sliding_window is not None:
                visible = visible & (columns > positions - sliding_window)
            self.masks[sliding_window] = visible
        return self.masks[sliding_window]

    def seen(self, sliding_window: Window) -> Tensor:
        """`[rows, context_length]`: which cache columns any token of a row may see."""
        if sliding_window not in self.columns:
            self.columns[sliding_window] = self.visible(sliding_window).any(1)
        return self.columns[sliding_window]


# From a call, a row group, and the layer's cached keys and values to `[rows, tokens, heads, value_dim]`.
CacheAttention = Callable[[AttentionCall, AttentionRows, Tensor, Tensor, Tensor], Tensor]
# Whether a call's attention reads no key that a token does not see, so that what is written need not be marked.
ReadsVisible = Callable[[AttentionCall, Tensor, Tensor], bool]
# As kv_cache.write: from a layer's cache, `states [tokens, kv_heads, dim]`, and the row and column of each token.
CacheWrite = Callable[[Tensor, Tensor, Tensor, Tensor], None]


@dataclass
class CachedAttention:
    """Attention backend of the step graphs.

    Attributes:
        write_rows, write_columns: `[tokens]`, where each token of the step goes in the cache.
        groups: the row groups, in the order of their tokens in the step.
        attend_cache, write_cache: how a row group attends over a layer's cache, and how tokens get into it.
        reads_visible: which calls `attend_cache` serves without looking at what a token does not see.
    """

    cache: kv_cache.KVCache
    write_rows: Tensor
    write_columns: Tensor
    groups: list[AttentionRows]
    attend_cache: CacheAttention
    write_cache: CacheWrite
    reads_visible: ReadsVisible
    by_itself: bool = False
    calls: LayerCalls = field(default_factory=LayerCalls)

    def _write(
        self, layer_idx: int, key: Tensor, value: Tensor, call: AttentionCall | None = None
    ) -> tuple[Tensor, Tensor]:
        keys, values = self.cache.layer(self.calls.number(layer_idx))
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
        if call is None or not self.reads_visible(call, keys, values):
            key, value = kv_cache.whole_or_nan(key, value)
        self.write_cache(keys, key, self.write_rows, self.write_columns)
        self.write_cache(values, value, self.write_rows, self.write_columns)
        return keys, values

    def store(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """For a model that attends by itself: `[1, kv_heads, slots * context_length, dim]`, keys and values of all slots.

        It adds a mask and multiplies, all tokens by all columns: so no column may hold what is not finite. Zeros stand
        for a token that is not, also for those that see it, and for all that nobody in the step sees.
        """
        context = self.groups[0].context_length
        states = self._write(layer_idx, key, value)
        slots = states[0].shape[0] - 1
        keys, values = (kv_cache.read(each, None, slots, context) for each in states)
        mine = self.write_rows == torch.arange(slots, dtype=torch.int32)[:, None]
        last = torch.where(mine, self.write_columns, -1).amax(1, keepdim=True)
        kept = (torch.arange(context, dtype=torch.int32) <= last) & (kv_cache.broken(keys) == 0)
        keys, values = (select_columns(each, kept).transpose(0, 1).flatten(1, 2)[None] for each in (keys, values))
        return keys, values

    def bias(self, mask: CausalMask, dtype: torch.dtype) -> Tensor | None:
        """`[1, 1, tokens, slots * context_length]`, to be added to the scores of all slots."""
        if not self.by_itself:
            return None
        window = mask.visible_window()
        slots = torch.arange(next(self.cache.buffers()).shape[0] - 1, dtype=torch.int32)
        rows = []
        for group in self.groups:
            own = slots[: len(group.position_ids)] if group.seq_ids is None else group.seq_ids
            visible = group.visible(window)[:, :, None] & (own[:, None] == slots)[:, None, :, None]
            rows.append(visible.flatten(2).flatten(0, 1))
        fill = MASKED_HALF if dtype == torch.float16 else MASKED
        return torch.where(torch.cat(rows), 0.0, fill).to(dtype)[None, None]

    def attend(self, call: AttentionCall) -> Tensor:
        keys, values = self._write(call.layer_idx, call.key, call.value, call)
        outputs, start = [], 0
        for group in self.groups:
            rows, tokens = group.position_ids.shape
            stop = start + rows * tokens
            query = call.query[0, :, start:stop].unflatten(1, (rows, tokens)).transpose(0, 1)
            outputs.append(self.attend_cache(call, group, query, keys, values).flatten(0, 1))
            start = stop
        return torch.cat(outputs)[None] if len(outputs) > 1 else outputs[0][None]


def attend_cache(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The reference: torch operators that every target can lower.

    Args:
        query: `[rows, heads, tokens, key_dim]`.
        keys, values: the layer's whole cache.

    Returns:
        `[rows, tokens, heads, value_dim]`.
    """
    rows, heads, tokens, _ = query.shape
    keys = kv_cache.read(keys, group.seq_ids, rows, group.context_length)
    values = kv_cache.read(values, group.seq_ids, rows, group.context_length)
    kv_heads = keys.shape[1]
    # The query heads of one kv head become query tokens: keys and values are never repeated.
    query = query.unflatten(1, (kv_heads, heads // kv_heads)).flatten(2, 3)
    visible = group.visible(call.sliding_window)
    broken = kv_cache.broken(keys)
    kept = group.seen(call.sliding_window) & (broken == 0)
    values = select_columns(values, kept)
    if call.softcap is None and call.sinks is None:
        # Minus infinity hides any finite score, and only those are left; who sees a broken token has NaN among its own.
        bias = torch.where(visible, broken[:, None], -torch.inf)
        output = _fused(query, select_columns(keys, kept), values, bias, call.scaling)
    else:
        output = _explicit(query, keys, values, visible, call)
    return output.unflatten(2, (heads // kv_heads, tokens)).flatten(1, 2).transpose(1, 2)


def select_columns(states: Tensor, kept: Tensor) -> Tensor:
    """Keys or values `[rows, kv_heads, columns, dim]`, zero in columns that `kept [rows, columns]` leaves out."""
    return torch.where(kept[:, None, :, None], states, states.new_zeros(()))


def _fused(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scaling: float) -> Tensor:
    """`query [rows, kv_heads, group * tokens, dim]` over `keys [rows, kv_heads, context, dim]`, in one kernel.

    Args:
        bias: `[rows, tokens, context]`. A row of minus infinities, which sees nothing, gives zeros.
    """
    bias = bias.to(query.dtype)[:, None].repeat(1, 1, query.shape[2] // bias.shape[1], 1)
    return nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scaling)


def _explicit(query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, call: AttentionCall) -> Tensor:
    """The same with score soft-capping (Gemma 2) and attention sinks (GPT-OSS); scores and softmax in float32."""
    rows, kv_heads, _, _ = query.shape
    tokens = visible.shape[1]
    scores = (query @ keys.transpose(-1, -2)).float() * call.scaling
    if call.softcap is not None:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.unflatten(2, (-1, tokens))  # [rows, kv_heads, group, tokens, context]
    scores = torch.where(visible[:, None, None], scores, MASKED)
    if call.sinks is None:
        return torch.softmax(scores, dim=-1).to(values.dtype).flatten(2, 3) @ values
    sinks = call.sinks.float().view(1, kv_heads, -1, 1, 1).expand(rows, -1, -1, tokens, 1)
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return weights.to(values.dtype).flatten(2, 3) @ values


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over two disjoint sets of keys into attention over both.

    A side that saw no key has a log-sum-exp of minus infinity; plus infinity and NaN count as that too. Whatever its
    output holds is not looked at, so the other side comes back to the bit; two such sides give 0 and minus infinity.
    The rule is that of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Args:
        out_a, out_b: `[..., value_dim]`, normalized outputs of each side.
        lse_a, lse_b: `[...]` float32, natural logarithms of the sums of exponentials of each side's scores.

    Returns:
        The joint output, in the type of `out_a`, and its log-sum-exp in float32.
    """
    empty = -torch.inf
    lse_a, lse_b = (torch.where(lse.isfinite(), lse.float(), empty) for lse in (lse_a, lse_b))
    largest = torch.maximum(lse_a, lse_b)
    reference = torch.where(largest == empty, 0.0, largest)  # -inf - (-inf) is NaN
    weight_a, weight_b = torch.exp(lse_a - reference), torch.exp(lse_b - reference)
    total = weight_a + weight_b
    seen = total > 0
    divisor = torch.where(seen, total, 1.0)
    joint = sum(
        torch.where(weight[..., None] > 0, out.float(), 0.0) * (weight / divisor)[..., None]
        for out, weight in ((out_a, weight_a), (out_b, weight_b))
    )
    assert isinstance(joint, Tensor)
    return joint.to(out_a.dtype), torch.where(seen, reference + torch.log(divisor), empty)


def visible_groups(position_ids: Tensor, ratio: int, groups: int) -> Tensor:
    """Which compressed keys a token may see, where one key stands for `ratio` consecutive positions.

    A token sees the groups that end at or before its own position: `(position + 1) // ratio` of them. The bound is each
    token's own, never that of its chunk, so what a token sees does not depend on how its prompt was cut.

    Args:
        position_ids: `[rows, tokens]`; an idle row has -1 and sees nothing.
        groups: compressed keys that the cache has room for.

    Returns:
        `[rows, tokens, groups]`, bool.
    """
    complete = torch.div(position_ids + 1, ratio, rounding_mode="floor")
    return torch.arange(groups, dtype=torch.int32) < complete[:, :, None]
