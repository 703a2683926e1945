# SPDX-License-Identifier: Apache-2.0
"""Maps against torch: every operator on numbers of all kinds, and what becomes of graphs of them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from kernel_calls import DTYPES, INFINITY, NAN, ROUNDING, Kernels, Planned, all_same, same_bits, with_dtypes
from torch import Tensor
from torch.nn import functional

from optimum_neuron.kernels.steps.steps import OPS


_INTEGERS = (0, 1, -1, 2, 3, 7, 31, -128, 2**24 + 1, 2**31 - 1, -(2**31), -(2**31) + 1)


def special(dtype: torch.dtype) -> Tensor:
    """Zeros, the largest and smallest numbers, subnormal ones, ties of roundings, and what is no number."""
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    positive = [0.0, least, 3 * least, info.smallest_normal * 0.75, info.smallest_normal, 1e-4, 0.49999, 0.5, 1.0]
    positive += [1.0 + info.eps, 1.5, 2.5, 3.0, 9.0, 20.5, 88.0, 1000.0, info.max / 2, info.max, INFINITY]
    return torch.tensor([*positive, *(-number for number in positive), NAN], dtype=torch.float64).to(dtype)


def numbers(dtype: torch.dtype) -> Tensor:
    """More than a tile holds, and no multiple of a vector."""
    if dtype == torch.bool:
        return torch.rand(2111) < 0.5
    if dtype == torch.int32:
        return torch.cat([torch.randint(-(2**31), 2**31, (2100,), dtype=torch.int32), torch.tensor(_INTEGERS).int()])
    scales = torch.tensor([1e-3, 1.0, 10.0, 80.0]).repeat_interleave(525)
    return torch.cat([torch.randn(2100) * scales, special(dtype).float()]).to(dtype)


def pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    some = special(dtype) if dtype.is_floating_point else numbers(dtype)[-20:]
    return some[:, None].contiguous(), some[None]


def plan_of(kernels: Kernels, function: Callable[..., Any], inputs: Sequence[Tensor], *operators: str) -> Planned:
    """A plan that has these operators."""
    planned = Planned(kernels, function, inputs)
    assert planned.operators.issuperset(operators), {*operators} - planned.operators
    return planned


def check_exact(kernels: Kernels, table: Mapping[str, Sequence[Any]], inputs: Sequence[Tensor]) -> None:
    """Whether functions of the same inputs, in one plan, give the bits of torch; beside each, what it becomes."""
    functions = [entry[0] for entry in table.values()]
    operators = [operator for entry in table.values() for operator in entry[1:]]
    planned = plan_of(kernels, lambda *given: tuple(function(*given) for function in functions), inputs, *operators)
    for name, function, found in zip(table, functions, planned(*inputs), strict=True):
        expected = function(*inputs).contiguous()
        assert same_bits(found, expected), (name, found[found != expected], expected[found != expected])


ARITHMETIC: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul")},
    "max": torch.maximum,
    "min": torch.minimum,
}
COMPARISONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
_UNARY = ("neg", "abs", "reciprocal", "relu", "floor", "ceil", "round", "trunc", "isnan")
# Functions of numbers of any type that a plan computes to torch's bits, and the operators that it must have for them.
EXACT_UNARY: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    **{name: (getattr(torch, name), name) for name in _UNARY},
    **{
        f"{name} {number}": (lambda x, compare=each, number=number: compare(x, number), name)
        for (name, each), number in product(COMPARISONS.items(), (0.5, 0.1))  # which is rounded
    },
    "reciprocal by power": (lambda x: x**-1, "reciprocal"),
    "square": (lambda x: x.square(), "mul"),
    "power of two": (lambda x: x**2, "mul"),
    "constant added": (lambda x: x + 0.1, "add"),
    "constant subtracted": (lambda x: x - 0.1, "sub"),
    "subtracted from a constant": (lambda x: 0.3 - x, "sub"),
    "multiplied by a constant": (lambda x: x * 1.7, "mul"),
    "divided by a constant": (lambda x: x / 3, "div"),
    "clamp": (lambda x: x.clamp(-0.7, 20.1), "max"),
    "clamp from below": (lambda x: x.clamp_min(0.1), "max"),
    "clamp from above": (lambda x: x.clamp(max=0.1), "min"),
    "masked fill": (lambda x: x.masked_fill(x > 1, -INFINITY), "where"),
    "where, of constants": (lambda x: torch.where(x > 0.5, 1.5, -2.0).to(x.dtype), "where"),
    "where, of a constant first": (lambda x: torch.where(x > 0.5, 0.1, x), "where"),
    "where, of a constant last": (lambda x: torch.where(x > 0.5, x, 0.1), "where"),
    "to float32": (lambda x: x.float() * 1, "mul"),
    "to bfloat16": (lambda x: x.bfloat16(), "store"),
    "to float16": (lambda x: x.half(), "store"),
    "to bool": (lambda x: x.bool(), "to_bool"),
}


@with_dtypes
def test_operators_that_round_exactly_give_the_bits_of_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    check_exact(kernels, EXACT_UNARY, [numbers(dtype)])


EXACT_BINARY: dict[str, Callable[..., Tensor]] = {
    **ARITHMETIC,
    **COMPARISONS,
    "div": operator.truediv,
    "where": lambda x, y: torch.where(x < y, x, y),
}


@with_dtypes
def test_operators_of_two_numbers_give_the_bits_of_torch(kernels: Kernels, dtype: torch.dtype) -> None:
    table = {name: (function, name) for name, function in EXACT_BINARY.items()}
    check_exact(kernels, table, pairs(dtype))
    shuffled = numbers(dtype)
    check_exact(kernels, table, [shuffled, shuffled[torch.randperm(len(shuffled))]])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_constants_are_rounded_where_torch_rounds_them(kernels: Kernels, dtype: torch.dtype) -> None:
    constant, functions = torch.tensor(0.1), {}
    for name, each in (ARITHMETIC | {"div": operator.truediv}).items():
        functions[name] = (lambda x, each=each: each(x, constant),)
        functions[f"{name} from the left"] = (lambda x, each=each: each(constant, x),)
    check_exact(kernels, functions, [numbers(dtype)])


# Functions that nobody rounds exactly, with how many units in the last place of float32 they may be off.
_CLOSE = {"sqrt": 0.51, "rsqrt": 1.5, "sigmoid": 3} | dict.fromkeys(("exp", "tanh", "erf", "expm1", "log1p"), 2)
_CLOSE |= dict.fromkeys(("log", "sin", "cos"), 1)
CLOSE: dict[str, tuple[Callable[[Tensor], Tensor], str, float]] = {
    **{name: (getattr(torch, name), name, ulps) for name, ulps in _CLOSE.items()},
    "square root by power": (lambda x: x.abs() ** 0.5, "sqrt", 0.51),
    "rsqrt by power": (lambda x: x.abs() ** -0.5, "rsqrt", 1.5),
    "power of three": (lambda x: x**3, "mul", 1.5),
    "power": (lambda x: x.abs() ** 1.5, "pow", 1),
    "negative power": (lambda x: x.abs() ** -1.5, "pow", 1),
    "silu": (functional.silu, "silu", 3),
    "gelu": (functional.gelu, "gelu", 2),
    "gelu_tanh": (lambda x: functional.gelu(x, approximate="tanh"), "gelu_tanh", 3),
    "softplus": (functional.softplus, "softplus", 3),
}


@with_dtypes
def test_functions_are_as_exact_as_their_type(kernels: Kernels, dtype: torch.dtype) -> None:
    x = numbers(dtype)
    functions = [function for function, _, _ in CLOSE.values()]
    operators = [operator for _, operator, _ in CLOSE.values()]
    results = plan_of(kernels, lambda x: tuple(function(x) for function in functions), [x], *operators)(x)
    for (name, (function, _, ulps)), found in zip(CLOSE.items(), results, strict=True):
        exact = function(x.double())
        # What a difference to one cancels is lost.
        scale = torch.maximum(exact.abs(), x.double().abs()) if "gelu" in name else exact.abs()
        check_close(found, exact, scale * ulps * 2.0**-23, name, least=2e-36 if name == "silu" else 2e-38)


def check_close(found: Tensor, exact: Tensor, error: Tensor, name: str = "", *, least: float = 2e-38) -> None:
    """Whether a result is the nearest number of its type to one that is off by no more than `error`."""
    kind, expected = torch.finfo(found.dtype), exact.to(found.dtype)
    assert torch.equal(found.isnan(), expected.isnan()), name
    finite = expected.isfinite()
    assert torch.equal(found[~finite].nan_to_num(1), expected[~finite].nan_to_num(1)), name
    assert found[finite].isfinite().all(), name
    rounding = exact.abs() * ROUNDING[found.dtype] + kind.smallest_normal * kind.eps
    if found.dtype == torch.float32:
        rounding = 0 * exact.abs()
    wrong = ((found.double() - exact).abs() > (error + rounding) * 1.001 + least) & finite
    assert not wrong.any(), (name, found[wrong][:5].tolist(), exact[wrong][:5].tolist())


INTEGER_UNARY: dict[str, tuple[Any, ...]] = {
    "negative": (lambda x: -x, "ineg"),
    "abs": (lambda x: x.abs(), "iabs"),
    "constant added": (lambda x: x + 7, "iadd"),
    "constant subtracted": (lambda x: x - 2**30, "isub"),
    "multiplied by a constant": (lambda x: x * -3, "imul"),
    "clamp": (lambda x: x.clamp(-5, 100), "imax"),
    **{
        f"{name} a constant": (lambda x, compare=each: compare(x, 7), "i" + name) for name, each in COMPARISONS.items()
    },
    "masks": (lambda x: (x & 255) | 16, "iand"),
    "divided, rounded down": (lambda x: x // 7, "ifloor_div"),
    "divided by the largest": (lambda x: torch.div(x, 2**31 - 1, rounding_mode="floor"), "ifloor_div"),
    "remainder": (lambda x: x % 12, "ifloor_div", "imul", "isub"),
    "where": (lambda x: torch.where(x > 0, x, -1), "where"),
    "masked fill": (lambda x: x.masked_fill(x < 0, 5), "where"),
    "to float32": (lambda x: x.float(), "to_float"),
    "to bfloat16": (lambda x: x.bfloat16(), "to_float"),
    "to float16": (lambda x: (x & 65535).half(), "to_float"),
    "to bool": (lambda x: x.bool(), "ito_bool"),
    "plus a fraction": (lambda x: x + 0.5, "to_float"),
    "divided": (lambda x: x / 3, "div"),
}
INTEGER_BINARY: dict[str, Callable[..., Tensor]] = {
    **{"i" + name: each for name, each in (ARITHMETIC | COMPARISONS).items()},
    **{f"i{name.strip('_')}": getattr(operator, name) for name in ("and_", "or_", "xor")},
}


BOOLEAN: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "logical and": (torch.logical_and, "iand"),
    "logical or": (torch.logical_or, "ior"),
    "logical exclusive or": (torch.logical_xor, "ixor"),
    "nots": (lambda x, y: (~x & y) | x.logical_not() ^ y, "inot"),
    "equal": (lambda x, y: x == y, "ieq"),
    "not equal": (lambda x, y: x != y, "ine"),
    "where": (lambda x, y: torch.where(x, y, True), "where"),
    "to int32": (lambda x, y: x.int() + y.int(), "iadd"),
    "to float32": (lambda x, y: x.float() * y, "to_float"),
    "to bfloat16": (lambda x, y: x.bfloat16() + y, "to_float"),
}


CODES: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "float32": (lambda x: x.float() * 0.3,),
    "bfloat16": (lambda x: x.bfloat16(),),
    "of columns": (lambda x: x[:, 3:30:2].float(),),
    "int32": (lambda x: x.int() * 3,),
    "bool": (lambda x: x.bool(),),
}
MIXED: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "arithmetic": (lambda x, y, z: (x + z) * y,),
    "where": (lambda x, y, z: torch.where(z > 0, x, y),),
    "comparisons": (lambda x, y, z: (y > z) == (x < y),),
    "float16": (lambda x, y, z: torch.maximum(y.half(), z.half()),),
    "truths": (lambda x, y, z: (x * (y > 0)) * z.bool(),),
}


def test_integers_truths_codes_and_types_that_meet_give_the_bits_of_torch(kernels: Kernels) -> None:
    check_exact(kernels, INTEGER_UNARY, [numbers(torch.int32)])
    check_exact(kernels, {name: (each, name) for name, each in INTEGER_BINARY.items()}, pairs(torch.int32))
    check_exact(kernels, BOOLEAN, [numbers(torch.bool), numbers(torch.bool)])
    check_exact(kernels, CODES, [torch.arange(-128, 128, dtype=torch.int8).repeat(9).view(64, 36)])
    integers = torch.randint(-9, 9, (7, 1), dtype=torch.int32)
    check_exact(kernels, MIXED, [torch.randn(7, 33), torch.randn(33).bfloat16(), integers])


def test_numbers_become_integers_toward_zero(kernels: Kernels) -> None:
    x = torch.cat([torch.randn(2100) * 1000, torch.tensor([0.0, -0.0, 0.99999, -0.99999, 2.0**31 - 128, -(2.0**31)])])
    for dtype in DTYPES:
        y = x.to(dtype)
        check_exact(kernels, {"": (lambda x: x.int(), "to_int")}, [y[y.float().abs() <= 2.0**31 - 128]])
    check_exact(kernels, {"": (lambda x: x.int() * 2, "imul")}, [torch.randint(-(2**31), 2**31, (2111,))])


# Rows of one element, of fewer and more than are summed side by side, and of more than a tile.
ROWS = [(1, 1), (5, 2), (300, 31), (3, 33), (70, 64), (2, 2048), (3, 5001)]


@with_dtypes
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_sums_and_means_are_as_exact_as_their_type(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = torch.randn(shape).to(dtype)

    def totals(x: Tensor) -> tuple[Tensor, ...]:
        return x.sum(-1), x.mean(-1), x.sum(), x.mean(0, keepdim=True)

    for found, exact, terms in zip(
        plan_of(kernels, totals, [x])(x), totals(x.double()), totals(x.double().abs()), strict=True
    ):
        check_close(found, exact, terms * 2.0**-21)


@with_dtypes
@pytest.mark.parametrize("shape", ROWS, ids=str)
def test_softmax_and_norms_are_as_exact_as_their_type(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x = (torch.randn(shape) * 4).to(dtype)
    x[0, 0] = -INFINITY if shape[1] > 1 else 0
    (found,) = Planned(kernels, lambda x: x.softmax(-1), [x])(x)
    exact = x.double().softmax(-1)
    distance = (x.double().amax(-1, keepdim=True) - x.double()).nan_to_num(0, 0, 0) + 8
    check_close(found, exact, exact * distance * 2.0**-22)
    x[0, 0] = 1
    weight, bias = torch.randn(shape[1]).to(dtype), torch.randn(shape[1]).to(dtype)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (shape[1],), weight, bias)

    if shape[1] > 1:
        planned = plan_of(kernels, norm, [x, weight, bias])
        for inputs in ((x, weight, bias), (x * 100 + 30, weight, bias)):
            (found,) = planned(*inputs)
            exact = norm(*(each.double() for each in inputs))
            spread = (inputs[0].double().abs().amax(-1, keepdim=True) / inputs[0].double().std(-1, keepdim=True)) + 4
            check_close(found, exact, (weight.double().abs() * spread + bias.double().abs()) * 2.0**-21)


@with_dtypes
@pytest.mark.parametrize("columns", [2, 31, 40, 64, 130])
def test_rows_are_read_where_they_lie(kernels: Kernels, dtype: torch.dtype, columns: int) -> None:
    def part(x: Tensor) -> Tensor:
        return x[..., 5 : 5 + columns]

    def largest(x: Tensor) -> Tensor:
        return part(x).amax(-1, keepdim=True)

    functions: dict[str, Sequence[Any]] = {
        "with one number each": (lambda x, y, z: part(x) - largest(x), "spread"),
        "with one of another type": (lambda x, y, z: part(x) * largest(x).float(), "spread"),
        "by an operator that takes none": (lambda x, y, z: torch.minimum(largest(x) * 3, part(x)),),
        "the same for all": (lambda x, y, z: z * (part(x) - largest(x)),),
        "the same for some": (lambda x, y, z: (part(x) + y) * (part(x) > largest(x) / 2),),
        "with themselves": (lambda x, y, z: part(x) * part(x) + largest(x),),
        "one behind another": (lambda x, y, z: (x + x.amax(-1, keepdim=True)) - x,),
        "turned": (lambda x, y, z: (part(x).transpose(0, 1) - z) + largest(x).transpose(0, 1),),
    }
    shapes = (70, 3, columns + 9), (70, 1, columns), (columns,)  # of whole numbers, which nothing rounds
    check_exact(kernels, functions, [torch.randint(-5, 6, shape).to(dtype) for shape in shapes])


@with_dtypes
def test_a_result_is_stored_as_often_as_it_is_asked_for(kernels: Kernels, dtype: torch.dtype) -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        product = x * y
        return product, product, product.float()

    inputs = [torch.randint(-5, 6, (2111,)).to(dtype) for _ in range(2)]
    planned = plan_of(kernels, function, inputs)
    assert len(planned.plan.steps) == 1 and all_same(planned(*inputs), function(*inputs))


OF_FLOATS: dict[str, Sequence[Any]] = {
    "largest": (lambda x: x.amax(-1), "row_max"),
    "smallest": (lambda x: x.amin(-1), "row_min"),
    "sum": (lambda x: (x / 64).sum(-1).abs() > 1e30, "sum"),
    "of all": (lambda x: x.max() + x.min(),),
    "any": (lambda x: (x > x.amax(-1, keepdim=True)).any(-1), "spread"),
}
OF_INTEGERS: dict[str, Sequence[Any]] = {
    "largest": (lambda x: x.amax(-1), "irow_max"),
    "smallest": (lambda x: x.amin(-1), "irow_min"),
    "sum": (lambda x: x.sum(-1, dtype=torch.int32), "isum"),
    "of some": (lambda x: x.view(4, 8, 65).amin((0, 2), True), "irow_min"),
    "sum of some": (lambda x: x.view(4, 8, 65).sum((0, 1), dtype=torch.int32), "isum"),
}
OF_TRUTHS: dict[str, Sequence[Any]] = {
    "any": (lambda x: x.any(-1), "irow_max"),
    "all": (lambda x: x.all(1), "irow_min"),
    "kept": (lambda x: x.any(0, keepdim=True), "irow_max"),
}


def test_reductions_of_special_numbers_are_those_of_torch(kernels: Kernels) -> None:
    for dtype in DTYPES:
        x = special(dtype)
        rows = torch.stack([x, x.nan_to_num(2, INFINITY, 3), x.nan_to_num(2, 3, -INFINITY), -x.abs().nan_to_num(2)])
        check_exact(kernels, OF_FLOATS, [rows])
    check_exact(kernels, OF_INTEGERS, [numbers(torch.int32)[-2080:].view(4, 520)])
    check_exact(kernels, OF_TRUTHS, [torch.rand(9, 3, 5) < 0.4])


def test_every_operator_of_a_map_is_tested() -> None:
    tables = [*EXACT_UNARY.values(), *CLOSE.values(), *INTEGER_UNARY.values(), *BOOLEAN.values()]
    tested = {entry[1] for entry in tables} | {*EXACT_BINARY} | {*INTEGER_BINARY}
    reductions = "sum row_max row_min isum irow_max irow_min spread"
    tested |= {*f"load store to_int rotate_half round_bfloat16 round_float16 {reductions}".split()}
    assert tested == {*OPS}
