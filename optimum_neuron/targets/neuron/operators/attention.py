# SPDX-License-Identifier: Apache-2.0
"""Attention as the Neuron compiler takes it: in parts that are joined, with scores and softmax in float32, written out.

Decode rows attend over the cache as it was before the step, and apart over their own token, so nothing waits for the step's scatter.
Chunk rows attend over what was written, one block of columns after the other, so scores exist one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ....step.attention import cached_attention, kv_cache
from ....step.attention.coded_states import Stored, as_kept, numbers, weighted_sum
from ....step.attention.coded_states import raw_scores as products
from ....step.attention.rows import AttentionCall, AttentionRows
from ..sdk.hardware import CHIPS


# Float32 scores of a block. A third of a core's memory on any chip: its weights in the model's type take half as much, and
# as much is left to keys, values and queries.
SCORES_LIMIT = min(chip.sbuf for chip in CHIPS.values()) // 3
# Columns that one instruction of the tensor engine takes.
COLUMNS = 512

# Outputs `[rows, kv_heads, group * tokens, value_dim]` in float32 and their log-sum-exp: group query heads share a kv head.
State = tuple[Tensor, Tensor]
# From a range of columns to which of them each token sees, `[rows, 1 or kv_heads, tokens, columns]`, which are multiplied with
# weights at all, `[rows, columns]`, as zeros stand for the values of the others, and what is added to scores,
# `[rows, heads, tokens, columns]`.
Look = Callable[[int, int], tuple[Tensor, Tensor, Tensor | None]]


def attend_decode(
    call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored, key: Tensor, value: Tensor
) -> Tensor:
    """Attend with decode rows over the cache before the step and over their own tokens.

    Args:
        query: `[rows, heads, 1, key_dim]`.
        keys, values: the layer's whole cache, without what the step writes.
        key, value: `[rows, kv_heads, dim]`, which the step writes.

    Returns:
        `[rows, 1, heads, value_dim]`.
    """
    rows, kv_heads, _ = key.shape
    keys, values = (kv_cache.read_cache(each, group.blocks, rows, group.context_length) for each in (keys, values))
    _, width = score_block(query.shape[0] * query.shape[1], 1, group.context_length)
    query = by_kv_head(query, kv_heads)

    def look(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        # A broken token's values may stay: the row's one token sees it, and is NaN by its scores.
        earlier = cached_attention.selected_of(call, group.earlier(call.sliding_window, start, stop), start)
        seen = earlier[:, 0] if earlier.shape[1] == 1 else earlier.any(1)
        return earlier, seen[:, 0], _find_bias(call, group, start, stop)

    past = _over_blocks(call, query, keys, values, look, width)
    own = own_token(call, query, as_kept(key, keys), as_kept(value, values))
    if call.selected is not None:
        column = torch.arange(group.context_length, dtype=torch.int32)
        attended = (call.selected & (column == group.position_ids[:, None, :, None])).any(-1)
        own = own[0], torch.where(attended, own[1], cached_attention.MASKED)
    state = _with_compressed(call, group, query, merge_attention_states(*past, *own))
    return by_token(with_sinks(call, state), value.dtype, 1)


def own_token(call: AttentionCall, query: Tensor, key: Stored, value: Stored) -> State:
    """Attend with `query [rows, kv_heads, group, key_dim]` over the rows' own `key`, `value [rows, kv_heads, dim]` alone."""
    return numbers(value)[:, :, None], raw_scores(call, query, key[:, :, None])[..., 0]


