# SPDX-License-Identifier: Apache-2.0
"""Recurrences in blocks that stand at fixed positions: the reference, of operators that every target can lower.

A slot's text is cut into blocks of B tokens, whatever chunks it comes in. Behind a chunk a slot keeps the state at the last
boundary (anchor), the inputs of the tokens since (tail), and the state behind its last token (current). The next chunk
computes the block that it goes on with again, from its boundary:

    position   0       B       2B            of a prompt in two chunks, the second begins with anchor S(B) and a tail of two:
    tokens     a b c d e f|g h i j              [e f g h] [i j . .]    outputs of g h i j; anchor S(2B), tail i j, current S
    chunks     ----1-----  ----2---

So a token is always computed by the same products of the same shapes, and its bits follow from what stands before it alone.
Decode rows take the current state on, token by token, and leave anchor and tail; `scanned` then tells the next chunk that they
are of an earlier position, and it begins with the current state. What is no token has inputs of zeros, which change no state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .recurrence import ScanCall, ScanRows, ScanState
from .scan_blocks import BlockMasks, compute_blocks


@dataclass(frozen=True)
class Grid:
    """Where the tokens of chunk rows stand in blocks: a window of whole blocks for each row. All indices are int32.

    Attributes:
        blocks: of a window: as many as hold the tokens of a row wherever it begins.
        sources: `[P * window]`, rows of the slots' tails `[P * block]`, then the chunks' tokens `[P * C]`, then one of zeros.
        queries: `[P * window]`, rows of the chunks' tokens, then one of zeros.
        outputs: `[P * C]`, where in the windows the chunks' tokens are.
        tails: `[P * block]`, rows of the windows, then one of zeros: what each row leaves as tail.
        whole: `[P]`, tokens of the whole blocks of each window.
        fresh, resumes, continues: `[P]`, whether a row begins at position 0, where the slot's last chunk ended, and where the
            row before it ends.
        slots, kept_in: `[P]`, whose state each row begins with, and takes on.
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
    def of(cls, rows: ScanRows, block: int) -> Grid | None:
        """None of a step without chunk rows. Notes in `rows.scanned` what the step does."""
        if block not in rows.grids:
            grid = None if rows.chunk is None else _grid(rows, rows.chunk, block)
            _note(rows)
            rows.grids[block] = grid
        found: Grid | None = rows.grids[block]
        return found


def _grid(rows: ScanRows, chunk: Tensor, block: int) -> Grid:
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
    return Grid(
        block,
        blocks,
        sources.flatten(),
        torch.where(is_own, at, count * tokens).flatten(),
        (row * window + before[:, None] + torch.arange(tokens, dtype=torch.int32)[None]).flatten(),
        torch.where(rest < end[:, None], row * window + rest, count * window).flatten(),
        whole,
        first == 0,
        resumes,
        first > start,
        rows.chunk_slots,
        torch.where(length > 0, rows.chunk_slots, len(rows.scanned) - 1),
        BlockMasks.of(block),
    )


def _note(rows: ScanRows) -> None:
    """Keeps how many tokens of each slot came in chunks; none of one that decodes, as its anchor is left behind."""
    assert rows.scanned is not None
    slot = torch.arange(len(rows.scanned), dtype=torch.int32)[:, None]
    mine = rows.slots == slot
    ends = torch.where(mine, rows.positions + 1, -1).amax(1)
    scanned = torch.where(mine.any(1), ends, rows.scanned)
    if rows.decode is not None:
        positions = nn.functional.pad(rows.decode, (0, len(rows.scanned) - len(rows.decode)), value=-1)
        scanned = torch.where(positions >= 0, -1, scanned)
    rows.scanned.copy_(scanned)


