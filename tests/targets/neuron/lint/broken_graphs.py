# SPDX-License-Identifier: Apache-2.0
"""Graphs that break the rules of the lint, one or more of each, for the lint and for the fake compiler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from lowered import lower_function
from torch import Tensor, nn

from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.graphs.io import InputBinding, LoweredGraph, Role
from optimum_neuron.targets.neuron.lint.operator_rules import TOPK_CALL
from optimum_neuron.targets.neuron.operators import collectives


class Broken(NamedTuple):
    """A graph, the rule that it breaks, and words of what the lint says of it."""

    rule: str
    graph: Callable[[], LoweredGraph]
    fragment: str


def edited(graph: LoweredGraph, edit: Callable[[Any], None]) -> LoweredGraph:
    """The graph with its module changed by hand: for what no torch program lowers to."""
    module = hlo.parse(graph.hlo)
    edit(module)
    return dataclasses.replace(graph, hlo=hlo.serialize(module))


def first(module: Any, opcode: str) -> Any:
    return next(each for _, each in hlo.instructions(module) if each.opcode == opcode)


def floats(*shape: int) -> Tensor:
    return torch.ones(shape)


def indices(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def lowered(rule: str, function: Callable[..., Tensor], inputs: list[Tensor], fragment: str, ranks: int = 1) -> Broken:
    return Broken(rule, lambda: lower_function(function, inputs, ranks), fragment)


def bound(rule: str, role: Role, function: Callable[..., Tensor], inputs: list[Tensor], fragment: str) -> Broken:
    """A function of an input, and of codes and scales that are weights or states."""

    def made() -> LoweredGraph:
        graph = lower_function(function, inputs)
        given, *others = graph.io.inputs
        bindings = (given, *(dataclasses.replace(each, role=role) for each in others))
        return dataclasses.replace(graph, io=dataclasses.replace(graph.io, inputs=bindings))

    return Broken(rule, made, fragment)


def _products_of_one_copy(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    weight = codes.float()
    return (x @ weight + x.exp() @ weight) * scale


def _double(x: Tensor) -> Tensor:
    return x + x


@cache
def small() -> LoweredGraph:
    """Of a parameter, two constants, a product and a sum."""
    return lower_function(lambda x: x * 2 + 1, [floats(3)])


def changed(
    rule: str,
    function: Callable[..., Tensor],
    inputs: list[Tensor],
    opcode: str,
    change: Callable[[Any], None],
    fragment: str,
) -> Broken:
    """A function of which one instruction is changed."""
    return Broken(
        rule, lambda: edited(lower_function(function, inputs), lambda module: change(first(module, opcode))), fragment
    )


def called_otherwise(opcode: str) -> Callable[[Any], None]:
    return lambda instruction: setattr(instruction, "opcode", opcode)


def of_type(name: str) -> Callable[[Any], None]:
    return lambda instruction: setattr(instruction.shape, "element_type", hlo.ELEMENT_TYPES[name])


def renamed(rule: str, opcode: str, fragment: str = "") -> Broken:
    """A sum that is called otherwise."""
    return changed(rule, _double, [floats(3)], "add", called_otherwise(opcode), fragment)


def called(target: str, keys: Tensor, k: int, index_type: str = "uint32") -> Callable[[], LoweredGraph]:
    """A custom call of a row of `keys`, with k values and indices."""

    def edit(module: Any) -> None:
        call = first(module, "add")
        call.opcode, call.custom_call_target = "custom-call", target
        shape = type(call.shape)(element_type=13)
        for name in (str(keys.dtype).removeprefix("torch."), index_type):
            shape.tuple_shapes.add(element_type=hlo.ELEMENT_TYPES[name], dimensions=[k])
        call.shape.CopyFrom(shape)

    return lambda: edited(lower_function(lambda x: x + x, [keys]), edit)


def _convolution(fragment: str, **values: int) -> Broken:
    def dilate(instruction: Any) -> None:
        for dimension in instruction.window.dimensions:
            for name, value in values.items():
                setattr(dimension, name, value)

    inputs = [floats(1, 2, 9), floats(2, 2, 3)]
    return changed("convolution", nn.functional.conv1d, inputs, "convolution", dilate, fragment)


def _columns(scatter: Any) -> None:
    scatter.scatter_dimension_numbers.scatter_dims_to_operand_dims[:] = [1]
    scatter.scatter_dimension_numbers.inserted_window_dims[:] = [1]


def _set_operand(opcode: str, operand: int, parameter: int) -> Callable[[Any], None]:
    def edit(module: Any) -> None:
        first(module, opcode).operand_ids[operand] = hlo.parameters(module)[parameter].id

    return edit


def enlarge(gib: int) -> Callable[[Any], None]:
    """The first parameter, of float32."""
    return lambda module: first(module, "parameter").shape.dimensions.__setitem__(0, gib << 28)


def _without_update() -> LoweredGraph:
    graph = small()
    state = InputBinding("kv_cache.key_0", "state", (3,), "float32")
    return dataclasses.replace(graph, io=dataclasses.replace(graph.io, inputs=(*graph.io.inputs, state)))


def _masked(hidden: Tensor) -> Tensor:
    return torch.where(hidden > 1, torch.zeros_like(hidden), torch.full_like(hidden, torch.finfo(hidden.dtype).min))


LARGE = torch.ones(600, 600)
TYPE = "float8_e4m3fn does not run on trn2"
BYTES, WIDE = torch.ones(3, dtype=torch.int8), torch.ones(2, 9, dtype=torch.int32)
BROKEN: dict[str, Broken] = {
    "undocumented": lowered("opcode", torch.erf, [floats(3, 4)], "not documented"),
    "wide scores": lowered("scores", lambda q, k: torch.exp(q @ k) @ k.T, [floats(2048, 8), floats(8, 4096)], "64.0 MiB of attention scores"),
    "while": renamed("control-flow", "while"),
    "outfeed": renamed("host-transfer", "outfeed"),
    "random numbers": lowered("random", lambda x: x + torch.rand(3, 4), [floats(3, 4)], "uniform numbers"),
    "cumprod": lowered("reduce-window", lambda x: x.cumprod(-1), [floats(2, 600)], "triangle of ones"),
    "sort": lowered("sort", lambda x: x.sort(-1).values, [floats(2, 400)], "a sort of float32[2, 400]"),
    "large top-k": lowered("sort", lambda x: x.topk(17).values, [floats(2, 400)], "up to k = 16"),
    "integer top-k": lowered("sort", lambda x: x.topk(3).values, [WIDE], "a sort of int32[2, 9]"),
    "smallest": lowered("sort", lambda x: x.topk(3, largest=False).values, [floats(2, 9)], "a sort of float32[2, 9]"),
    "topk": renamed("sort", "topk", "a topk of float32[3]"),
    "call of integers": Broken("top-k-call", called(TOPK_CALL, indices(1, 2, 3), 2), "a top-k of int32"),
    "large call": Broken("top-k-call", called(TOPK_CALL, floats(20000), 16385), "k = 16385"),
    "call of a long row": Broken("top-k-call", called(TOPK_CALL, floats(32768), 9), "above 8"),
    "signed call": Broken("top-k-call", called(TOPK_CALL, floats(9), 2, "int32"), "not uint32"),
    "unknown call": Broken("custom-call", called("Sharding", floats(9), 2), "custom call Sharding"),
    "computed start": changed(
        "dynamic-slice", lambda x, i: x.index_select(0, i), [floats(5, 3), indices(1)], "gather", called_otherwise("dynamic-slice"),
        "with a computed start",
    ),
    "dilated twice": _convolution("and its kernel", base_dilation=2, window_dilation=2),
    "dilated with strides": _convolution("takes strides", base_dilation=2, stride=2),
    "reduce from a parameter": Broken(
        "reduction", lambda: edited(lower_function(lambda x, y: x.sum() * y, [floats(3), floats()]), _set_operand("reduce", 1, 1)),
        "begins with a computed number",
    ),
    "interior padding": changed(
        "strided-store", lambda x: nn.functional.pad(x, (1, 1)), [floats(3, 4)], "pad",
        lambda each: setattr(each.padding_config.dimensions[0], "interior_padding", 1), "a pad between values",
    ),
    "columns": changed(
        "strided-store", lambda x, i: x.index_add(0, i, torch.ones(2, 3)), [floats(4, 3), indices(0, 1)], "scatter", _columns, "a scatter of columns",
    ),
    "float8": lowered("type", lambda x: x.to(torch.float8_e4m3fn).float(), [floats(3, 4)], TYPE),
    "float8 clamped too far": lowered("type", lambda x: x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float(), [floats(3, 4)], TYPE),
    "dynamic": changed("dynamic-shape", _double, [floats(3)], "add", lambda each: each.shape.is_dynamic_dimension.append(True), "is dynamic"),
    "integer dot": lowered("integer-compute", lambda x: x @ x, [torch.ones(4, 4, dtype=torch.int32)], "product of integers"),
    "integer scatter": lowered(
        "integer-compute", lambda x, i: x.index_add(0, i, torch.ones(2, 9, dtype=torch.int32)), [WIDE, indices(0, 1)], "integer scatter"
    ),
    "integer power": lowered("integer-compute", lambda x, y: x**y, [indices(2, 3), indices(1, 2)], "integer power"),
    "narrow shift": changed("integer-compute", _double, [BYTES], "add", called_otherwise("shift-right-arithmetic"), "other than 32 bits"),
    "unsigned sum": changed("unsigned", _double, [indices(1, 2)], "add", of_type("uint32"), "add as uint32"),
    "gather beyond": lowered(
        "index-range", lambda x: x.index_select(0, torch.arange(8, dtype=torch.int32)), [floats(5, 3)],
        "index 7 of a gather is beyond dimension 0 of size 5",
    ),
    "NaN": lowered("constant", lambda x: torch.where(x > 2, x, torch.full_like(x, torch.nan)), [floats(3, 4)], "infinite or NaN"),
    "half NaN": lowered("constant", lambda x: x * torch.nan, [floats(3, 4).bfloat16()], "infinite or NaN"),
    "large constant": lowered("constant", lambda x: x + LARGE, [floats(600, 600)], "1,440,000 bytes"),
    "two masks": lowered("mask-sum", lambda x: x * (_masked(x) + _masked(x * 2)), [floats(3, 4)], "sum of two masks"),
    "two half masks": lowered("mask-sum", lambda x: x * (_masked(x) + _masked(x * 2)), [floats(3, 4).half()], "sum of two masks"),
    "rotary suffix of zeros": lowered(
        "dead-operand", lambda x: torch.cat([x * 2, torch.zeros(2, 3, 4, 2)], -1), [floats(2, 3, 4, 6)], "zeros in place of a tensor"
    ),
    "an output that is an input": Broken("alias", lambda: edited(small(), _set_operand("tuple", 0, 0)), "needs a copy"),
    "a state without update": Broken("alias", _without_update, "is not updated in place"),
    "fewer ranks": renamed("collective", "partition-id", "a rank as part of the program"),
    "an order token": lowered(
        "order-token", lambda x: collectives.all_gather(x + collectives.all_gather(x, 0, 2)[0] * 0.0, 0, 2), [floats(3, 4)],
        "waits for another one's result times zero", ranks=2,
    ),
    "a copy of codes for two products": bound(
        "copied-codes", "weight", _products_of_one_copy,
        [floats(3, 512), torch.ones(512, 1024, dtype=torch.int8), floats(1, 1024)], "2 products read one copy of 2,097,152 bytes of the codes of x.1",
    ),
    "a cache of codes as numbers": bound(
        "copied-codes", "state", lambda query, codes, scale: (query @ codes.transpose(1, 2).to(query.dtype))[:2] * scale[:2],
        [floats(5, 3, 16), torch.ones(5, 8, 16, dtype=torch.int8), floats(5, 1, 8)], "all codes of x.1 become numbers, 2,560 bytes",
    ),
    "codes that are scaled before a product": bound(
        "copied-codes", "state", lambda query, codes, scale: query @ (codes[:4].float() * scale[:4]).transpose(1, 2),
        [floats(4, 3, 64), torch.ones(5, 2048, 64, dtype=torch.int8), floats(5, 2048, 1)],
        "2,097,152 bytes of numbers that codes of x.1 stand for are read by multiply",
    ),
    "more than a core holds": Broken("memory", lambda: edited(small(), enlarge(100)), "100.0 GiB"),
}  # fmt: skip
