# SPDX-License-Identifier: Apache-2.0
"""Measures linear layers of quantized weights against the same kernels' layers of plain ones, interleaved.

One row is bound by reading weights: what a second of it reads is told, and the share of what torch reads at most. Weights are cycled
through more copies than any cache holds, in huge pages, as those of a loaded artifact are. Codes of int8 and int4 are also multiplied
with activations rounded to int8, against the same codes with activations as they are.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from optimum_neuron.artifact.pages import zeroed
from optimum_neuron.kernels.plan.program import Codes, Layer, Linears
from optimum_neuron.step.features.codes.weight import CODE_DTYPES, PACKED, UNUSED_SCALE_BITS, QuantizedWeight

from ..limits import measure_limits
from ..output import Table
from .dense import plan_linears
from .pairs import Result, compare, run
from .plans import Operands, Run


INPUTS, OUTPUTS = 2048, 8192
ROWS = (1, 8, 128, 512, 2048)
COLD_BYTES = 256 << 20
# Kinds of codes that meet activations of int8.
ROUNDED = ("int8", "int4")


@dataclass(frozen=True)
class Form:
    """How a weight is quantized; a group of 0 inputs is all of them."""

    kind: str
    group: int
    scale: torch.dtype
    shifted: bool = False
    short: bool = False  # scales as exports round them, and not as a checkpoint may have them

    def __str__(self) -> str:
        name = "short scale" if self.short else "scale"
        return f"{self.kind}, {self.group or 'all'} inputs to a {name}{' and shift' if self.shifted else ''}"

    def weight(self) -> QuantizedWeight:
        """Random codes and scales."""
        codes = torch.randint(0, 120, (OUTPUTS, INPUTS // 2 if self.kind in PACKED else INPUTS), dtype=torch.uint8)
        groups = (OUTPUTS, INPUTS // (self.group or INPUTS))
        shift = torch.rand(groups) if self.shifted else None
        own = in_huge_pages(codes).view(CODE_DTYPES[self.kind])
        scale = torch.rand(groups).to(self.scale)
        if self.short:
            scale = (scale.view(torch.int16) & ~UNUSED_SCALE_BITS).view(scale.dtype)
        return QuantizedWeight(self.kind, own, scale, shift)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """A copy that lies as an artifact's weights do."""
    memory = zeroed(tensor.nbytes)
    return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)


FORMS = (
    Form("int8", 0, torch.float32),
    Form("int8", 32, torch.float16),
    Form("int4", 32, torch.float16),
    Form("int4", 32, torch.float16, shifted=True),
    Form("int4", 32, torch.float16, short=True),
    Form("int4", 64, torch.float16, short=True),
    Form("int4", 128, torch.float16, short=True),
    Form("fp8", 0, torch.float32),
    Form("fp4", 32, torch.bfloat16),
)


def plan_quantized(x: Tensor, weight: QuantizedWeight, activations: str | None = None) -> Run:
    operands = Operands()
    shift = None if weight.shift is None else operands(weight.shift)
    codes = Codes(weight.kind, operands(weight.scale), shift, activations)
    output = operands.output((len(x), weight.outputs), x.dtype)
    return operands.bind(Linears(operands(x), (Layer(operands(weight.codes), None, output, codes),)))


def measure(dtype: torch.dtype, form: Form, plain: list[Tensor], read: float, pairs: int) -> list[Result]:
    """Results for all numbers of rows.

    Args:
        read: bytes per second that memory gives at most.
    """
    weight = form.weight()
    size = weight.codes.nbytes + weight.scale.nbytes + (0 if weight.shift is None else weight.shift.nbytes)
    weights = [form.weight() for _ in range(1, max(2, COLD_BYTES // size))] + [weight]
    results = []
    for rows in ROWS:
        x = torch.randn(rows, INPUTS).to(dtype)
        theirs, ours = [plan_linears(x, [each]) for each in plain], [plan_quantized(x, each) for each in weights]
        milliseconds, times = compare(
            lambda turn, theirs=theirs: theirs[turn % len(theirs)](()),  # type: ignore[misc]
            lambda turn, ours=ours: ours[turn % len(ours)](()),  # type: ignore[misc]
            pairs,
        )
        rounded = None
        if form.kind in ROUNDED:
            others = [plan_quantized(x, each, "int8") for each in weights]
            rounded = compare(
                lambda turn, ours=ours: ours[turn % len(ours)](()),  # type: ignore[misc]
                lambda turn, others=others: others[turn % len(others)](()),  # type: ignore[misc]
                pairs,
            )
        rate = size / milliseconds * 1e3
        name = str(dtype).removeprefix("torch.")
        results.append(
            {
                "weight": str(form),
                "dtype": name,
                "rows": rows,
                "ms": milliseconds,
                "times": times,
                "share": rate / read,
                "rounded_ms": rounded and rounded[0],
                "rounded_times": rounded and rounded[1],
                "rounded_share": rounded and size / rounded[0] * 1e3 / read,
            }
        )
    return results


def measure_all(dtype: torch.dtype, pairs: int) -> list[Result]:
    read = measure_limits().read
    copies = max(2, COLD_BYTES // (OUTPUTS * INPUTS * 2))
    plain = [in_huge_pages(torch.randn(OUTPUTS, INPUTS).to(dtype)) for _ in range(copies)]
    return [each for form in FORMS for each in measure(dtype, form, plain, read, pairs)]


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    title = f"Quantized linear layers, {INPUTS} -> {OUTPUTS}"
    columns = ("rows", "ms", "times as fast as plain", "of memory's rate")
    rounded = ("activations of int8: ms", "times as fast as without", "of memory's rate ")
    table = Table(title, ("weight", "dtype"), (*columns, *rounded))
    return run("quantized", __doc__, table, measure_all, _cells)


def _cells(result: Result) -> tuple[str, ...]:
    numbers = f"{result['ms']:.3f}", f"{result['times']:.2f}", f"{result['share']:.2f}"
    rounded = ("", "", "")
    if result["rounded_ms"] is not None:
        rounded = (
            f"{result['rounded_ms']:.3f}",
            f"{result['rounded_times']:.2f}",
            f"{result['rounded_share']:.2f}",
        )
    return (result["weight"], result["dtype"], str(result["rows"]), *numbers, *rounded)


if __name__ == "__main__":
    sys.exit(main())
