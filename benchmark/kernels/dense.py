# SPDX-License-Identifier: Apache-2.0
"""Measures own CPU kernels against the torch operators they replace, interleaved, on the shapes of SmolLM2-135M.

`linears` with few rows is bound by reading weights, so its weights are cycled through more copies than any cache holds;
`attend` reads a KV cache in place and is compared with scaled_dot_product_attention over the same keys under an additive
mask. Each kernel is a plan of one step.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.nn import functional

from optimum_neuron.kernels.plan.program import Attend, Layer, Linears

from ..output import Table
from .pairs import Result, compare, run
from .plans import Operands, Run


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
    plans = [plan_linears(x, each) for each in weights]
    milliseconds, times_faster = compare(
        lambda turn: [functional.linear(x, weight) for weight in weights[turn % copies]],
        lambda turn: plans[turn % copies](()),
        pairs,
    )
    shape = f"{rows} rows, {inputs} -> {'+'.join(map(str, outputs))}"
    return row("linears", dtype, shape, milliseconds, times_faster)


def plan_linears(x: Tensor, weights: list[Tensor]) -> Run:
    operands = Operands()
    layers = [Layer(operands(each), None, operands.output((len(x), len(each)), x.dtype)) for each in weights]
    return operands.bind(Linears(operands(x), tuple(layers)))


def measure_attend(dtype: torch.dtype, rows: int, tokens: int, stop: int, pairs: int) -> Result:
    keys, values = (torch.randn(SLOTS + 1, KV_HEADS, LENGTH, HEAD_DIM).to(dtype) for _ in range(2))
    query = torch.randn(rows, HEADS, tokens, HEAD_DIM).to(dtype)
    positions = torch.arange(stop - tokens, stop, dtype=torch.int32).expand(rows, -1).contiguous()
    plan = plan_attend(query, keys, values, positions)
    folded = query.unflatten(1, (KV_HEADS, -1)).flatten(2, 3)
    visible = torch.arange(stop) <= positions[0, :, None]
    mask = torch.where(visible, 0.0, -1e9).to(dtype).repeat(HEADS // KV_HEADS, 1)[None, None]

    def theirs(_: int) -> Tensor:
        return functional.scaled_dot_product_attention(folded, keys[:rows, :, :stop], values[:rows, :, :stop], mask)

    milliseconds, times_faster = compare(theirs, lambda _: plan(()), pairs)
    return row("attend", dtype, f"{rows} x {tokens} tokens up to {stop}", milliseconds, times_faster)


def plan_attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Run:
    rows, heads, tokens, dim = query.shape
    operands = Operands()
    return operands.bind(
        Attend(
            query=operands(query),
            keys=operands(keys),
            values=operands(values),
            blocks=None,
            positions=operands(positions),
            sinks=None,
            column_bias=None,
            output=operands.output((rows, tokens, heads, dim), query.dtype),
            scaling=dim**-0.5,
            window=0,
            softcap=0.0,
        )
    )


def row(kernel: str, dtype: torch.dtype, shape: str, milliseconds: float, times_faster: float) -> Result:
    name = str(dtype).removeprefix("torch.")
    return {"kernel": kernel, "dtype": name, "shape": shape, "ms": milliseconds, "times_faster": times_faster}


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    table = Table("CPU kernels", ("kernel", "dtype", "shape"), ("ms", "times faster than torch"))
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