def attend_cache(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    """Attend as `step.attention.attend_cache`, with scores of at most `SCORES_LIMIT` bytes at a time."""
    rows, heads, tokens, _ = query.shape
    keys, values = (kv_cache.read_cache(each, group.blocks, rows, group.context_length) for each in (keys, values))
    length, width = score_block(rows * heads, tokens, group.context_length)
    outputs = []
    for first in range(0, tokens, length):
        last = first + length
        own, part = call, by_kv_head(query[:, :, first:last], keys.shape[1])
        if own.compressed is not None and own.compressed.selected is not None:
            own = replace(own, compressed=replace(own.compressed, selected=own.compressed.selected[:, first:last]))
        if own.selected is not None:
            own = replace(own, selected=own.selected[:, :, first:last])
        rows_part = group.part(first, last)
        state = _over_blocks(call, part, keys, values, _make_look(own, rows_part, keys), width)
        state = _with_compressed(own, rows_part, part, state)
        outputs.append(by_token(with_sinks(call, state), query.dtype, length))
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _with_compressed(call: AttentionCall, group: AttentionRows, query: Tensor, state: State) -> State:
    """Join a state with attention of `query [rows, kv_heads, group * tokens, key_dim]` over keys for several tokens each."""
    if call.compressed is None:
        return state
    keys, attended = cached_attention.compressed_of(call.compressed, group)
    kept = attended.any(1) & (kv_cache.broken_columns(keys) == 0)

    def look(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        return attended[:, None, :, start:stop], kept[:, start:stop], None

    rows, kv_heads, queries, _ = query.shape
    tokens = attended.shape[1]
    _, width = score_block(rows * kv_heads * queries // tokens, tokens, keys.shape[2])
    return merge_attention_states(*state, *_over_blocks(call, query, keys, keys, look, width))


def score_block(heads: int, tokens: int, columns: int) -> tuple[int, int]:
    """Return how many tokens of a row and columns attend at a time, so that scores of all rows' query heads keep to `SCORES_LIMIT`.

    All blocks of tokens are alike, so that a token's result does not depend on its block.
    """
    limit = SCORES_LIMIT // (4 * heads)
    if tokens * columns <= limit:
        return tokens, columns
    width = min(columns, max(COLUMNS, limit // tokens // COLUMNS * COLUMNS))
    length = max((each for each in range(1, tokens + 1) if tokens % each == 0 and each * width <= limit), default=1)
    return length, width


def _make_look(call: AttentionCall, group: AttentionRows, keys: Stored) -> Look:
    window = call.sliding_window

    def look(start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        # A token of the row may see a broken one that another does not.
        kept = group.seen(window, start, stop) & (kv_cache.broken_columns(keys[:, :, start:stop]) == 0)
        visible = cached_attention.selected_of(call, group.visible(window, start, stop), start)
        return visible, kept, _find_bias(call, group, start, stop)

    return look


def _find_bias(call: AttentionCall, group: AttentionRows, start: int, stop: int) -> Tensor | None:
    return (
        None
        if call.column_bias is None
        else cached_attention.added_bias(call.column_bias, group.position_ids, start, stop)
    )


def _over_blocks(call: AttentionCall, query: Tensor, keys: Stored, values: Stored, look: Look, width: int) -> State:
    state: State | None = None
    for start in range(0, keys.shape[2], width):
        stop = min(start + width, keys.shape[2])
        block = attend_columns(call, query, keys[:, :, start:stop], values[:, :, start:stop], *look(start, stop))
        state = block if state is None else merge_attention_states(*state, *block)
    assert state is not None
    return state


def attend_columns(
    call: AttentionCall,
    query: Tensor,
    keys: Stored,
    values: Stored,
    visible: Tensor,
    kept: Tensor,
    added: Tensor | None,
) -> State:
    """Attend with `query [rows, kv_heads, group * tokens, key_dim]` over `keys [rows, kv_heads, columns, key_dim]`, as a `Look` says.

    A token that sees none of them gets a log-sum-exp so low that its weight is zero next to any other's.
    """
    values = cached_attention.select_columns(values, kept)
    # [rows, kv_heads, group, tokens, columns]
    scores = raw_scores(call, query, keys).unflatten(2, (-1, visible.shape[2]))
    if added is not None:
        scores = scores + added.unflatten(1, (keys.shape[1], -1))
    fill = cached_attention.MASKED_HALF if query.dtype == torch.float16 else cached_attention.MASKED
    scores = torch.where(visible[:, :, None], scores, fill).flatten(2, 3)
    largest = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    output = weighted_sum(weights, values, _type_of_codes(query)).float() * (1.0 / total)
    return output, (largest + torch.log(total))[..., 0]


def _type_of_codes(query: Tensor) -> torch.dtype:
    """Return the type in which codes are multiplied: each is exact in any, but a sum of them would leave float16."""
    return torch.float32 if query.dtype == torch.float16 else query.dtype


def raw_scores(call: AttentionCall, query: Tensor, keys: Stored) -> Tensor:
    """Return `[rows, kv_heads, group * tokens, columns]` in float32, without a mask."""
    scores = products(query, keys, _type_of_codes(query)) * call.scaling
    return scores if call.softcap is None else torch.tanh(scores * (1.0 / call.softcap)) * call.softcap


def with_sinks(call: AttentionCall, state: State) -> State:
    """Give sinks their share of a head's weight, as keys without values would take it."""
    if call.sinks is None:
        return state
    output, total = state
    rows, kv_heads, queries = total.shape
    group = call.sinks.float().view(1, kv_heads, -1, 1)
    sinks = group.expand(rows, -1, -1, queries // group.shape[2]).flatten(2, 3)
    return merge_attention_states(output, total, torch.zeros_like(output), sinks)


def by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """Turn `[rows, heads, tokens, dim]` into `[rows, kv_heads, group * tokens, dim]`: keys and values are never repeated."""
    return query.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def by_token(state: State, dtype: torch.dtype, tokens: int) -> Tensor:
    """Return a state's output as `[rows, tokens, heads, value_dim]`."""
    return state[0].to(dtype).unflatten(2, (-1, tokens)).flatten(1, 2).transpose(1, 2)


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys, by the rule of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    A side that saw no key has a log-sum-exp of minus infinity, or one so far below the other's that its weight is zero in float32. Its
    output has no effect, so the other side comes back to the bit. Two sides of minus infinity give 0 and minus infinity. A side that saw
    a key that is not finite has NaN, and so have both together.

    Args:
        out_a, out_b: `[..., value_dim]`, normalized outputs of each side.
        lse_a, lse_b: `[...]` float32, natural logarithms of the sums of exponentials of each side's scores.

    Returns:
        The joint output, in the type of `out_a`, and its log-sum-exp in float32.
    """
    empty = -torch.inf
    largest = torch.maximum(lse_a, lse_b)
    reference = torch.where(largest == empty, 0.0, largest)  # -inf - (-inf) is NaN
    weight_a, weight_b = torch.exp(lse_a - reference), torch.exp(lse_b - reference)
    total = (weight_a + weight_b).clamp(min=1.0)  # the larger side's weight is 1, or both are 0

    def share_of(out: Tensor, weight: Tensor) -> Tensor:
        return torch.where(weight[..., None] == 0, 0.0, out.float()) * (weight / total)[..., None]

    joint = share_of(out_a, weight_a) + share_of(out_b, weight_b)
    return joint.to(out_a.dtype), torch.where(largest == empty, empty, reference + torch.log(total))


def join_attention_states(out: Tensor, lse: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Join attention over disjoint sets of keys that lie along `dim`, and are added up in their order there.

    Args:
        out: `[..., value_dim]` float32, normalized outputs; finite, also of a part that saw no key.
        lse: `[...]` float32; of a part that saw no key so far below the others' that its weight is zero. At least one is finite.

    Returns:
        The joint output and its log-sum-exp, without that dimension.
    """
    largest = lse.amax(dim, keepdim=True)
    weights = torch.exp(lse - largest)
    total = weights.sum(dim)
    joint = (out * weights[..., None]).sum(dim) * (1.0 / total)[..., None]
    return joint, largest.squeeze(dim) + torch.log(total)
