# SPDX-License-Identifier: Apache-2.0
"""Products with quantized weights as HLO: exact where nothing is rounded, and without a copy of the weight where none is needed."""

from __future__ import annotations

import math

import pytest
import torch
from lowered import lower_function, run_lowered
from quantized import ROUNDINGS, values_of
from torch import Tensor

from optimum_neuron.step.features.codes.weight import PACKED, QuantizedWeight
from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.graphs.weight_layout import FileWeight
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.operators.codes import STORED_PRODUCT, blocks_of


INPUTS, OUTPUTS = 96, 40
FEW, MANY = 3, 24  # rows: fewer than half of a group of 16, and more
# Of groups of inputs, with many rows, the weight is scaled before the product, and rounded to the type of x.
SCALED = ("int4", "int4 with a zero point", "int8 in groups", "fp4")


def stored(weight: QuantizedWeight) -> list[Tensor]:
    blocks = blocks_of(weight.scale.shape[1]) if weight.kind in PACKED else 0
    codes = FileWeight(("codes",), (1, 0), blocks).tensor(lambda _: weight.codes)
    others = [each.t() for each in (weight.scale, weight.shift) if each is not None]
    return [each.contiguous() for each in (codes, *others)]


def lowered(form: str, rows: int, dtype: torch.dtype) -> tuple[LoweredGraph, list[Tensor], QuantizedWeight]:
    torch.manual_seed(len(form) + rows)
    weight = ROUNDINGS[form](torch.randn(OUTPUTS, INPUTS))
    tensors = [torch.randn(rows, INPUTS).to(dtype), *stored(weight)]

    def product(x: Tensor, codes: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        return STORED_PRODUCT(x, codes, scale, shift, weight.kind, rows)

    return lower_function(product, tensors), tensors, weight


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(
    ("form", "dtype"),
    [(form, torch.bfloat16) for form in ROUNDINGS]
    + [("int4 with a zero point", torch.float32), ("fp8", torch.float16)],
)
def test_products_are_those_of_the_dequantized_weight(form: str, dtype: torch.dtype, rows: int) -> None:
    graph, tensors, weight = lowered(form, rows, dtype)
    assert lint("function", graph.hlo, graph.io, "hlo") == []
    (found,) = run_lowered(graph, tensors)
    exact = values_of(weight.kind, weight.codes, weight.scale, weight.shift).double()
    expected = tensors[0].double() @ exact.t()
    sizes = tensors[0].double().abs() @ exact.abs().t()
    rounding = torch.finfo(dtype).eps / 2 if rows == MANY and form in SCALED else 0.0
    assert ((found - expected).abs() <= (rounding + 1e-6) * sizes).all()


@pytest.mark.parametrize("form", ROUNDINGS)
def test_scales_follow_the_product_where_that_takes_less(form: str) -> None:
    for rows in (FEW, MANY):
        graph, *_ = lowered(form, rows, torch.bfloat16)
        module = hlo.parse(graph.hlo)
        by_id = {each.id: each for _, each in hlo.instructions(module)}
        dots = [each for each in by_id.values() if each.opcode == "dot"]
        assert dots and all(hlo.dtype_name(each.shape) == "float32" for each in dots)
        scaled = rows == MANY and form in SCALED
        wide = [
            each
            for each in by_id.values()
            if each.opcode == "multiply"
            and hlo.dtype_name(each.shape) == "float32"
            and _count(each) >= INPUTS * OUTPUTS / 2
        ]
        assert bool(wide) == scaled, [each.name for each in wide]


def _count(instruction: object) -> int:
    return math.prod(instruction.shape.dimensions)  # type: ignore[attr-defined]


def test_a_byte_holds_codes_that_meet_the_same_scales() -> None:
    """Half a block apart: of an even number of groups in two groups, of an odd number in the halves of one."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(2, 6)  # 96 inputs
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    for blocks in (1, 3):
        own = FileWeight(("a.codes",), (1, 0), blocks)
        found = own.tensor(lambda _: packed).t()
        first, second = (found & 15, found >> 4)
        half = 48 // blocks
        for byte in range(48):
            place = byte // half * 2 * half + byte % half
            assert torch.equal(first[:, byte], codes[:, place]) and torch.equal(
                second[:, byte], codes[:, place + half]
            )
        assert own.name == f"a.codes.order_1_0_halves_{blocks}" and own.shape({"a.codes": (2, 48)}.__getitem__) == (
            48,
            2,
        )
