# SPDX-License-Identifier: Apache-2.0
"""A bias by column in the kernel of attention, of every instruction set: exact, and a token's bits its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from biased import BLOCKS, PIECES, SIZES, answers, model_of, own_logits, same
from biased import PROMPT as WORDS
from helpers import artifact_runner, export_tiny
from kernel_calls import Kernels, int32, random, same_bits, with_dtypes
from test_kernels import ATTEND_ERROR, attend_exactly, make_cache
from torch import Tensor

from optimum_neuron.kernels.steps.access import PlanError


pytestmark = pytest.mark.usefixtures("torch_with_one_thread")
# Heads, kv heads, columns: not of whole blocks, and over the end of a section.
SHAPES = [(4, 4, 100), (6, 1, 64), (3, 3, 1100)]
with_shapes = pytest.mark.parametrize(("heads", "kv_heads", "columns"), SHAPES)
DIM = 32


def table_of(heads: int, columns: int) -> Tensor:
    """ALiBi's, with zeros to the end of a block of 64."""
    slopes = 2.0 ** -torch.arange(1, heads + 1) * 1.3
    table = torch.zeros(heads, -(-columns // 64) * 64)
    table[:, :columns] = slopes[:, None] * torch.arange(columns)
    return table


@with_dtypes
@with_shapes
@pytest.mark.parametrize("extras", [False, True])
def test_a_bias_by_column_is_exact(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, columns: int, extras: bool
) -> None:
    window, softcap, sinks = (37, 4.0, torch.randn(heads)) if extras else (0, 0.0, None)
    last = columns - 1
    positions = int32([[0, 1, last // 2, last - 1, last]])
    keys, values = make_cache(2, kv_heads, columns, DIM, {1: last}, dtype)
    query, table = random(1, heads, 5, DIM, dtype=dtype), table_of(heads, columns)
    options = (int32([1]), positions, 0.2, window, softcap, sinks)
    found = kernels.attend(query, keys, values, *options, column_bias=table)
    expected = attend_exactly(query, keys, values, *options, table)
    assert (found.double() - expected).abs().max() < 2 * ATTEND_ERROR[dtype]


@with_dtypes
@with_shapes
def test_a_token_with_a_bias_depends_on_nothing_else(
    kernels: Kernels, dtype: torch.dtype, heads: int, kv_heads: int, columns: int
) -> None:
    tokens, table = 50, table_of(heads, columns)
    positions = torch.arange(columns - tokens, columns, dtype=torch.int32)[None]
    keys, values = make_cache(2, kv_heads, columns, DIM, {1: columns - 1}, dtype)
    query = random(1, heads, tokens, DIM, dtype=dtype)
    whole = kernels.attend(query, keys, values, int32([1]), positions, 0.2, column_bias=table)
    for first, stop in ((0, 1), (49, 50), (3, 20)):
        part = positions[:, first:stop].contiguous()
        found = kernels.attend(query[:, :, first:stop], keys, values, int32([1]), part, 0.2, column_bias=table)
        assert same_bits(found[0], whole[0, first:stop])
    # As decode rows, with an idle one.
    rows = query.permute(2, 1, 0, 3)[[0, 49, 5]].contiguous()
    where = torch.cat([positions[0, [0, 49]], int32([-1])])[:, None].contiguous()
    decoded = kernels.attend(rows, keys, values, int32([1, 1, 1]), where, 0.2, column_bias=table)
    assert same_bits(decoded[:2, 0], whole[0, [0, 49]]) and not decoded[2].any()


def test_a_table_of_another_size_is_refused(best_kernels: Kernels) -> None:
    keys, values = make_cache(1, 2, 100, DIM, {0: 9}, torch.float32)
    query = random(1, 2, 1, DIM, dtype=torch.float32)
    for shape in ((2, 100), (2, 64), (1, 128)):
        with pytest.raises(PlanError):
            best_kernels.attend(query, keys, values, None, int32([[9]]), 0.2, column_bias=torch.zeros(shape))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["bloom", *(pytest.param(each, marks=pytest.mark.full) for each in ("mpt", "falcon"))]
)
def test_the_cpu_target_computes_it_by_its_kernel_in_slots_and_in_blocks(name: str, tmp_path: Path) -> None:
    model_of(name).save_pretrained(tmp_path / "checkpoint")
    slots, blocks = (
        artifact_runner(export_tiny(tmp_path / "checkpoint", tmp_path / folder, **sizes, target="cpu"))
        for folder, sizes in (("slots", SIZES), ("blocks", BLOCKS))
    )
    found = answers(slots, 1, PIECES[0])
    text = [*WORDS.tolist(), *(3 + index for index in range(5))]
    exact, own = (own_logits(name, text, dtype)[len(WORDS) - 1 :].double() for dtype in (torch.float64, torch.float32))
    assert (torch.stack(found) - exact).abs().max() <= 2 * (own - exact).abs().max()
    if name == "falcon":
        return  # its linear layers are products of its own code, left to torch, whose bits follow the graph
    slots.reset_slots()
    assert same(answers(slots, 0, PIECES[1], beside=False), found)
    blocks.assign_blocks(1, 0, (5, 0, 2))
    blocks.assign_blocks(2, 0, (3, 4))
    assert same(answers(blocks, 1, PIECES[1]), found)
