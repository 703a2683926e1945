# SPDX-License-Identifier: Apache-2.0
"""Attention as the Neuron compiler takes it: in parts that are joined, with scores and softmax in float32, written out.

Decode rows attend over the cache as it was before the step, and apart over their own token, so nothing waits for the step's scatter.
Chunk rows attend over what was written, one block of columns after the other, so scores exist one block at a time.

No decode step gathers the blocks of its rows. Each physical block attends where it lies, with the query of the row that owns it, or of all
rows where several do. A row then joins its blocks' partial results in the order of its text: a vector and a number per block and head. So
neither the places of a row's blocks nor its neighbours change a bit of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from ....step.attention import cached_attention, kv_cache
from ....step.attention.coded_states import Stored, as_kept, numbers, raw_scores, weighted_sum
from ....step.attention.rows import AttentionCall, AttentionRows, OwnedBlocks
from ..sdk.hardware import CHIPS


# Float32 scores of a block: a third of any core's memory. Weights take half as much, and keys, values and queries the rest.
SCORES_LIMIT = min(chip.sbuf for chip in CHIPS.values()) // 3
# Columns that one instruction of the tensor engine takes.
COLUMNS = 512

# Outputs `[rows, kv_heads, group * tokens, value_dim]` in float32, of query heads by kv head, and their log-sum-exp.
State = tuple[Tensor, Tensor]
# From a range of columns to those that each token sees, `[rows, 1 or kv_heads, tokens, columns]`, those that are multiplied with
# weights at all, `[rows, columns]`, as zeros stand for the values of the others, and the summand of scores.
Seen = tuple[Tensor, Tensor, Tensor | None]
Look = Callable[[int, int], Seen]


def attend_decode(
    call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored, key: Tensor, value: Tensor
) -> Tensor:
    """Attend with `query [rows, heads, 1, key_dim]` over the cache before the step and the rows' own tokens: `[rows, 1, heads, value_dim]`.

    `keys` and `values` are the layer's whole cache of slots, or of blocks that rows own. The step writes `key`, `value [rows, kv_heads, dim]`.
    """
    if group.owned is not None:
        return attend_blocks(call, group.owned, query, keys, values, key, value)
    rows, kv_heads, _ = key.shape
    keys, values = (kv_cache.read_cache(each, group.blocks, rows, group.context_length) for each in (keys, values))
    _, width = score_block(query.shape[0] * query.shape[1], 1, group.context_length)
    query = _by_kv_head(query, kv_heads)

    def look(start: int, stop: int) -> Seen:
        # A broken token's values may stay: the row's one token sees it, and is NaN by its scores.
        earlier = cached_attention.selected_of(call, group.earlier(call.sliding_window, start, stop), start)
        seen = earlier[:, 0] if earlier.shape[1] == 1 else earlier.any(1)
        return earlier, seen[:, 0], _find_bias(call, group, start, stop)

    past = _over_blocks(call, query, keys, values, look, width)
    own = _own_token(call, query, as_kept(key, keys), as_kept(value, values))
    if call.selected is not None:
        column = torch.arange(group.context_length, dtype=torch.int32)
        attended = (call.selected & (column == group.position_ids[:, None, :, None])).any(-1)
        own = own[0], torch.where(attended, own[1], cached_attention.MASKED)
    state = _with_compressed(call, group, query, merge_attention_states(*past, *own))
    return _finish(call, state, value.dtype, 1)


def _own_token(call: AttentionCall, query: Tensor, key: Stored, value: Stored) -> State:
    """Attend with `query [rows, kv_heads, group, key_dim]` over the rows' own `key`, `value [rows, kv_heads, dim]` alone."""
    return numbers(value)[:, :, None], _raw_scores(call, query, key[:, :, None])[..., 0]


