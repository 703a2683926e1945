# SPDX-License-Identifier: Apache-2.0
"""The static KV cache, and what slots keep beside it. This module alone knows the layout of keys and values.

Per layer, keys and values are `[blocks, kv_heads, block_length, head_dim]`; as codes (coded_states.py) they have scales beside them,
`[blocks, kv_heads, block_length, 1]`. A row of a step has the blocks of its table, in
their order; without blocks, row i has one, its slot, of `sequence_length` tokens. Behind those that rows may have is trash:
tokens that are padding write there, each at its own place, so that a scatter never has two equal indices and padding never
touches what is live. That is one slot more, or as many blocks as a step's tokens fill.

What a column holds that a token does not see has no effect, whatever it is: readers select, and multiply nothing by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor, nn

from .features.codes.coded_states import CodedStates, Stored, round_states
from .spec import TensorSpec


class KVCache(nn.Module):
    """State buffers, zeroed: `key_<layer>`, `value_<layer>`, of codes `keyscale_<layer>` and `valuescale_<layer>`, `index_<layer>`, `conv_<layer>_<index>`, of recurrences
    `state_<layer>_<index>`, `anchor_<layer>_<index>`, `tail_<layer>_<index>` and `scanned`, and of compressions `buffer_<layer>_<index>`
    and `group_<layer>_<index>`.

    Attributes:
        away: names of states that are elsewhere for now; to look for one is an error, also where one may have none.
    """

    def __init__(self, states: Iterable[TensorSpec]) -> None:
        super().__init__()
        self.away: set[str] = set()
        for state in states:
            name = state.name.removeprefix("kv_cache.")
            self.register_buffer(name, torch.zeros(state.shape, dtype=getattr(torch, state.dtype)))

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("away", ()):
            raise LookupError(f"{name} is away")
        return super().__getattr__(name)

    def layer(self, layer_idx: int) -> tuple[Stored, Stored]:
        """Keys and values of one layer, the buffers themselves."""
        return self._stored("key", layer_idx), self._stored("value", layer_idx)

    def _stored(self, role: str, layer_idx: int) -> Stored:
        states, scale = getattr(self, f"{role}_{layer_idx}"), getattr(self, f"{role}scale_{layer_idx}", None)
        return states if scale is None else CodedStates(states, scale)

    def index_keys(self, layer_idx: int) -> Tensor | None:
        """`[blocks, 1, block_length, dim]`, the keys by which a layer selects: the buffer itself; None where it selects nothing."""
        return getattr(self, f"index_{layer_idx}", None)

    def convolution(self, layer_idx: int, index: int) -> Tensor:
        """`[batch_size + 1, past, channels]`, what a convolution keeps: the buffer itself."""
        return getattr(self, f"conv_{layer_idx}_{index}")

    @property
    def scanned_tokens(self) -> Tensor | None:
        """`[batch_size + 1]` int32, how many tokens of each slot came in chunks (ScanRows); None without recurrences."""
        return getattr(self, "scanned", None)

    def recurrence(self, layer_idx: int, index: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """What a recurrence keeps, the buffers themselves: state, anchor and tail (ScanState)."""
        number = f"{layer_idx}_{index}"
        anchor, tail = (getattr(self, f"{name}_{number}", None) for name in ("anchor", "tail"))
        return getattr(self, f"state_{number}"), anchor, tail

    def compression(self, layer_idx: int, index: int) -> tuple[Tensor, Tensor] | None:
        """The last tokens of each slot that compressed keys are made of, and these keys, as `state_specs` has them: the buffers
        themselves; None where no text has as many tokens as a key stands for."""
        number = f"{layer_idx}_{index}"
        tokens = getattr(self, f"buffer_{number}", None)
        return None if tokens is None else (tokens, getattr(self, f"group_{number}"))


def write(cache: Stored, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    """Writes one token per index pair in place: `cache[blocks[t], :, columns[t]] = states[t]`, rounded where the cache has codes.

    Args:
        cache: `[blocks, kv_heads, block_length, head_dim]`.
        states: `[tokens, kv_heads, head_dim]`.
        blocks, columns: `[tokens]`; no pair occurs twice.
    """
    write_rounded(_write, cache, states, blocks, columns)


def write_rounded(
    put: Callable[[Tensor, Tensor, Tensor, Tensor], None],
    cache: Stored,
    states: Tensor,
    blocks: Tensor,
    columns: Tensor,
) -> None:
    """As `write`, by a function that puts plain numbers into a tensor."""
    if isinstance(cache, Tensor):
        put(cache, states, blocks, columns)
        return
    rounded = round_states(states, cache.codes.dtype)
    put(cache.codes, rounded.codes, blocks, columns)
    put(cache.scale, rounded.scale, blocks, columns)


def _write(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    heads = torch.arange(cache.shape[1], dtype=blocks.dtype)
    cache.index_put_((blocks[:, None], heads[None, :], columns[:, None]), states)


@overload
def read(cache: Tensor, blocks: Tensor | None, rows: int, context_length: int) -> Tensor: ...
@overload
def read(cache: Stored, blocks: Tensor | None, rows: int, context_length: int) -> Stored: ...
def read(cache: Stored, blocks: Tensor | None, rows: int, context_length: int) -> Stored:
    """The first `context_length` tokens of some rows: `[rows, kv_heads, context_length, head_dim]`.

    Args:
        blocks: `[rows, n]`, the blocks of each row in order, to be gathered; `[rows]` where a row has one; None reads blocks 0
            to rows - 1 in place, without a copy.
    """
    if isinstance(cache, CodedStates):
        return CodedStates(*(read(each, blocks, rows, context_length) for each in (cache.codes, cache.scale)))
    if blocks is None:
        return cache[:rows, :, :context_length]
    if blocks.dim() == 1:
        return cache[:, :, :context_length].index_select(0, blocks)
    gathered = cache.index_select(0, blocks.flatten()).unflatten(0, (rows, -1))
    return gathered.transpose(1, 2).flatten(2, 3)[:, :, :context_length]


def whole_or_nan(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """What is written of tokens: where one of a token's numbers is not finite, NaN in place of all of them.

    So whoever sees such a token gets NaN, whichever number it was, and `broken` need not read them all.

    Args:
        key, value: `[tokens, kv_heads, dim]`.
    """
    total = key.float().sum((1, 2)) + value.float().sum((1, 2))
    nan = (total - total)[:, None, None]  # zero where all are finite; not a constant, which devices refuse
    key, value = (torch.where(nan == 0, states, nan.to(states.dtype)) for states in (key, value))
    return key, value


def broken(keys: Stored) -> Tensor:
    """`[rows, columns]` float32: NaN where a column holds a token that `whole_or_nan` made NaN, else zero.

    Args:
        keys: `[rows, kv_heads, columns, dim]`.
    """
    one = (keys if isinstance(keys, Tensor) else keys.scale)[:, 0, :, 0].float()
    return one - one


def write_indices(
    position_ids: Tensor, actual: Tensor, seq_ids: Tensor, trash_row: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Cache row and column of every token of a row group, padding sent to the trash row.

    Args:
        position_ids, actual: `[rows, tokens]`; `actual` is the actual-tokens mask.
        seq_ids: `[rows]`, the slot of each row.
        offset: index in the step of the group's first token: the trash column of a padding token is its index.

    Returns:
        Two `[rows * tokens]` tensors of int32.
    """
    rows, tokens = position_ids.shape
    own_index = torch.arange(offset, offset + rows * tokens, dtype=torch.int32).view(rows, tokens)
    row = torch.where(actual, seq_ids[:, None], trash_row)
    column = torch.where(actual, position_ids, own_index)
    return row.flatten(), column.flatten()


def block_indices(
    position_ids: Tensor, actual: Tensor, blocks: Tensor, block_length: int, trash: int, offset: int
) -> tuple[Tensor, Tensor]:
    """As `write_indices`, of a cache of blocks: block and column of every token.

    Args:
        blocks: `[rows, tokens]`, the block that has each token's position; of padding, any.
        block_length: a power of two.
        trash: the first of the blocks that take padding.
    """
    rows, tokens = position_ids.shape
    own_index = torch.arange(offset, offset + rows * tokens, dtype=torch.int32).view(rows, tokens)
    own_block = torch.div(own_index, block_length, rounding_mode="floor") + trash
    block = torch.where(actual, blocks, own_block)
    column = torch.where(actual, position_ids, own_index) & (block_length - 1)
    return block.flatten(), column.flatten()
