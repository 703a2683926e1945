# SPDX-License-Identifier: Apache-2.0
"""Measures the two own CPU kernels against the torch operators they replace, interleaved, on the shapes of SmolLM2-135M.

`linears` with few rows is bound by reading weights, so its weights are cycled through more copies than any cache holds;
`attend` reads a KV cache in place and is compared with scaled_dot_product_attention over the same keys under an additive
mask.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from optimum_neuron.targets.cpu import kernels


REPEATS = 25
LINEAR_SHAPES = ((576, (576, 192, 192)), (576, (1536, 1536)), (1536, (576,)), (576, (49152,)))
# Token generation, then steps that also take in a part of a prompt.
LINEAR_ROWS = (1, 8, 40, 72, 136, 264)
HEADS, KV_HEADS, HEAD_DIM, SLOTS, LENGTH = 9, 3, 64, 8, 2048
# Rows, tokens per row, and the position behind the last token.
ATTENTION_SHAPES = ((1, 1, 256), (1, 1, 2048), (8, 1, 256), (8, 1, 2048), (1, 256, 512), (1, 512, 512), (1, 512, 2048))
COLD_BYTES = 512 << 20


def ratio(theirs: Callable[[int], Any], ours: Callable[[int], Any]) -> tuple[float, float]:
    """Median milliseconds of ours, and the median of their time over ours, pair by pair."""
    theirs(0), ours(0)
    times, ratios = [], []
    for turn in range(REPEATS):
        start = time.perf_counter()
        theirs(turn)
        middle = time.perf_counter()
        ours(turn)
        times.append(time.perf_counter() - middle)
        ratios.append((middle - start) / times[-1])
    return 1e3 * statistics.median(times), statistics.median(ratios)


def measure_linears(dtype: torch.dtype, rows: int, inputs: int, outputs: tuple[int, ...]) -> dict[str, Any]:
    copies = max(2, COLD_BYTES // (inputs * sum(outputs) * dtype.itemsize) // 8)
    weights = [[torch.randn(size, inputs).to(dtype) for size in outputs] for _ in range(copies)]
    x = torch.randn(rows, inputs).to(dtype)
    kernel = getattr(torch.ops, kernels.namespace()).linears
    none = [None] * len(outputs)
    milliseconds, times_faster = ratio(
        lambda turn: [functional.linear(x, weight) for weight in weights[turn % copies]],
        # Half a cycle away: what torch has just read must not be in the cache.
        lambda turn: kernel(x, weights[(turn + copies // 2) % copies], none),
    )
    shape = f"{rows} rows, {inputs} -> {'+'.join(map(str, outputs))}"
    return row("linears", dtype, shape, milliseconds, times_faster)


def measure_attend(dtype: torch.dtype, rows: int, tokens: int, stop: int) -> dict[str, Any]:
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

    milliseconds, times_faster = ratio(theirs, ours)
    return row("attend", dtype, f"{rows} x {tokens} tokens up to {stop}", milliseconds, times_faster)


def row(kernel: str, dtype: torch.dtype, shape: str, milliseconds: float, times_faster: float) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    return {"kernel": kernel, "dtype": name, "shape": shape, "ms": milliseconds, "times_faster": times_faster}


def main() -> None:
    """Prints a table and, as the last line, one JSON object."""
    if not kernels.are_fast_here():
        raise SystemExit("error: this CPU lacks AVX512-BF16, so the cpu target uses torch's operators here")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        kernels.build(library)
        kernels.load(library, kernels.namespace())
    table = Table("kernel", "dtype", "shape", "ms", "times faster than torch", title="CPU kernels")
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for inputs, outputs in LINEAR_SHAPES:
            results += [measure_linears(dtype, rows, inputs, outputs) for rows in LINEAR_ROWS]
        results += [measure_attend(dtype, *shape) for shape in ATTENTION_SHAPES]
    for result in results:
        table.add_row(
            result["kernel"], result["dtype"], result["shape"], f"{result['ms']:.3f}", f"{result['times_faster']:.2f}"
        )
    Console().print(table)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