def attend_cache(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    """Attend as `step.attention.attend_cache`, with scores of at most `SCORES_LIMIT` bytes at a time."""
    rows, heads, tokens, _ = query.shape
    keys, values = (kv_cache.read_cache(each, group.blocks, rows, group.context_length) for each in (keys, values))
    length, width = score_block(rows * heads, tokens, group.context_length)
    outputs = []
    for first in range(0, tokens, length):
        last = first + length
        own, part = call, _by_kv_head(query[:, :, first:last], keys.shape[1])
        if own.compressed is not None and own.compressed.selected is not None:
            own = replace(own, compressed=replace(own.compressed, selected=own.compressed.selected[:, first:last]))
        if own.selected is not None:
            own = replace(own, selected=own.selected[:, :, first:last])
        rows_part = group.part(first, last)

        def look(start: int, stop: int, own: AttentionCall = own, group: AttentionRows = rows_part) -> Seen:
            # A token of the row may see a broken one that another does not.
            kept = group.seen(call.sliding_window, start, stop)
            kept = kept & (kv_cache.broken_columns(keys[:, :, start:stop]) == 0)
            visible = group.visible(call.sliding_window, start, stop)
            return cached_attention.selected_of(own, visible, start), kept, _find_bias(own, group, start, stop)

        state = _over_blocks(call, part, keys, values, look, width)
        state = _with_compressed(own, rows_part, part, state)
        outputs.append(_finish(call, state, query.dtype, length))
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _with_compressed(call: AttentionCall, group: AttentionRows, query: Tensor, state: State) -> State:
    """Join a state with attention of `query [rows, kv_heads, group * tokens, key_dim]` over keys for several tokens each."""
    if call.compressed is None:
        return state
    keys, attended = cached_attention.compressed_of(call.compressed, group)
    kept = attended.any(1) & (kv_cache.broken_columns(keys) == 0)

    def look(start: int, stop: int) -> Seen:
        return attended[:, None, :, start:stop], kept[:, start:stop], None

    tokens = attended.shape[1]
    _, width = score_block(query.shape[:3].numel() // tokens, tokens, keys.shape[2])
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


def _find_bias(call: AttentionCall, group: AttentionRows, start: int, stop: int) -> Tensor | None:
    if call.column_bias is None:
        return None
    return cached_attention.added_bias(call.column_bias, group.position_ids, start, stop)


def _over_blocks(call: AttentionCall, query: Tensor, keys: Stored, values: Stored, look: Look, width: int) -> State:
    ranges = ((start, min(start + width, keys.shape[2])) for start in range(0, keys.shape[2], width))
    return _merge_all(
        _attend_columns(call, query, keys[:, :, start:stop], values[:, :, start:stop], look(start, stop))
        for start, stop in ranges
    )


def _attend_columns(call: AttentionCall, query: Tensor, keys: Stored, values: Stored, seen: Seen) -> State:
    """Attend with `query [rows, kv_heads, group * tokens, key_dim]` over `keys [rows, kv_heads, columns, key_dim]`.

    A token that sees none of them gets a log-sum-exp so low that its weight is zero next to any other's.
    """
    visible, kept, added = seen
    values = cached_attention.select_columns(values, kept)
    # [rows, kv_heads, group, tokens, columns]
    scores = _raw_scores(call, query, keys).unflatten(2, (-1, visible.shape[2]))
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


def _raw_scores(call: AttentionCall, query: Tensor, keys: Stored) -> Tensor:
    """Return `[rows, kv_heads, group * tokens, columns]` in float32, without a mask."""
    scores = raw_scores(query, keys, _type_of_codes(query)) * call.scaling
    return scores if call.softcap is None else torch.tanh(scores * (1.0 / call.softcap)) * call.softcap


def _finish(call: AttentionCall, state: State, dtype: torch.dtype, tokens: int) -> Tensor:
    """Return a state's output as `[rows, tokens, heads, value_dim]`; sinks get their share of a head's weight, as keys without values."""
    if call.sinks is not None:
        output, total = state
        rows, kv_heads, queries = total.shape
        group = call.sinks.float().view(1, kv_heads, -1, 1)
        sinks = group.expand(rows, -1, -1, queries // group.shape[2]).flatten(2, 3)
        state = merge_attention_states(output, total, torch.zeros_like(output), sinks)
    return state[0].to(dtype).unflatten(2, (-1, tokens)).flatten(1, 2).transpose(1, 2)


def _merge_all(states: Iterable[State]) -> State:
    return reduce(lambda one, other: merge_attention_states(*one, *other), states)


def _by_kv_head(query: Tensor, kv_heads: int) -> Tensor:
    """Turn `[rows, heads, tokens, dim]` into `[rows, kv_heads, group * tokens, dim]`: keys and values are never repeated."""
    return query.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Join attention over two disjoint sets of keys, by the rule of the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    A side that saw no key has a log-sum-exp of minus infinity, or one so low that its weight is zero in float32: the other side comes back
    to the bit. Two sides of minus infinity give 0 and minus infinity. NaN of a side, which saw a key that is not finite, stays.

    A side has a normalized output `[..., value_dim]`, and `[...]` float32, the natural logarithm of the sum of its scores' exponentials.
    Return the joint output, in the type of `out_a`, and its log-sum-exp in float32.
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


def attend_blocks(
    call: AttentionCall, owned: OwnedBlocks, query: Tensor, keys: Stored, values: Stored, key: Tensor, value: Tensor
) -> Tensor:
    """Attend as `attend_decode`, with `keys`, `values [blocks, kv_heads, block_length, dim]`."""
    kv_heads = key.shape[1]
    query = _by_kv_head(query, kv_heads)
    heads = heads_at_once(len(owned.block_owner), query.shape[2], keys.shape[2], value.shape[-1])
    parts, own_call = [], call
    for first in range(0, kv_heads, heads):
        part = slice(first, first + heads)
        if call.column_bias is not None:  # only what is added to scores differs between heads
            own_call = replace(call, column_bias=call.column_bias.unflatten(0, (kv_heads, -1))[part].flatten(0, 1))
        parts.append(_attend_past(own_call, owned, query[:, part], keys[:, part], values[:, part]))
    output, total = parts[0] if len(parts) == 1 else (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
    own = _own_token(call, query, as_kept(key, keys), as_kept(value, values))
    return _finish(call, merge_attention_states(output, total, *own), value.dtype, 1)


def heads_at_once(blocks: int, group: int, block_length: int, value_dim: int) -> int:
    """Return the key/value heads, at least one, that keep scores and partial results to `SCORES_LIMIT`."""
    return max(1, SCORES_LIMIT // (4 * blocks * group * max(block_length, value_dim + 1)))


def _attend_past(call: AttentionCall, owned: OwnedBlocks, query: Tensor, keys: Stored, values: Stored) -> State:
    rows, kv_heads, group, _ = query.shape
    blocks, length = len(owned.block_owner), keys.shape[2]
    visible, table = owned.seen(call.sliding_window, length), call.column_bias
    added = None if table is None else owned.added_bias(table, length)
    # A broken token's values may stay: the owner alone sees the block, and is NaN by its scores.
    every = query.index_select(0, owned.block_owner)
    read = keys[:blocks], values[:blocks]
    state = _attend_columns(call, every, *read, (visible[:, None], visible[:, 0], added))
    entries = [_as_entries(*state)]
    if owned.shared_blocks is not None:
        keys, values = (each.index_select(0, owned.shared_blocks) for each in (keys, values))
        visible = owned.seen(call.sliding_window, length, shared=True)
        kept = visible.any(1) & (kv_cache.broken_columns(keys) == 0)
        every = query.permute(1, 2, 0, 3).flatten(1, 2)[None].expand(len(keys), -1, -1, -1)
        added = None if table is None else owned.added_bias(table, length, shared=True)
        state = _attend_columns(call, every, keys, values, (visible[:, None], kept, added))
        # [X, kv_heads, group * R, ...] to [X * R, kv_heads, group, ...]
        entries.append(_as_entries(*(each.unflatten(2, (group, rows)).movedim(3, 1).flatten(0, 1) for each in state)))
    width = entries[0].shape[1]
    nothing = torch.cat(
        [torch.zeros(1, width - kv_heads * group), torch.full((1, kv_heads * group), cached_attention.MASKED)], dim=1
    )
    return _join_entries(torch.cat([*entries, nothing]), owned.joined, (kv_heads, group))


def _as_entries(output: Tensor, total: Tensor) -> Tensor:
    return torch.cat([output.flatten(1), total.flatten(1)], dim=1)


def _join_entries(entries: Tensor, joined: Tensor, sizes: tuple[int, int]) -> State:
    """Join each row's entries, in their order, to one state: `[R, kv_heads, group, value_dim]` and its log-sum-exp."""
    rows, places = joined.shape
    heads = sizes[0] * sizes[1]
    at_once = max(1, SCORES_LIMIT // (4 * rows * entries.shape[1]))

    def join_some(some: Tensor) -> State:
        found = entries.index_select(0, some.flatten()).unflatten(0, (rows, -1))
        output, total = found[..., :-heads].unflatten(2, (*sizes, -1)), found[..., -heads:].unflatten(2, sizes)
        # An entry that saw no key is so far below the others that its weight is zero; its output is finite.
        largest = total.amax(1, keepdim=True)
        weights = torch.exp(total - largest)
        summed = weights.sum(1)
        joint = (output * weights[..., None]).sum(1) * (1.0 / summed)[..., None]
        return joint, largest.squeeze(1) + torch.log(summed)

    return _merge_all(join_some(joined[:, start : start + at_once]) for start in range(0, places, at_once))
