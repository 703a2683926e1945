# SPDX-License-Identifier: Apache-2.0
"""The grid by which recurrences give the same bits however a prompt is cut.

A slot's text is cut into blocks of B tokens, whatever its chunks are. After a chunk a slot keeps the state at the last boundary (anchor),
the inputs of the tokens since (tail), and the state after its last token (current). The next chunk computes the unfinished block again,
from its boundary:

    position   0       B       2B            of a prompt in two chunks, the second begins with anchor S(B) and a tail of two:
    tokens     a b c d e f|g h i j              [e f g h] [i j . .]    outputs of g h i j; anchor S(2B), tail i j, current S
    chunks     ----1-----  ----2---

So a token is always computed by the same products of the same shapes, and its bits follow from the tokens before it alone. Decode rows
take the current state on, token by token, and leave anchor and tail. `scanned` then shows the next chunk that they belong to an earlier
position, and it begins with the current state. Padding has inputs of zeros, which change no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .recurrence import ScanCall, ScanRows, ScanState
from .scan_blocks import BlockMasks, compute_blocks


@dataclass(frozen=True)
class ScanGrid:
    """The places of chunk rows' tokens in blocks: a window of whole blocks for each row. All indices are int32.

    Attributes:
        blocks: of a window: as many as hold the tokens of a row wherever it begins.
        sources: `[P * window]`, rows of the slots' tails `[P * block]`, then the chunks' tokens `[P * C]`, then one of zeros.
        queries: `[P * window]`, rows of the chunks' tokens, then one of zeros.
        outputs: `[P * C]`, the places of the chunks' tokens in the windows.
        tails: `[P * block]`, rows of the windows, then one of zeros: what each row leaves as tail.
        whole: `[P]`, tokens of the whole blocks of each window.
        fresh, resumes, continues: `[P]`, whether a row begins at position 0, where the slot's last chunk ended, and where the
            row before it ends.
        slots, kept_in: `[P]`, the state that each row begins with, and the one that it takes on.
    """

    block: int
    blocks: int
    sources: Tensor
    queries: Tensor
    outputs: Tensor
    tails: Tensor
    whole: Tensor
    fresh: Tensor
    resumes: Tensor
    continues: Tensor
    slots: Tensor
    kept_in: Tensor
    masks: BlockMasks

    @classmethod
    def for_step(cls, rows: ScanRows, block: int) -> ScanGrid | None:
        """Return the grid of a step, and note in `rows.scanned` what the step does; None without chunk rows."""
        if block not in rows.grids:
            rows.grids[block] = None if rows.chunk is None else _make_grid(rows, rows.chunk, block)
            _note_scanned(rows)
        found: ScanGrid | None = rows.grids[block]
        return found


def _make_grid(rows: ScanRows, chunk: Tensor, block: int) -> ScanGrid:
    assert rows.actual is not None and rows.chunk_slots is not None and rows.scanned is not None
    count, tokens = chunk.shape
    blocks = -(-(tokens + block - 1) // block)
    window = blocks * block
    length = rows.actual.sum(1, dtype=torch.int32)
    first = chunk[:, 0].clamp(min=0)
    own = (rows.chunk_slots[:, None] == rows.chunk_slots[None]) & (length > 0)[None]
    start = torch.where(own, first[None], torch.iinfo(torch.int32).max).amin(1)
    start = torch.where(length > 0, start, first)  # of the prompt's tokens in this step
    resumes = rows.scanned.index_select(0, rows.chunk_slots) == start
    before = first & (block - 1)  # tokens of the first block in front of the row
    row = torch.arange(count, dtype=torch.int32)[:, None]
    place = torch.arange(window, dtype=torch.int32)[None]
    token = place - before[:, None]
    is_own = (token >= 0) & (token < length[:, None])
    in_step = is_own | ((token < 0) & (first[:, None] + token >= start[:, None]))
    in_tail = (token < 0) & ~in_step & resumes[:, None]
    at = row * tokens + token
    zero = count * (block + tokens)
    sources = torch.where(in_step, count * block + at, torch.where(in_tail, row * block + place, zero))
    end = before + length
    whole = end - (end & (block - 1))
    place, rest = place[:, :block], whole[:, None] + place[:, :block]
    sources = sources.flatten()
    queries = torch.where(is_own, at, count * tokens).flatten()
    outputs = (row * window + before[:, None] + torch.arange(tokens, dtype=torch.int32)[None]).flatten()
    tails = torch.where(rest < end[:, None], row * window + rest, count * window).flatten()
    fresh, continues, slots = first == 0, first > start, rows.chunk_slots
    kept_in, masks = torch.where(length > 0, slots, len(rows.scanned) - 1), BlockMasks.for_block(block)
    places = sources, queries, outputs, tails, whole, fresh, resumes, continues, slots, kept_in
    return ScanGrid(block, blocks, *places, masks)


def _note_scanned(rows: ScanRows) -> None:
    """Keep how many tokens of each slot came in chunks; none of a slot that decodes, as its anchor stays where it was."""
    assert rows.scanned is not None
    slot = torch.arange(len(rows.scanned), dtype=torch.int32)[:, None]
    mine = rows.slots == slot
    ends = torch.where(mine, rows.positions + 1, -1).amax(1)
    scanned = torch.where(mine.any(1), ends, rows.scanned)
    if rows.decode is not None:
        positions = nn.functional.pad(rows.decode, (0, len(rows.scanned) - len(rows.decode)), value=-1)
        scanned = torch.where(positions >= 0, -1, scanned)
    rows.scanned.copy_(scanned)


def scan_rows(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """Compute a recurrence of any kind in blocks, or token by token where there is no anchor: `Scan`."""
    if state.anchor is None or state.tail is None:
        return walk(call, rows, state)
    grid = ScanGrid.for_step(rows, state.tail.shape[1])
    outputs, decoding, current = [], 0, state.current
    if rows.decode is not None:
        decoding, positions = len(rows.decode), rows.decode
        own, old = _cut_call(call, 0, decoding), current[:decoding]
        output, new = step_token(own, torch.where(_each_state(positions > 0), old, 0.0))
        current.copy_(torch.cat([torch.where(_each_state(positions >= 0), new, old), current[decoding:]]))
        outputs.append(output)
    if grid is None:  # every graph updates every state: this one the row for padding
        for each in (state.anchor, state.tail):
            place = torch.full((1,), len(each) - 1, dtype=torch.int32)
            each.index_put_((place,), each.new_zeros((1, *each.shape[1:])))
    else:
        own = _cut_call(call, decoding, len(call.value))
        outputs.append(_scan_chunks(own, grid, current, state.anchor, state.tail))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _cut_call(call: ScanCall, start: int, stop: int) -> ScanCall:
    beta = None if call.beta is None else call.beta[start:stop]
    query, key, value, decay = (each[start:stop] for each in (call.query, call.key, call.value, call.decay))
    return ScanCall(query, key, value, decay, beta, call.rates)


def step_token(call: ScanCall, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of one token of each row and the state after it, from `state [rows, heads, key_dim, value_dim]`."""
    query, key = (call.over_heads(each)[..., None] for each in (call.query, call.key))
    if call.rates is not None:
        decay = call.decay[..., None, :] * call.rates
    else:
        decay = call.decay[..., None] if call.decay.dim() == 3 else call.decay[..., None, None]
    state = state * decay.exp()
    value = call.value
    if call.beta is not None:
        value = (value - (state * key).sum(-2)) * call.beta[..., None]
    state = state + key * value[..., None, :]
    return (state * query).sum(-2), state


