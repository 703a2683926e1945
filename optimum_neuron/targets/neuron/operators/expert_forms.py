# SPDX-License-Identifier: Apache-2.0
"""The forms in which a graph computes a layer's routed experts, their work on a core, and the choice of the fastest.

Work is counted as lint/cost.py counts graphs: a result that the core's own memory cannot hold is written and read; operators cost nothing
but bytes and products. Routing is unknown before the step, so each form serves any routing of `entries = tokens * per_token`:
- all: every expert computes every token, with its weights where they lie.
- gather: each entry is a product of its own, with its expert's weights gathered; it reads less where entries are fewer than experts.
- blocks: every expert computes its first `rows` entries where its weights lie; the rest goes to blocks of as many rows, each of one
  expert, with gathered weights. An expert of n entries needs `ceil(n / rows) - 1 <= (n - 1) / rows` of them, so all experts together
  need at most `(entries - 1) // rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..sdk.hardware import Chip


# Rows of a product that the tensor engine takes at a time (nki.isa.nc_matmul in the SDK's documentation): fewer take as long.
TILE_ROWS = 128
# Products that one layer's gathered weights are cut into, so that each part stays in the core's memory; more make a graph long.
MOST_PARTS = 16
# Places in blocks are counted in float32.
_LARGEST_PLACE = 1 << 24


@dataclass(frozen=True)
class ExpertLayer:
    """A layer's routed experts on one core."""

    experts: int
    per_token: int  # experts that a token is routed to
    hidden: int  # values of a token
    up: int  # values that an expert's first projection gives
    down: int  # values that its last one takes
    # Of weights and products.
    dtype: str
    itemsize: int
    code_bits: int = 0  # of weights that are codes, without their scales; 0 of others

    def weight_bytes(self, count: int) -> int:
        return count * (self.code_bits or 8 * self.itemsize) // 8

    @property
    def expert_params(self) -> int:
        return self.hidden * (self.up + self.down)


@dataclass(frozen=True)
class ExpertForm:
    """A way to compute a layer's experts."""

    own_rows: int  # rows that each expert computes with its weights where they lie
    gathered: int = 0  # blocks with gathered weights
    rows: int = 0  # of such a block
    part: int = 0  # how many are gathered at a time

    @property
    def kind(self) -> Literal["all", "gather", "blocks"]:
        if not self.gathered:
            return "all"
        return "blocks" if self.own_rows else "gather"

    @property
    def parts(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.gathered, max(self.part, 1)):
            yield start, min(start + self.part, self.gathered)


class ExpertWork(NamedTuple):
    """The work of one layer on a core."""

    moved: int  # bytes read and written
    flops: int  # of matrix products
    live: int  # elements that projections read and write, and gathered weights that the core's memory cannot hold


def all_experts(tokens: int) -> ExpertForm:
    return ExpertForm(own_rows=tokens)


def gather(layer: ExpertLayer, tokens: int, chip: Chip) -> ExpertForm:
    entries = tokens * layer.per_token
    return ExpertForm(0, entries, 1, _part_size(layer, entries, chip))


def blocks(layer: ExpertLayer, tokens: int, rows: int, chip: Chip) -> ExpertForm:
    """Return blocks of so many rows, a power of two."""
    gathered = (tokens * layer.per_token - 1) // rows
    return ExpertForm(rows, gathered, rows, _part_size(layer, gathered, chip))


def _part_size(layer: ExpertLayer, gathered: int, chip: Chip) -> int:
    """Return as many blocks as leave half of the core's memory to the next part, in parts of about one size."""
    largest = layer.weight_bytes(layer.hidden * max(layer.up, layer.down))
    fitting = max(1, chip.core_sbuf // 2 // largest)
    parts = min(-(-gathered // fitting), MOST_PARTS)
    return -(-gathered // parts) if gathered else 0


def resize_form(form: ExpertForm, layer: ExpertLayer, tokens: int, chip: Chip) -> ExpertForm:
    if form.kind != "blocks":
        return gather(layer, tokens, chip) if form.kind == "gather" else all_experts(tokens)
    return blocks(layer, tokens, min(form.rows, 1 << max(tokens.bit_length() - 2, 0)), chip)


def work(layer: ExpertLayer, tokens: int, form: ExpertForm, chip: Chip) -> ExpertWork:
    def through_memory(elements: int, read: int) -> int:
        size = elements * layer.itemsize
        return size + read * layer.itemsize if size > chip.core_sbuf else 0

    entries, hidden = tokens * layer.per_token, layer.hidden
    own, gathered = layer.experts * form.own_rows, form.gathered * form.rows
    own_weights = layer.experts * layer.expert_params if own else 0
    moved = layer.weight_bytes(own_weights + form.gathered * layer.expert_params)
    taken = entries if form.gathered else own
    moved += through_memory(own * layer.up, own * layer.up) + through_memory(own * hidden, min(taken, own) * hidden)
    if own and gathered:
        moved += through_memory((own + gathered) * hidden, (own + gathered) * hidden)
    largest = 0
    for start, end in form.parts:
        count, rows = end - start, (end - start) * form.rows
        weights = [layer.weight_bytes(count * hidden * each) for each in (layer.up, layer.down)]
        spilled = sum(each for each in weights if each > chip.core_sbuf)
        moved += 2 * spilled + through_memory(rows * layer.up, rows * layer.up)
        moved += through_memory(rows * hidden, min(entries, rows) * hidden)
        largest = max(largest, spilled // layer.itemsize)
    products = (own + gathered) * layer.expert_params
    width = 2 * hidden + layer.up + layer.down
    return ExpertWork(moved, 2 * products, (own + gathered) * width + largest)


def choose(layer: ExpertLayer, tokens: int, chip: Chip) -> ExpertForm:
    """Return the form with the least time by the roofline; of equal ones that with the fewest operators."""
    forms = [all_experts(tokens), gather(layer, tokens, chip)]
    rows = TILE_ROWS
    while rows < tokens:
        form = blocks(layer, tokens, rows, chip)
        if (layer.experts + form.gathered) * rows < _LARGEST_PLACE:
            forms.append(form)
        rows *= 2

    def seconds(form: ExpertForm) -> float:
        done = work(layer, tokens, form, chip)
        return chip.core_seconds(done.moved, {layer.dtype: done.flops})

    return min(forms, key=seconds)