def delta_rule(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """The gated delta rule, with one decay per head or one per row of the state: `Scan`."""
    return _scan(call, rows, state)


def state_space_scan(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """A scan without the delta rule, of a state space model or of linear attention with decay: `Scan`."""
    return _scan(call, rows, state)


def selective_scan(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """A scan in which each number of the state has a decay of its own: `Scan`."""
    return _scan(call, rows, state)


def _scan(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    if state.anchor is None or state.tail is None:
        return walk(call, rows, state)
    grid = Grid.of(rows, state.tail.shape[1])
    decoding = 0 if rows.decode is None else len(rows.decode)
    outputs = []
    if rows.decode is not None:
        outputs.append(_decode(_part(call, 0, decoding), rows.decode, state.current))
    if grid is None:
        _keep_all(state.anchor)
        _keep_all(state.tail)
    else:
        outputs.append(_chunks(_part(call, decoding, len(call.value)), grid, state.current, state.anchor, state.tail))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def _part(call: ScanCall, start: int, stop: int) -> ScanCall:
    beta = None if call.beta is None else call.beta[start:stop]
    query, key, value, decay = (each[start:stop] for each in (call.query, call.key, call.value, call.decay))
    return ScanCall(query, key, value, decay, beta, call.rates)


def step(call: ScanCall, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: from `state [rows, heads, key_dim, value_dim]` to its output and the state behind it."""
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


def _decode(call: ScanCall, positions: Tensor, current: Tensor) -> Tensor:
    rows = len(positions)
    old = current[:rows]
    output, new = step(call, torch.where(_each(positions > 0), old, 0.0))
    current.copy_(torch.cat([torch.where(_each(positions >= 0), new, old), current[rows:]]))
    return output


def _keep_all(state: Tensor) -> None:
    """Every graph updates every state: where there is nothing to keep, the row that nobody has."""
    place = torch.full((1,), len(state) - 1, dtype=torch.int32)
    state.index_put_((place,), state.new_zeros((1, *state.shape[1:])))


def _each(chosen: Tensor) -> Tensor:
    """`[rows]` beside states."""
    return chosen[:, None, None, None]


def _chunks(call: ScanCall, grid: Grid, current: Tensor, anchor: Tensor, tail: Tensor) -> Tensor:
    count, width = len(grid.slots), call.width
    own = torch.cat([each.flatten(1) for each in call.inputs()], 1)
    zero = own.new_zeros((1, width))
    known = torch.cat([tail.index_select(0, grid.slots).flatten(0, 1), own, zero])
    inputs = known.index_select(0, grid.sources)
    queries = torch.cat([call.query, torch.zeros_like(call.query[:1])]).index_select(0, grid.queries)
    new_tail = torch.cat([inputs, zero]).index_select(0, grid.tails).view(count, grid.block, width)
    # Whatever is not finite is computed as a token of zeros; what comes behind it is then made NaN.
    total = inputs.sum(1)
    nan = total - total
    inputs = torch.where((nan == 0)[:, None], inputs, 0.0)
    shape = (count * grid.blocks, grid.block)
    blocks = compute_blocks(call, inputs.unflatten(0, shape), queries.unflatten(0, shape), nan.view(shape), grid.masks)
    begins = torch.where(_each(grid.resumes), anchor.index_select(0, grid.slots), current.index_select(0, grid.slots))
    begins = torch.where(_each(grid.fresh), 0.0, begins)
    before: list[Tensor] = []
    last_anchor = begins[:1]
    for row in range(count):
        begin = begins[row : row + 1]
        state = torch.where(_each(grid.continues[row : row + 1]), last_anchor, begin) if row else begin
        last_anchor = state
        for number in range(1, grid.blocks + 1):
            before.append(state)
            state = blocks.next_state(row * grid.blocks + number - 1, state)
            is_last = grid.whole[row : row + 1] == number * grid.block
            last_anchor = torch.where(_each(is_last), state, last_anchor)
        place = (grid.kept_in[row : row + 1],)
        current.index_put_(place, state)
        anchor.index_put_(place, last_anchor)
        tail.index_put_(place, new_tail[row : row + 1])
    outputs = blocks.outputs(torch.cat(before))
    return outputs.transpose(1, 2).flatten(0, 1).index_select(0, grid.outputs)


def walk(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """Token by token over the current states alone: what a target with a kernel for it computes. No graph should contain it."""
    outputs = torch.zeros_like(call.value)
    for token, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        if slot < len(state.current) - 1:
            before = state.current[slot : slot + 1] if position > 0 else torch.zeros_like(state.current[:1])
            outputs[token : token + 1], state.current[slot : slot + 1] = step(_part(call, token, token + 1), before)
    return outputs