def _each_state(chosen: Tensor) -> Tensor:
    return chosen[:, None, None, None]


def _scan_chunks(call: ScanCall, grid: ScanGrid, current: Tensor, anchor: Tensor, tail: Tensor) -> Tensor:
    count, width = len(grid.slots), call.width
    own = torch.cat([each.flatten(1) for each in call.inputs()], 1)
    zero = own.new_zeros((1, width))
    known = torch.cat([tail.index_select(0, grid.slots).flatten(0, 1), own, zero])
    inputs = known.index_select(0, grid.sources)
    queries = torch.cat([call.query, torch.zeros_like(call.query[:1])]).index_select(0, grid.queries)
    new_tail = torch.cat([inputs, zero]).index_select(0, grid.tails).view(count, grid.block, width)
    # Whatever is not finite is computed as a token of zeros; what comes after it is then made NaN.
    total = inputs.sum(1)
    nan = total - total
    inputs = torch.where((nan == 0)[:, None], inputs, 0.0)
    shape = (count * grid.blocks, grid.block)
    blocks = compute_blocks(call, inputs.unflatten(0, shape), queries.unflatten(0, shape), nan.view(shape), grid.masks)
    begins = torch.where(
        _each_state(grid.resumes), anchor.index_select(0, grid.slots), current.index_select(0, grid.slots)
    )
    begins = torch.where(_each_state(grid.fresh), 0.0, begins)
    before: list[Tensor] = []
    last_anchor = begins[:1]
    for row in range(count):
        begin = begins[row : row + 1]
        state = torch.where(_each_state(grid.continues[row : row + 1]), last_anchor, begin) if row else begin
        last_anchor = state
        for number in range(1, grid.blocks + 1):
            before.append(state)
            state = blocks.next_state(row * grid.blocks + number - 1, state)
            is_last = grid.whole[row : row + 1] == number * grid.block
            last_anchor = torch.where(_each_state(is_last), state, last_anchor)
        place = (grid.kept_in[row : row + 1],)
        current.index_put_(place, state)
        anchor.index_put_(place, last_anchor)
        tail.index_put_(place, new_tail[row : row + 1])
    outputs = blocks.compute_outputs(torch.cat(before))
    return outputs.transpose(1, 2).flatten(0, 1).index_select(0, grid.outputs)


def walk(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """Compute token by token over the current states alone, as a target with a kernel for it does. No graph should contain it."""
    outputs = torch.zeros_like(call.value)
    for token, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        if slot < len(state.current) - 1:
            before = state.current[slot : slot + 1] if position > 0 else torch.zeros_like(state.current[:1])
            outputs[token : token + 1], state.current[slot : slot + 1] = step_token(
                _cut_call(call, token, token + 1), before
            )
    return outputs
