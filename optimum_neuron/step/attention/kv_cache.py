# SPDX-License-Identifier: Apache-2.0
"""The static cache. This module alone knows the layout of keys and values.

Per layer, keys and values are `[blocks, kv_heads, block_length, head_dim]`; as codes (coded_states.py) they have scales. A row has the
blocks of its table, in their order. Without blocks, row i has one: its slot, of `sequence_length` tokens. Blocks after those that rows may
have are trash: each padding token writes to its own place there. So a scatter never has two equal indices, and padding never touches what
is live. Readers select columns, and multiply nothing by zero: one that a token does not see has no effect, whatever it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import overload

import torch
from torch import Tensor, nn

from ..spec import TensorSpec
from .coded_states import CodedStates, Stored, round_states


class KVCache(nn.Module):
    """The state buffers of a model, zeroed, by the names of `state_specs` without their prefix.

    A trace reads none of them: `make=torch.empty` takes no memory for them.
    """

    def __init__(self, states: Iterable[TensorSpec], make: Callable[..., Tensor] = torch.zeros) -> None:
        super().__init__()
        for state in states:
            name = state.name.removeprefix("kv_cache.")
            self.register_buffer(name, make(state.shape, dtype=getattr(torch, state.dtype)))

    def find_state(self, role: str, *numbers: int) -> Tensor | None:
        """Return the buffer of a layer's state by its role and numbers (`LayerState.roles`); None where there is none."""
        return getattr(self, "_".join((role, *map(str, numbers))), None)

    def get_state(self, role: str, *numbers: int) -> Tensor:
        state = self.find_state(role, *numbers)
        assert state is not None
        return state

    def get_keys(self, layer_idx: int) -> tuple[Stored, Stored]:
        return self._find_stored("key", layer_idx), self._find_stored("value", layer_idx)

    def _find_stored(self, role: str, layer_idx: int) -> Stored:
        states, scale = self.get_state(role, layer_idx), self.find_state(f"{role}scale", layer_idx)
        return states if scale is None else CodedStates(states, scale)


def _put_tokens(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    heads = torch.arange(cache.shape[1], dtype=blocks.dtype)
    cache.index_put_((blocks[:, None], heads[None, :], columns[:, None]), states)


def write_tokens(
    cache: Stored,
    states: Tensor,
    blocks: Tensor,
    columns: Tensor,
    put: Callable[[Tensor, Tensor, Tensor, Tensor], None] = _put_tokens,
) -> None:
    """Write one token per index pair in place: `cache[blocks[t], :, columns[t]] = states[t]`, rounded where the cache has codes.

    `states` are `[tokens, kv_heads, head_dim]`, `blocks` and `columns` `[tokens]`; no pair occurs twice. `put` does it for plain numbers.
    """
    if isinstance(cache, Tensor):
        put(cache, states, blocks, columns)
        return
    rounded = round_states(states, cache.codes.dtype)
    put(cache.codes, rounded.codes, blocks, columns)
    put(cache.scale, rounded.scale, blocks, columns)


@overload
def read_cache(cache: Tensor, blocks: Tensor | None, rows: int, context_length: int) -> Tensor: ...
@overload
def read_cache(cache: Stored, blocks: Tensor | None, rows: int, context_length: int) -> Stored: ...
def read_cache(cache: Stored, blocks: Tensor | None, rows: int, context_length: int) -> Stored:
    """Return the first `context_length` tokens of some rows: `[rows, kv_heads, context_length, head_dim]`.

    `blocks` are those of each row `[rows, n]`, or `[rows]` where it has one; None reads blocks 0 to rows - 1 without a copy.
    """
    if isinstance(cache, CodedStates):
        return CodedStates(*(read_cache(each, blocks, rows, context_length) for each in (cache.codes, cache.scale)))
    if blocks is None:
        return cache[:rows, :, :context_length]
    if blocks.dim() == 1:
        return cache[:, :, :context_length].index_select(0, blocks)
    gathered = cache.index_select(0, blocks.flatten()).unflatten(0, (rows, -1))
    return gathered.transpose(1, 2).flatten(2, 3)[:, :, :context_length]


def whole_or_nan(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return `[tokens, kv_heads, dim]` each, all NaN for a token with a number that is not finite: `broken_columns` reads one."""
    total = key.float().sum((1, 2)) + value.float().sum((1, 2))
    nan = (total - total)[:, None, None]  # zero where all are finite; not a constant, which devices refuse
    key, value = (torch.where(nan == 0, states, nan.to(states.dtype)) for states in (key, value))
    return key, value


def broken_columns(keys: Stored) -> Tensor:
    """Return `[rows, columns]` float32 from `keys [rows, kv_heads, columns, dim]`: NaN for a token that `whole_or_nan` made NaN, else zero."""
    one = (keys if isinstance(keys, Tensor) else keys.scale)[:, 0, :, 0].float()
    return one - one


def write_indices(
    position_ids: Tensor, actual: Tensor, seq_ids: Tensor, trash_row: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Return cache row and column of every token of a row group, `[rows * tokens]` int32 each; padding goes to the trash row.

    `position_ids` and the mask `actual` are `[rows, tokens]`, `seq_ids [rows]` the slots. The trash column of a padding token is its number
    in the step, in which the group's first token is number `offset`.
    """
    rows, tokens = position_ids.shape
    own_index = torch.arange(offset, offset + rows * tokens, dtype=torch.int32).view(rows, tokens)
    row = torch.where(actual, seq_ids[:, None], trash_row)
    column = torch.where(actual, position_ids, own_index)
    return row.flatten(), column.flatten()


def block_indices(
    position_ids: Tensor, actual: Tensor, blocks: Tensor, block_length: int, trash: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Return block and column of every token, as `write_indices` does, in a cache of blocks of `block_length`, a power of two.

    `blocks [rows, tokens]` have each token's position; of padding, any. `trash` is the first block that takes padding.
    """
    rows, tokens = position_ids.shape
    own_index = torch.arange(offset, offset + rows * tokens, dtype=torch.int32).view(rows, tokens)
    own_block = torch.div(own_index, block_length, rounding_mode="floor") + trash
    block = torch.where(actual, blocks, own_block)
    column = torch.where(actual, position_ids, own_index) & (block_length - 1)
    return block.flatten(), column.flatten()
