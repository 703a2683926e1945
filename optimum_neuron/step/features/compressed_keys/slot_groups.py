# SPDX-License-Identifier: Apache-2.0
"""Compressed keys of a step's slots, and the tokens of each slot that no key is made of yet. All of it follows from positions.

A key stands for the `rate` tokens of a group, which begins at a multiple of `rate`. It is made in the step that has the group's last
token, of the step's own tokens and of those that the slot keeps: the last `spans * rate`, each at its position modulo that. Where a key
is also made of the group before its own, `spans` is 2:

    position   0 1 2 3|4 5 6 7|8 9        rate 4, spans 2; a chunk to 5, the next to 9
    chunk 1    [- - - -] [0 1 2 3]        key 0, after a group of nothing; the slot keeps 0..5, at 0..5
    chunk 2    [0 1 2 3] [4 5 6 7]        key 1, of 0..5 from the slot and of 6 and 7; it keeps 8 9 2 3 4 5 6 7

Each row of a step has windows for as many groups as its tokens may end. Other positions of a window hold nothing, and the keys of
unfinished groups are written after those of all slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ....errors import UnsupportedModelError
from ...attention import kv_cache
from ...attention.cached_attention import MASKED, MASKED_HALF
from ...attention.rows import AttentionRows, CompressedKeys, StepLayout
from ..selected_keys.index_keys import ScoresOf
from ..selected_keys.slot_index import products_of, select_largest
from .compression import CompressingLayer, GroupSource, GroupWindows, NoIndices


@dataclass(frozen=True)
class WindowPlan:
    """The tokens of a step's windows, and where their keys go. All indices are int32.

    Attributes:
        own, kept: `[windows * rate]`, tokens of the step, and of what slots keep, `[rows * spans * rate]`.
        is_own, is_kept: `[windows * rate]` bool, the one of the two in a place, if any.
        first: `[windows]`, as `GroupWindows.first`.
        groups: rows, windows of each row, and how many of them its tokens may end, for each row group: the last ones.
        key_rows, key_columns, token_rows, token_columns: where keys and the step's tokens are written.
    """

    own: Tensor
    kept: Tensor
    is_own: Tensor
    is_kept: Tensor
    first: Tensor
    groups: list[tuple[int, int, int]]
    key_rows: Tensor
    key_columns: Tensor
    token_rows: Tensor
    token_columns: Tensor


@dataclass
class SlotGroups:
    """The compression backend of step graphs."""

    step: StepLayout
    _plans: dict[tuple[int, int, int], WindowPlan] = field(default_factory=dict)
    _visible: dict[int, Tensor] = field(default_factory=dict)

    def take_windows(self, layer: CompressingLayer, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        states = self._find_states(layer, index)
        if states is None:  # no text has as many tokens as a group
            none = torch.zeros((0,), dtype=torch.int32)
            return GroupWindows(values[:, :0], gates[:, :0], none)
        tokens, _ = states
        plan, width = self._plan_windows(layer.rate, states), values.shape[-1]
        own = torch.cat([values[0], gates[0]], dim=-1).to(tokens.dtype)
        # In a place without a token zeros, and gates that no softmax sees next to a token's.
        gate = MASKED_HALF if own.dtype == torch.float16 else MASKED
        nothing = torch.where(torch.arange(own.shape[-1], dtype=torch.int32) < width, 0.0, gate).to(own.dtype)
        kept = tokens.flatten(0, 2).index_select(0, plan.kept)
        found = torch.where(plan.is_kept[:, None], kept, nothing)
        found = torch.where(plan.is_own[:, None], own.index_select(0, plan.own), found)[None]
        self.step.ops.write_cache(tokens, own[:, None], plan.token_rows, plan.token_columns)
        return GroupWindows(found[..., :width].to(values.dtype), found[..., width:].to(gates.dtype), plan.first)

    def add_overlap(self, layer: CompressingLayer, index: int) -> None:
        states = self._find_states(layer, index)
        if states is not None and states[0].shape[2] < 2 * layer.rate:
            raise UnsupportedModelError(
                f"layer {layer.layer_idx} makes keys of groups that it did not have when it was asked"
            )

    def keep_keys(self, layer: CompressingLayer, index: int, keys: Tensor) -> SlotGroupKeys:
        states = self._find_states(layer, index)
        if states is None:
            return SlotGroupKeys(self, layer, None)
        _, cache = states
        plan, parts, start = self._plan_windows(layer.rate, states), [], 0
        for rows, windows, ended in plan.groups:
            stop = start + rows * windows
            parts.append(keys[start:stop].unflatten(0, (rows, windows))[:, windows - ended :].flatten(0, 1))
            start = stop
        made = torch.cat(parts).to(cache.dtype)[:, None]
        self.step.ops.write_cache(cache, kv_cache.whole_or_nan(made, made)[0], plan.key_rows, plan.key_columns)
        return SlotGroupKeys(self, layer, cache)

    def _find_states(self, layer: CompressingLayer, index: int) -> tuple[Tensor, Tensor] | None:
        """Return the last tokens of each slot, and the keys; None where no text has as many tokens as a group."""
        tokens, keys = (self.step.cache.find_state(role, layer.layer_idx, index) for role in ("buffer", "group"))
        return None if tokens is None or keys is None else (tokens, keys)

    def visible(self, rate: int) -> Tensor:
        if rate not in self._visible:
            self._visible[rate] = torch.cat([each.visible_groups(rate).flatten(0, 1) for each in self.step.groups])
        return self._visible[rate]

    def _plan_windows(self, rate: int, states: tuple[Tensor, Tensor]) -> WindowPlan:
        length, columns = (state.shape[2] for state in states)
        key = (rate, length, columns)
        if key not in self._plans:
            self._plans[key] = _window_plan(self.step, rate, length // rate, columns)
        return self._plans[key]


@dataclass
class SlotGroupKeys(GroupSource):
    """The compressed keys of a layer: `[rows, 1, groups, dim]`, None where no text has a whole group."""

    backend: SlotGroups
    layer: CompressingLayer
    cache: Tensor | None

    @property
    def columns(self) -> int:  # type: ignore[override]
        return max(1, self._group_count)  # 1, without a meaning, where no token can see a whole group

    @property
    def _group_count(self) -> int:
        return 0 if self.cache is None else self.backend.step.groups[0].context_length // self.layer.rate

    def multiply_query(self, query: Tensor) -> Tensor:
        if self.cache is None or not self._group_count:
            return query.new_zeros((*query.shape[:2], 1))
        step, products = self.backend.step, []
        for group, tokens in zip(step.groups, step.token_ranges, strict=True):
            keys = kv_cache.read_cache(self.cache, group.slots, len(group.position_ids), self._group_count)[:, 0]
            products.append(products_of(query[tokens], keys))
        return torch.cat(products)

    def select_top(self, scores: Tensor, of: ScoresOf, count: int) -> NoIndices:
        if of.mask is not None or of.width != 1 or of.by_head:
            raise UnsupportedModelError("it selects compressed keys by other scores than one of each, without a mask")
        if count < self._group_count:
            self.layer.selected = select_largest(scores[:, 0], self.backend.visible(self.layer.rate), count)
        return NoIndices.for_scores(scores)

    def attended_keys(self) -> CompressedKeys | None:
        if self.cache is None or not self._group_count:
            return None
        return CompressedKeys(self.cache, self.layer.rate, self.layer.selected)


def _window_plan(step: StepLayout, rate: int, spans: int, columns: int) -> WindowPlan:
    length, slots = spans * rate, step.slots
    place, parts, sizes, written, offset, before = torch.arange(rate, dtype=torch.int32), [], [], [], 0, 0
    for group in step.groups:
        rows, tokens = group.position_ids.shape
        own_slots, first, last, begins, ends = _find_extents(group)
        ended = -(-tokens // rate)  # groups, wherever the row begins
        windows = ended + spans - 1
        number = _floor_divide(first, rate)[:, None] + torch.arange(1 - spans, ended, dtype=torch.int32)
        position = (number[:, :, None] * rate + place).flatten(1)  # [rows, windows * rate]
        row = torch.arange(offset, offset + rows * tokens, tokens, dtype=torch.int32)
        is_own = (position >= begins[:, None]) & (position <= last[:, None])
        is_kept = (position >= 0) & (position < begins[:, None])
        own = torch.where(is_own, (row - first)[:, None] + position, 0)
        kept = torch.where(is_kept, own_slots[:, None] * length + _floor_modulo(position, length), 0)
        parts.append([each.flatten() for each in (own, kept, is_own, is_kept, number)])
        sizes.append((rows, windows, ended))
        number = number[:, spans - 1 :]
        is_whole = (number + 1) * rate <= last[:, None] + 1
        nobodys = torch.arange(before, before + rows * ended, dtype=torch.int32).view(rows, ended)
        positions = group.position_ids
        index = torch.arange(offset, offset + rows * tokens, dtype=torch.int32).view(rows, tokens)
        actual = step.actual[offset : offset + rows * tokens].view(rows, tokens)
        stays = actual & (positions + length > ends[:, None])
        written.append(
            [
                torch.where(is_whole, own_slots[:, None], slots + _floor_divide(nobodys, columns)).flatten(),
                torch.where(is_whole, number, _floor_modulo(nobodys, columns)).flatten(),
                torch.where(stays, own_slots[:, None], slots + _floor_divide(index, length)).flatten(),
                torch.where(stays, _floor_modulo(positions, length), _floor_modulo(index, length)).flatten(),
            ]
        )
        offset, before = offset + rows * tokens, before + rows * ended
    own, kept, is_own, is_kept, number = (torch.cat(each) for each in zip(*parts, strict=True))
    first = number.clamp(min=0) * rate - torch.arange(len(number), dtype=torch.int32) * rate
    return WindowPlan(own, kept, is_own, is_kept, first, sizes, *map(torch.cat, zip(*written, strict=True)))


def _find_extents(group: AttentionRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return, each `[rows]`, the slot, a row's first and last position, and those of its slot in the step; an idle row has 0 to -1."""
    first, last = group.position_ids[:, 0].clamp(min=0), group.position_ids.amax(1)
    if group.slots is None:
        return torch.arange(len(first), dtype=torch.int32), first, last, first, last
    # A prompt may fill several rows. An idle row names a slot of an earlier step.
    same = (group.slots[:, None] == group.slots[None]) & (last >= 0)[None]
    begins = torch.where(same, first[None], torch.iinfo(torch.int32).max).amin(1)
    ends = torch.where(same, last[None], -1).amax(1)
    return group.slots, first, last, torch.where(last >= 0, begins, 0), ends


def _floor_divide(number: Tensor, divisor: int) -> Tensor:
    return torch.div(number, divisor, rounding_mode="floor")


def _floor_modulo(number: Tensor, divisor: int) -> Tensor:
    return number - _floor_divide(number, divisor) * divisor
