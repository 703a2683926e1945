# SPDX-License-Identifier: Apache-2.0
"""Maps as data: one that would read or write what its operators have not is refused, and one that is not refused stays in its memory."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_calls import Kernels, Tensors, check_guards, guarded

from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.steps.access import PlanError
from optimum_neuron.kernels.steps.operands import Buffer, Operand, Tokens
from optimum_neuron.kernels.steps.steps import Item, Map


BUFFERS = [Buffer("arena", "", 48), Buffer("arena", "", 12), Buffer("output", "0", 48)]
WHOLE = Operand(0, "float32", 0, (3, 4), (4, 1))
ROWS = Operand(1, "float32", 0, (3,), (1,))
OUTPUT = replace(WHOLE, buffer=2)


def load(to: int, *, rows: bool = False) -> Item:
    return Item("load", to, rows=rows, access=ROWS if rows else WHOLE)


def store(register: Any) -> Item:
    return Item("store", -1, (register,), (False,), access=OUTPUT)


def op(name: str, to: int, *operands: Any, rows: bool = False, constants: tuple[bool, ...] | None = None) -> Item:
    return Item(name, to, operands, (False,) * len(operands) if constants is None else constants, rows)


def a_map(*items: Item, **changes: Any) -> Map:
    return replace(Map(3, 4, len({item.to for item in items} - {-1}), items), **changes)


GOOD = a_map(
    load(0),
    load(1, rows=True),
    op("sum", 2, 0, rows=True),
    op("add", 3, 2, 1, rows=True),
    op("spread", 1, 3),
    op("where", 2, 0, 1.0, 1, constants=(False, True, False)),
    store(2),
)
WHOLE_FOR_ROWS = "of whole rows instead of an element of each row"
ROWS_FOR_WHOLE = "of an element of each row instead of whole rows"
DAMAGED: dict[str, tuple[Map, str]] = {
    # An operator of whole rows that would go on behind the elements that there are, in a buffer even.
    "operator of rows": (a_map(load(0, rows=True), op("exp", 1, 0), store(1)), f"'exp' {ROWS_FOR_WHOLE}"),
    "second operand of rows": (a_map(load(0), load(1, rows=True), op("add", 2, 0, 1), store(2)), f"'add' {ROWS_FOR_WHOLE}"),
    "condition of rows": (a_map(load(0), load(1, rows=True), op("where", 2, 0, 0, 1), store(2)), f"'where' {ROWS_FOR_WHOLE}"),
    "sum of rows": (a_map(load(0, rows=True), op("sum", 1, 0, rows=True)), f"'sum' {ROWS_FOR_WHOLE}"),
    "rotation of rows": (a_map(load(0, rows=True), op("rotate_half", 1, 0)), f"'rotate_half' {ROWS_FOR_WHOLE}"),
    "what was whole": (a_map(load(0), op("neg", 1, 0), op("sum", 1, 0, rows=True), store(1)), f"'store' {ROWS_FOR_WHOLE}"),
    # The reverse reads the first elements of the tile as if they were its rows'.
    "operator on whole rows": (a_map(load(0), op("exp", 1, 0, rows=True)), f"'exp' {WHOLE_FOR_ROWS}"),
    "spread of whole rows": (a_map(load(0), op("spread", 1, 0), store(1)), f"'spread' {WHOLE_FOR_ROWS}"),
    "store of whole rows": (a_map(load(0), Item("store", -1, (0,), (False,), True, replace(OUTPUT, shape=(3,), strides=(1,)))),
        f"'store' {WHOLE_FOR_ROWS}"),
    # What the kernels do whatever the item says.
    "sum that is whole": (a_map(load(0), op("sum", 1, 0), store(1)), "'sum' that gives whole rows instead of"),
    "spread of rows to rows": (a_map(load(0, rows=True), op("spread", 1, 0, rows=True)),
        "'spread' that gives an element of each row instead of"),
    # A missing operand would be register 0, of whatever address its memory holds.
    "no operand": (a_map(load(0), op("exp", 1), store(1)), "'exp' of 0 operands, where 1 belong"),
    "one operand": (a_map(load(0), op("add", 1, 0), store(1)), "'add' of 1 operands, where 2 belong"),
    "an operand too many": (a_map(load(0), op("exp", 1, 0, 0), store(1)), "'exp' of 2 operands, where 1 belong"),
    "operands of no kind": (a_map(load(0), op("add", 1, 0, 0, constants=(False,))), "'add' of 2 operands"),
    "constant alone": (a_map(load(0), op("exp", 1, 2.0, constants=(True,))), "a constant where a register belongs"),
    "constant stored": (a_map(load(0), replace(store(2.0), constants=(True,))), "a constant where a register belongs"),
    "constant condition": (a_map(load(0), op("where", 1, 0, 0, 1, constants=(False, False, True))),
        "a constant where a register belongs"),
    "constants alone": (a_map(load(0), op("add", 1, 1.0, 2.0, constants=(True, True))), "operator without operands"),
    # Division by 0, or of the least number by -1, would end the process.
    **{f"division by {by}": (a_map(load(0), op("ifloor_div", 1, *of, constants=fixed)), "divides whole numbers by what may")
        for by, of, fixed in (("0", (0, 0), (False, True)), ("-1", (0, -1), (False, True)), ("a register", (0, 0), (False, False)),
        ("2**31", (0, 2**31), (False, True)), ("a fraction", (0, 0.5), (False, True)), ("what is first", (3, 0), (True, False)))},
    # Registers that there are not. A store writes none, so that there is no register -1 behind it.
    "unwritten register": (a_map(load(0), op("exp", 1, 2), registers=2), "reads a register before it is written"),
    "register of a store": (a_map(load(0), store(0), op("exp", 1, -1)), "reads a register before it is written"),
    "register that is none": (a_map(load(0), op("exp", 1, 0.5)), "reads a register before it is written"),
    "register in place": (a_map(load(0), op("exp", 0, 0), store(0)), "overwrites an operand"),
    "register beyond": (a_map(load(0), op("exp", 2, 0), registers=2), "no such register"),
    "store to a register": (a_map(load(0), replace(store(0), to=0)), "no such register"),
    "too many registers": (a_map(load(0), store(0), registers=2**32 + 1), "map of 4294967297 registers and 2 operators"),
    "no registers": (a_map(load(0), store(0), registers=0), "map of 0 registers"),
    # Accesses.
    "load from nowhere": (a_map(Item("load", 0), store(0)), "'load' with an access, or without its own"),
    "access of none's": (a_map(load(0), Item("exp", 1, (0,), (False,), access=WHOLE)), "'exp' with an access"),
    "rows of another size": (a_map(replace(load(0), rows=True), op("spread", 1, 0), store(1)), "an access of another size"),
    "all of a row's": (a_map(replace(load(0, rows=True), rows=False), store(0)), "an access of another size"),
    # Sizes whose products leave 64 bits, or by which the kernels would divide by zero.
    "no items": (a_map(), "a map without elements"),
    "no rows": (a_map(load(0), rows=0), "a map without elements"),
    "negative sizes": (a_map(load(0), rows=-3, columns=-4), "a map without elements"),
    "too many elements": (Map(2**31, 2**31, 1, (Item("load", 0, access=Operand(0, "int32", 0, (2**31, 2**31), (0, 0))),)),
        "elements and operators"),
    "odd rows in halves": (Map(4, 3, 2, (load(0), op("rotate_half", 1, 0))), "rows without halves"),
    # A run for the first token would end amid a row.
    "tokens that share a row": (Map(2, 6, 3, (load(0), op("row_max", 1, 0, rows=True), op("spread", 2, 1), store(2)), Tokens(0, 3)),
        "tokens that share rows"),
    "token of more than 64 bits": (a_map(load(0), store(0), tokens=Tokens(2**63, 3)), "more than 64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_map_whose_items_do_not_fit_each_other_is_refused(name: str) -> None:
    damaged, words = DAMAGED[name]
    assert encode_step(GOOD, BUFFERS)
    with pytest.raises(PlanError, match=re.escape(words)) as caught:
        encode_step(damaged, BUFFERS)
    assert "\n" not in str(caught.value)


def test_rows_that_nothing_reduces_are_whole_in_every_tile(kernels: Kernels) -> None:
    """As where an operator per row is all that is left of a group: tiles end where rows do."""
    for rows, columns in [(3000, 3), (5000, 1), (2, 3001)]:
        x, output = torch.randn(rows), guarded((rows, columns), torch.float32)
        tensors = Tensors()
        items = (
            Item("load", 0, rows=True, access=tensors(x)),
            op("neg", 1, 0, rows=True),
            op("spread", 0, 1),
            Item("store", -1, (0,), (False,), access=tensors(output)),
        )
        kernels.run(Map(rows, columns, 2, items), tensors)
        check_guards(output)
        assert torch.equal(output, -x[:, None].expand(rows, columns))
