# SPDX-License-Identifier: Apache-2.0
"""Measures the two own CPU kernels against the torch operators they replace, interleaved, on the shapes of SmolLM2-135M.

`linears` with few rows is bound by reading weights, so its weights are cycled through more copies than any cache holds;
`attend` reads a KV cache in place and is compared with scaled_dot_product_attention over the same keys under an additive
mask.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from optimum_neuron.targets.cpu import kernels

from ..output import make_table
from .pairs import Result, compare, run


LINEAR_SHAPES = ((576, (576, 192, 192)), (576, (1536, 1536)), (1536, (576,)), (576, (49152,)))
# Token generation, then steps that also take in a part of a prompt.
LINEAR_ROWS = (1, 8, 40, 72, 136, 264)
HEADS, KV_HEADS, HEAD_DIM, SLOTS, LENGTH = 9, 3, 64, 8, 2048
# Rows, tokens per row, and the position behind the last token.
ATTENTION_SHAPES = ((1, 1, 256), (1, 1, 2048), (8, 1, 256), (8, 1, 2048), (1, 256, 512), (1, 512, 512), (1, 512, 2048))
COLD_BYTES = 512 << 20


def measure_linears(dtype: torch.dtype, rows: int, inputs: int, outputs: tuple[int, ...], pairs: int) -> Result:
    copies = max(2, COLD_BYTES // (inputs * sum(outputs) * dtype.itemsize) // 8)
    weights = [[torch.randn(size, inputs).to(dtype) for size in outputs] for _ in range(copies)]
    x = torch.randn(rows, inputs).to(dtype)
    kernel = getattr(torch.ops, kernels.namespace()).linears
    none = [None] * len(outputs)
    milliseconds, times_faster = compare(
        lambda turn: [functional.linear(x, weight) for weight in weights[turn % copies]],
        # Half a cycle away: what torch has just read must not be in the cache.
        lambda turn: kernel(x, weights[(turn + copies // 2) % copies], none),
        pairs,
    )
    shape = f"{rows} rows, {inputs} -> {'+'.join(map(str, outputs))}"
    return row("linears", dtype, shape, milliseconds, times_faster)


def measure_attend(dtype: torch.dtype, rows: int, tokens: int, stop: int, pairs: int) -> Result:
    keys, values = (torch.randn(SLOTS + 1, KV_HEADS, LENGTH, HEAD_DIM).to(dtype) for _ in range(2))
    query = torch.randn(rows, HEADS, tokens, HEAD_DIM).to(dtype)
    positions = torch.arange(stop - tokens, stop, dtype=torch.int32).expand(rows, -1).contiguous()
    kernel = getattr(torch.ops, kernels.namespace()).attend
    folded = query.unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
    visible = torch.arange(stop) <= positions[0, :, None]
    mask = torch.where(visible, 0.0, -1e9).to(dtype).repeat(HEADS // KV_HEADS, 1)[None, None]

    def theirs(_: int) -> Tensor:
        return functional.scaled_dot_product_attention(folded, keys[:rows, :, :stop], values[:rows, :, :stop], mask)

    def ours(_: int) -> Tensor:
        return kernel(query, keys, values, None, positions, HEAD_DIM**-0.5, 0)

    milliseconds, times_faster = compare(theirs, ours, pairs)
    return row("attend", dtype, f"{rows} x {tokens} tokens up to {stop}", milliseconds, times_faster)


def row(kernel: str, dtype: torch.dtype, shape: str, milliseconds: float, times_faster: float) -> Result:
    name = str(dtype).removeprefix("torch.")
    return {"kernel": kernel, "dtype": name, "shape": shape, "ms": milliseconds, "times_faster": times_faster}


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    table = make_table("CPU kernels", ("kernel", "dtype", "shape"), ("ms", "times faster than torch"))
    return run("dense", __doc__, table, measure_all, _cells)


def measure_all(dtype: torch.dtype, pairs: int) -> list[Result]:
    linears = [
        measure_linears(dtype, rows, inputs, outputs, pairs)
        for inputs, outputs in LINEAR_SHAPES
        for rows in LINEAR_ROWS
    ]
    return linears + [measure_attend(dtype, *shape, pairs) for shape in ATTENTION_SHAPES]


def _cells(result: Result) -> tuple[str, ...]:
    texts = (result[name] for name in ("kernel", "dtype", "shape"))
    return (*texts, f"{result['ms']:.3f}", f"{result['times_faster']:.2f}")


if __name__ == "__main__":
    sys.exit(main())
