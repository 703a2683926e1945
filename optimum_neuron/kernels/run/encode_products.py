# SPDX-License-Identifier: Apache-2.0
"""Operands, and linear layers and experts with plain weights or codes, as the words that native/plan/plan.cpp reads."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..steps.access import SIZES, TYPES, check_operand, require
from ..steps.operands import Buffer, Codes, Layer, Operand
from ..steps.steps import Experts, Linears


FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class OperandWords:
    """A writer of operands over a plan's buffers; `short_scales` names tensors (short_scales.py)."""

    buffers: Sequence[Buffer]
    short_scales: Collection[str]

    def place(self, operand: Operand | None, sizes: Mapping[str, int] = SIZES) -> Iterator[int]:
        """Yield the number of an operand's buffer, and its first byte there."""
        if operand is None:
            yield from (-1, 0)
        else:
            check_operand(operand, self.buffers)
            require(0 not in operand.shape and operand.dtype in sizes, "it has an operand that no kernel takes")
            yield from (operand.buffer, operand.offset * sizes[operand.dtype])

    def contiguous(
        self, operand: Operand | None, dtype: str, shape: tuple[int, ...], sizes: Mapping[str, int] = SIZES
    ) -> Iterator[int]:
        """Yield the place of an operand that has a type and a shape, and is contiguous."""
        if operand is not None:
            fits = operand.dtype == dtype and tuple(operand.shape) == shape and is_contiguous(operand)
            require(fits, f"it takes {operand.dtype} {list(operand.shape)} where {dtype} {list(shape)} belongs")
        yield from self.place(operand, sizes)


def is_contiguous(operand: Operand) -> bool:
    """Return whether the elements of an operand lie next to each other, in order."""
    expected = 1
    for size, stride in zip(reversed(operand.shape), reversed(operand.strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# Kinds of codes, as numbered in native/common/kernels.h: each with its number and the type that holds codes, of 4 bits two at a time.
_CODINGS = {"int8": (1, "int8"), "int4": (2, "uint8"), "fp8": (3, "float8_e4m3fn"), "fp4": (4, "uint8")}
MEET_CODED = ("int8", "int4")  # what rows of x that are rounded to int8 meet
_TWO_TO_A_BYTE = ("int4", "fp4")


def encode_linears(words: OperandWords, step: Linears) -> Iterator[int]:
    x = step.x
    require(x.dtype in FLOATS and len(x.shape) == 2 and x.strides[1] == 1, "it has a linear layer of another form")
    rows, columns = x.shape
    forms = {_read_form(layer.codes, columns) for layer in step.layers}
    require(len(forms) == 1, "it has a step of linear layers with weights quantized in several ways")
    yield TYPES[x.dtype]
    yield from words.place(x)
    yield from (rows, columns, x.strides[0], *forms.pop(), len(step.layers))
    for layer in step.layers:
        yield from _encode_layer(words, layer, x)


def _encode_layer(words: OperandWords, layer: Layer, x: Operand) -> Iterator[int]:
    output = layer.output
    fits = output.dtype == x.dtype and len(output.shape) == 2 and output.strides[1] == 1
    require(fits and output.shape[0] == x.shape[0], "it has a linear layer with an output that does not fit its input")
    outputs = output.shape[1]
    yield from _encode_weight(words, layer.weight, layer.codes, x.dtype, (outputs, x.shape[1]))
    yield from words.contiguous(layer.bias, x.dtype, (outputs,))
    yield from words.place(output)
    yield from (outputs, output.strides[0])
    yield from _encode_scales(words, layer.codes, (outputs,))


def encode_experts(words: OperandWords, step: Experts) -> Iterator[int]:
    x, weight = step.x, step.weight
    fits = x.dtype in FLOATS and x.shape != () and len(weight.shape) == 3 and len(step.index.shape) == 2
    require(fits, "its experts have no form")
    tokens, k = step.index.shape
    experts, outputs = weight.shape[:2]
    columns = x.shape[-1]
    per_expert = len(x.shape) == 3
    form = _read_form(step.codes, columns)
    yield TYPES[x.dtype]
    yield from words.contiguous(x, x.dtype, (tokens, k, columns) if per_expert else (tokens, columns))
    yield from words.contiguous(step.index, "int32", (tokens, k))
    yield from _encode_weight(words, weight, step.codes, x.dtype, (experts, outputs, columns))
    yield from words.contiguous(step.bias, x.dtype, (experts, outputs))
    yield from words.contiguous(step.output, x.dtype, (tokens, k, outputs))
    yield from (per_expert, tokens, k, experts, outputs, columns, *form)
    yield from _encode_scales(words, step.codes, (experts, outputs))


def _read_form(codes: Codes | None, columns: int) -> tuple[int, int, int]:
    """Return the kind of a weight's codes, the columns that share a scale, and the codes that rows of x become."""
    if codes is None:
        return 0, 0, 0
    groups = codes.scale.shape[-1] if codes.scale.shape else 0
    least = 2 if codes.kind in _TWO_TO_A_BYTE else 1
    fits = codes.kind in _CODINGS and groups > 0 and columns % (groups * least) == 0
    require(fits, f"it has a weight of {codes.kind} with {groups} scales for {columns} columns")
    rounds = codes.activations == "int8"  # rows of x, before they meet codes
    known = codes.activations is None or (rounds and codes.kind in MEET_CODED)
    require(known, f"it has activations of {codes.activations} with a weight of {codes.kind}")
    return _CODINGS[codes.kind][0], columns // groups, int(rounds)


def _encode_weight(
    words: OperandWords, weight: Operand, codes: Codes | None, dtype: str, shape: tuple[int, ...]
) -> Iterator[int]:
    if codes is None:
        yield from words.contiguous(weight, dtype, shape)
        return
    columns = shape[-1] // 2 if codes.kind in _TWO_TO_A_BYTE else shape[-1]
    held = _CODINGS[codes.kind][1]
    yield from words.contiguous(weight, held, (*shape[:-1], columns), {held: 1})


def _encode_scales(words: OperandWords, codes: Codes | None, shape: tuple[int, ...]) -> Iterator[int]:
    if codes is None:
        yield from (-1, 0, -1, 0, 0, 0)
        return
    require(codes.scale.dtype in FLOATS, f"it has scales of {codes.scale.dtype}")
    require(codes.shift is None or codes.kind in ("int8", "int4"), f"it has a shift of {codes.kind}")
    shape = (*shape, codes.scale.shape[-1])
    yield from words.contiguous(codes.scale, codes.scale.dtype, shape)
    yield from words.contiguous(codes.shift, "float32", shape)
    buffer = words.buffers[codes.scale.buffer]
    is_short = codes.can_be_short and buffer.kind == "tensor" and buffer.name in words.short_scales
    yield from (TYPES[codes.scale.dtype], is_short)
