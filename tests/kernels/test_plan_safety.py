# SPDX-License-Identifier: Apache-2.0
"""A plan is data from anybody: it calls listed operators alone, writes what is its own, and never over what it reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_plans import MODELS, UNSAFE, make_artifacts, run, sanitizer
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from kernel_calls import NAMES, Planned, load_kernels
from torch import Tensor

from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.run.memory import PlanMemory
from optimum_neuron.kernels.run.torch_call import bind_call
from optimum_neuron.kernels.steps import steps
from optimum_neuron.kernels.steps.access import ALL_SIZES, PlanError, find_operands, list_accesses, list_written
from optimum_neuron.kernels.steps.check import check_order, check_steps
from optimum_neuron.kernels.steps.steps import (
    Buffer,
    Codes,
    Item,
    Layer,
    Linears,
    Map,
    Operand,
    Select,
    Step,
    TorchCall,
)
from optimum_neuron.kernels.steps.torch_operators import INDEXED, OPERATORS, check_arguments, resolve


BUFFERS = (
    Buffer("tensor", "kv_cache.key_0", 4096),
    Buffer("tensor", "model.weight", 4096),
    Buffer("input", "0", 4096),
    Buffer("arena", "", 4096, 0),
    Buffer("arena", "", 4096, 2048),
    Buffer("kept", "", 4096),
    Buffer("output", "0", 4096),
    Buffer("arena", "", 4096, 8192),
)
STATE, WEIGHT, INPUT, ARENA, OVER, KEPT, OUTPUT, OTHER = range(len(BUFFERS))
DTYPES = {"kv_cache.key_0": "float32", "model.weight": "float32"}
ARENA_BYTES = 16384


def at(buffer: int, *shape: int, dtype: str = "float32", offset: int = 0) -> Operand:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return Operand(buffer, dtype, offset, shape, tuple(strides))


def checked(*steps: Step, once: tuple[TorchCall, ...] = (), buffers: tuple[Buffer, ...] = BUFFERS) -> None:
    """Checks steps that follow others which write all that they may read, and all outputs."""
    check_steps(Plan(buffers, once, (*WRITES.values(), *steps), ARENA_BYTES), DTYPES)


def call(name: str, *arguments: Any, output: Operand | None = None, **keywords: Any) -> TorchCall:
    given = [{"tensor": each} if isinstance(each, Operand) else each for each in arguments]
    return TorchCall(f"aten.{name}", given, keywords, () if output is None else (output,))


WRITES = {buffer: call("zero_.default", at(buffer, 1024)) for buffer in (ARENA, OTHER, OUTPUT)}


def numbers(buffer: int, *shape: int, offset: int = 0) -> Operand:
    return at(buffer, *shape, dtype="int32", offset=offset)


# Steps of every kind, with all operands that one can have, which lie apart.
_PLACES = numbers(INPUT, 3), numbers(INPUT, 3, offset=8)
_WALKED = (
    *(at(ARENA, 3, 2, 4, offset=offset) for offset in (0, 32, 64)),
    at(ARENA, 3, 2, 1, offset=96),
    at(ARENA, 3, 2, offset=128),
)
_WALK = steps.Walk(*_WALKED, None, at(STATE, 4, 2, 4, 4), *_PLACES, at(OTHER, 3, 2, 4))
_ATTEND = steps.Attend(
    at(ARENA, 1, 2, 1, 16), at(STATE, 1, 2, 4, 16), at(STATE, 1, 2, 4, 16, offset=256), numbers(INPUT, 1),
    numbers(INPUT, 1, 1), at(WEIGHT, 2), at(WEIGHT, 2, 64, offset=16), at(OTHER, 1, 1, 2, 16), 1.0, 0, 0.0,
)  # fmt: skip
_CODES = [at(INPUT, 1, 2, 4, 16, dtype="int8", offset=offset) for offset in (512, 1024)]
_SCALES = [at(STATE, 1, 2, 4, 1, offset=offset) for offset in (64, 128)]
_CODED = Layer(
    at(INPUT, 6, 4, dtype="uint8"), at(WEIGHT, 6, offset=32), at(OTHER, 3, 6),
    Codes("int4", at(WEIGHT, 6, 2, offset=64), at(WEIGHT, 6, 2, offset=128)),
)  # fmt: skip
STEPS: dict[str, Step] = {
    "WriteCache": steps.WriteCache(at(STATE, 2, 2, 8, 4), at(ARENA, 3, 2, 4), *_PLACES),
    "WriteCodes": steps.WriteCodes(
        at(ARENA, 2, 2, 8, 4, dtype="int8"), at(ARENA, 2, 2, 8, 1, offset=64), at(OTHER, 3, 2, 4), *_PLACES
    ),
    "Select": Select(at(WEIGHT, 8, 4), numbers(INPUT, 3), at(ARENA, 3, 4), 0, False),
    "Attend": _ATTEND,
    "Attend to codes": replace(
        _ATTEND, keys=_CODES[0], values=_CODES[1], key_scale=_SCALES[0], value_scale=_SCALES[1]
    ),
    "Experts": steps.Experts(
        at(ARENA, 3, 4), numbers(INPUT, 3, 2), at(WEIGHT, 4, 8, 4), at(WEIGHT, 4, 8, offset=256), at(OTHER, 3, 2, 8)
    ),
    "Convolve": steps.Convolve(
        at(ARENA, 3, 4), at(WEIGHT, 3, 4), at(WEIGHT, 4, offset=64), at(STATE, 4, 2, 4), *_PLACES, at(OTHER, 3, 4)
    ),
    "Walk": _WALK,
    "Walk by rates": replace(_WALK, decay=at(ARENA, 3, 2, 4, offset=96), share=None, rates=at(WEIGHT, 4, 4)),
    "MatMul": steps.MatMul(at(ARENA, 2, 3, 4), at(WEIGHT, 2, 4, 5), at(OTHER, 2, 3, 5)),
    "TopK": steps.TopK(at(ARENA, 3, 4), at(OTHER, 3, 2), numbers(OTHER, 3, 2, offset=8)),
    "Gather": steps.Gather(at(ARENA, 3, 4), numbers(INPUT, 3, 2), at(OTHER, 3, 2)),
    "Scatter": steps.Scatter(at(ARENA, 3, 4), numbers(INPUT, 3, 2), at(OTHER, 3, 4), None, 1.0),
    "Scatter of values": steps.Scatter(
        at(ARENA, 3, 4), numbers(INPUT, 3, 2), at(OTHER, 3, 4), at(ARENA, 3, 2, offset=64), 0.0
    ),
    "Linears": Linears(at(ARENA, 3, 4), (Layer(at(WEIGHT, 8, 4), at(WEIGHT, 8, offset=32), at(OTHER, 3, 8)),)),
    "Linears of codes": Linears(at(ARENA, 3, 8), (_CODED,)),
    "Sample": steps.Sample(at(ARENA, 3, 16), at(INPUT, 3, 4), at(INPUT, 3, offset=64), numbers(OTHER, 3)),
    "scatter": call("scatter_.value", at(ARENA, 3, 4), 1, at(INPUT, 3, 2, dtype="int64"), 0.0),
    "gather": call("gather.default", at(ARENA, 3, 4), 1, at(INPUT, 3, 2, dtype="int64"), output=at(OTHER, 3, 2)),
}  # fmt: skip


def _list_other_forms(operand: Operand) -> Iterator[tuple[str, Operand]]:
    """An operand of another size, type, number of dimensions or order of elements, each with what is other."""

    def of_shape(*shape: int) -> Operand:
        return at(operand.buffer, *shape, dtype=operand.dtype, offset=operand.offset)

    for dim, size in enumerate(operand.shape):
        yield f"{dim}", of_shape(*operand.shape[:dim], size - 1 or 2, *operand.shape[dim + 1 :])
    yield "type", replace(operand, dtype="float64", offset=0)
    yield "dimensions", of_shape(*operand.shape[1:])
    if sum(size > 1 for size in operand.shape) > 1:
        yield "order", replace(operand, strides=at(0, *operand.shape[::-1]).strides[::-1])


# The places of operands of which there may be fewer, whatever the others have: slots, columns, rows of a table, and words.
FREE = {"WriteCache": {(0, "0"), (0, "2")}, "Select": {(0, "0")}, "Convolve": {(3, "0")}, "Sample": {(0, "1")}}
FREE |= {name: {(5, "0")} for name in ("Walk", "Walk by rates")}
FREE |= {"TopK": {(0, "1")}, "Gather": {(0, "1")}, "Scatter": {(1, "1")}}


@pytest.mark.parametrize("name", [name for name, step in STEPS.items() if not isinstance(step, TorchCall)])
def test_operands_of_a_step_fit_each_other(name: str) -> None:
    step, taken = STEPS[name], set()
    encode_step(step, BUFFERS)
    for place, operand in enumerate(find_operands(step)):
        for what, other in _list_other_forms(operand):
            try:
                encode_step(_with(step, operand, other), BUFFERS)
                taken.add((place, what))
            except PlanError as error:
                assert "\n" not in str(error)
    assert taken == FREE.get(name, set())


_PLAIN = Layer(at(WEIGHT, 6, 8), None, at(OTHER, 3, 6))


def _coded(**changes: Any) -> Linears:
    return Linears(at(ARENA, 3, 8), (replace(_CODED, codes=replace(_CODED.codes, **changes)),))


MISFITS: dict[str, tuple[Step, str]] = {
    "no heads of keys": (replace(_ATTEND, keys=at(STATE, 1, 0, 4, 16)), "its attention has 2 heads, 0 of keys"),
    "heads of 3 and 2": (replace(_ATTEND, query=at(ARENA, 1, 3, 1, 16)), "its attention has 3 heads, 2 of keys"),
    "large heads": (replace(_ATTEND, query=at(ARENA, 1, 1, 1, 528), keys=at(STATE, 1, 1, 1, 528)), "of dimensions 528 and 16"),
    "empty heads": (replace(_ATTEND, values=at(STATE, 1, 2, 4, 0)), "of dimensions 16 and 0"),
    "codes without scales": (replace(_ATTEND, keys=_CODES[0], values=_CODES[1]), "int8"),
    "scales without codes": (replace(_ATTEND, key_scale=_SCALES[0], value_scale=_SCALES[1]), "not all or none have sc"),
    "a scale of keys alone": (replace(_ATTEND, keys=_CODES[0], key_scale=_SCALES[0]), "not all or none have scales"),
    "shares and rates": (replace(_WALK, rates=at(WEIGHT, 4, 4)), "its recurrence has shares and rates"),
    "no rows": (Linears(at(ARENA, 0, 8), (replace(_PLAIN, output=at(OTHER, 0, 6)),)), "an operand that no kernel takes"),
    "layers of float64": (Linears(at(ARENA, 3, 8, dtype="float64"), (_PLAIN,)), "a linear layer of another form"),
    "no such kind": (_coded(kind="int2"), "a weight of int2"),
    "codes of 8 bits": (_coded(kind="int8"), "uint8"),
    "a shift of floats": (_coded(kind="fp4"), "a shift of fp4"),
    "no such activations": (_coded(activations="int4"), "activations of int4 with a weight of int4"),
    "floats that meet int8": (_coded(kind="fp8", shift=None, activations="int8"), "activations of int8 with a weight of fp8"),
    "no scales": (_coded(scale=at(WEIGHT, 6, 0)), "0 scales for 8 columns"),
    "a scale each": (_coded(scale=at(WEIGHT, 6, 8)), "8 scales for 8 columns"),
    "scales apart": (_coded(scale=at(WEIGHT, 6, 2, offset=1023)), "byte 4140 of a buffer"),
    "more than all": (steps.TopK(at(ARENA, 3, 4), at(OTHER, 3, 5), numbers(OTHER, 3, 5, offset=32)), "the 5 largest of rows"),
    "other rows": (steps.Gather(at(ARENA, 3, 4), numbers(INPUT, 2, 2), at(OTHER, 2, 2)), "of rows"),
    "other activations": (Linears(at(ARENA, 3, 8), (_CODED, *_coded(activations="int8").layers)), "quantized in several ways"),
    "plain and codes": (Linears(at(ARENA, 3, 8), (_CODED, _PLAIN)), "quantized in several ways"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_step_that_no_kernel_takes_is_refused(name: str) -> None:
    step, words = MISFITS[name]
    with pytest.raises(PlanError, match=words):
        encode_step(step, BUFFERS)


@pytest.mark.parametrize("name", STEPS)
def test_what_a_step_reads_never_lies_where_it_writes(name: str) -> None:
    step = STEPS[name]
    checked(step)
    targets = list_written(step)
    for read in find_operands(step):
        if any(read is target for target in targets):
            continue
        for target in targets:
            moved = replace(read, buffer=target.buffer, offset=target.offset)
            with pytest.raises(PlanError, match=r"over what it reads|of type float32, as int"):
                checked(_with(step, read, moved))


def _with(value: Any, old: Operand, new: Operand) -> Any:
    if value is old:
        return new
    if isinstance(value, list | tuple):
        return type(value)(_with(each, old, new) for each in value)
    if isinstance(value, dict):
        return {name: _with(each, old, new) for name, each in value.items()}
    if is_dataclass(value):
        return replace(value, **{each.name: _with(getattr(value, each.name), old, new) for each in fields(value)})
    return value


def test_buffers_that_share_a_place_in_the_arena_are_one_piece_of_memory() -> None:
    apart = Select(at(WEIGHT, 8, 4), numbers(ARENA, 3), at(OVER, 3, 4), 0, False)
    checked(apart)
    with pytest.raises(PlanError, match="its Select writes over what it reads"):
        checked(replace(apart, index=numbers(ARENA, 3, offset=2048 // 4)))


@pytest.mark.parametrize("buffer", [WEIGHT, INPUT, KEPT])
def test_a_step_writes_to_the_arena_outputs_and_states_alone(buffer: int) -> None:
    items = Item("load", 0, access=at(ARENA, 4)), Item("store", -1, (0,), (False,), access=at(buffer, 4))
    with pytest.raises(PlanError, match=f"its Map writes to the {BUFFERS[buffer].kind}"):
        checked(Map(1, 4, 1, items))
    with pytest.raises(PlanError, match=r"its call of aten\.add_\.Tensor writes to the"):
        checked(call("add_.Tensor", at(buffer, 4), at(OTHER, 4)))


@pytest.mark.parametrize("buffer", [ARENA, STATE, OUTPUT, WEIGHT])
def test_what_is_computed_once_is_written_to_what_is_kept(buffer: int) -> None:
    checked(once=(call("neg.default", at(WEIGHT, 4), output=at(KEPT, 4)),))
    with pytest.raises(PlanError, match=r"its call of aten\.neg\.default writes to the"):
        checked(once=(call("neg.default", at(OTHER, 4), output=at(buffer, 4)),))


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (4, 0)])
def test_written_elements_have_places_of_their_own(strides: tuple[int, int]) -> None:
    output = Operand(OTHER, "float32", 0, (2**38, 4), strides)
    if strides[0]:
        output = replace(output, shape=(3, 4))
    with pytest.raises(PlanError, match="writes several elements to one place"):
        checked(call("neg.default", at(ARENA, *output.shape[1:]), output=output))


WRONG_SIZES: dict[str, dict[str, Any]] = {
    "of no buffer": {"buffer": len(BUFFERS)},
    "of a buffer before the first": {"buffer": -1},
    "of no type": {"dtype": "float33"},
    "behind its buffer": {"offset": 1021},
    "before its buffer": {"offset": -1},
    "backwards": {"strides": (-1,)},
    "without strides": {"strides": ()},
    "of more elements than memory": {"shape": (2**60,), "strides": (0,)},
    "of numbers without end": {"shape": (10**400,), "strides": (0,)},
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_SIZES)
def test_an_operand_lies_in_its_buffer(name: str) -> None:
    checked(call("neg.default", at(ARENA, 4), output=at(OTHER, 4)))
    with pytest.raises(PlanError):
        checked(call("neg.default", replace(at(ARENA, 4), **WRONG_SIZES[name]), output=at(OTHER, 4)))


@pytest.mark.parametrize("buffer", [replace(BUFFERS[ARENA], **each) for each in (
    {"bytes": -1}, {"bytes": 10**30}, {"offset": -64}, {"offset": 32}, {"offset": ARENA_BYTES}, {"bytes": 2**40},
)], ids=str)  # fmt: skip
def test_a_buffer_lies_in_the_arena(buffer: Buffer) -> None:
    with pytest.raises(PlanError, match="it has"):
        checked(buffers=(*BUFFERS, buffer))


def ordered(*steps: Step, once: tuple[TorchCall, ...] = ()) -> None:
    check_order(Plan(BUFFERS, once, steps, ARENA_BYTES))


@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_what_an_earlier_one_wrote(name: str) -> None:
    step = STEPS[name]
    read = {each.buffer for each, writes in list_accesses(step) if not writes} & WRITES.keys()
    assert read or name == "Select"
    for buffer in read:
        others = [each for other, each in WRITES.items() if other != buffer]
        with pytest.raises(PlanError, match=rf"of its arena buffer {buffer}, which no step wrote before"):
            ordered(*others, step, WRITES[buffer])


@pytest.mark.parametrize("name", ["copy_.default", "fill_.Scalar", "zero_.default", "add_.Scalar"])
def test_a_call_in_place_reads_what_it_keeps(name: str) -> None:
    arguments = {"copy_.default": [at(INPUT, 4)], "zero_.default": []}.get(name, [1.0])
    refused = pytest.raises(PlanError, match="which no step wrote before")
    with refused if name == "add_.Scalar" else nullcontext():
        ordered(call(name, at(ARENA, 4), *arguments), WRITES[OUTPUT])


def test_a_buffer_holds_nothing_once_another_is_written_in_its_place() -> None:
    reads = [call("neg.default", at(buffer, 1024), output=at(OUTPUT, 1024)) for buffer in (ARENA, OVER)]
    writes = [call("zero_.default", at(buffer, 1024)) for buffer in (ARENA, OVER)]
    ordered(writes[0], reads[0], writes[1], reads[1])
    with pytest.raises(PlanError, match=f"of its arena buffer {ARENA}, which no step wrote before"):
        ordered(*writes, reads[1], reads[0])


def test_the_steps_write_all_of_an_output() -> None:
    halves = [call("zero_.default", Operand(OUTPUT, "float32", offset, (32, 16), (32, 1))) for offset in (0, 16)]
    ordered(*halves)
    for half in halves:
        with pytest.raises(PlanError, match="it does not write all of output 0"):
            ordered(half)


@pytest.mark.parametrize("buffer", [INPUT, OUTPUT, ARENA, KEPT])
def test_what_is_computed_once_reads_weights_and_what_is_kept(buffer: int) -> None:
    kept = call("neg.default", at(WEIGHT, 4), output=at(KEPT, 4))
    ordered(WRITES[OUTPUT], once=(kept, call("neg.default", at(KEPT, 4), output=at(KEPT, 4, offset=4))))
    with pytest.raises(PlanError, match="which no step wrote before"):
        ordered(*WRITES.values(), once=(call("neg.default", at(buffer, 4), output=at(KEPT, 4)),))


def test_more_pieces_than_can_be_followed_are_refused() -> None:
    odd = Operand(ARENA, "int8", 1, (2,), (3,))
    buffers = (Buffer("arena", "", 2**40),)
    with pytest.raises(PlanError, match="it takes its memory in 1099511627776 pieces"):
        check_order(Plan(buffers, (), (call("zero_.default", replace(odd, buffer=0)),), 2**40))


@st.composite
def _places(draw: st.DrawFn) -> Operand:
    """An operand of up to three dimensions in a buffer of 4,096 bytes."""
    dtype, size = draw(st.sampled_from([("float32", 4), ("int64", 8), ("bool", 1)]))
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    strides = tuple(draw(st.integers(0, 40)) for _ in shape)
    reach = sum(max(count - 1, 0) * stride for count, stride in zip(shape, strides, strict=True)) + 1
    return Operand(ARENA, dtype, draw(st.integers(0, 4096 // size - reach)), shape, strides)


@examples(200)
@given(st.lists(_places(), max_size=4), _places())
def test_written_bytes_are_those_that_a_list_of_all_bytes_says(writes: list[Operand], read: Operand) -> None:
    there = np.zeros(4096, dtype=bool)

    def own(each: Operand) -> Any:
        size = ALL_SIZES[each.dtype]
        strides = (*(stride * size for stride in each.strides), 1)
        return np.lib.stride_tricks.as_strided(there[each.offset * size :], (*each.shape, size), strides)

    for each in writes:
        own(each)[...] = True
    calls = [call("zero_.default", each) for each in writes]
    calls += [call("neg.default", read, output=at(OUTPUT, 1024)), WRITES[OUTPUT]]
    whole = own(read).all()
    with nullcontext() if whole else pytest.raises(PlanError, match="which no step wrote before"):
        ordered(*calls)


def test_no_other_operator_is_called_or_compiled() -> None:
    for name in {*UNSAFE} - {"aten.copy_.default"}:
        with pytest.raises(PlanError, match=f"it calls '{name}', which is no operator that a plan may call"):
            resolve(name)
    with pytest.raises(
        PlanError, match=r"it calls aten.cumprod.default, which is not in the closed list .*export with"
    ):
        Planned(load_kernels(NAMES[0]), lambda x: (x.cumprod(-1),), [torch.ones(3, 4)])


def test_listed_operators_write_to_their_first_operand_where_their_names_tell() -> None:
    for name in OPERATORS:
        arguments = resolve(name)._schema.arguments
        writes = [each for each in arguments if each.alias_info is not None and each.alias_info.is_write]
        assert writes == (arguments[:1] if name.split(".")[1].endswith("_") else []), name


def _arguments(name: str, index: Tensor) -> list[Any]:
    """Arguments of an operator with indices, whose table has five rows of five."""
    x, rows = torch.zeros(5, 5), torch.ones(len(index), 5)
    if name.startswith(("aten.gather", "aten.scatter")):
        square = index.expand(5, len(index)).contiguous()
        source = [1.0] if name.endswith("value") else [] if "gather" in name else [torch.ones(5, len(index))]
        return [x, 1, square, *source]
    if name.startswith("aten.index_put_"):
        return [x, [index], torch.ones(())]
    by_place: dict[str, list[Any]] = {
        "aten.embedding.default": [x, index],
        "aten.index.Tensor": [x, [None, index]],
        "aten.index_select.default": [x, 0, index],
        "aten.index_fill_.int_Scalar": [x, 0, index, 1.0],
    }
    return by_place.get(name, [x, 0, index, rows])


@pytest.mark.parametrize("name", sorted(INDEXED))
def test_torch_refuses_an_index_out_of_bounds(name: str) -> None:
    """In its release builds: it is what the list of operators rests on."""

    @examples(40)
    @given(st.one_of(st.integers(5, 2**62), st.integers(-(2**62), -6)), st.integers(1, 4))
    def refuses(wrong: int, count: int) -> None:
        good = torch.zeros(count + 1, dtype=torch.int64)
        arguments = _arguments(name, good)
        check_arguments(name, arguments, {})
        resolve(name)(*arguments)
        good[count] = wrong
        with pytest.raises((IndexError, RuntimeError), match=r"index|out of"):
            resolve(name)(*_arguments(name, good))

    refuses()


MASK = Operand(OTHER, "bool", 0, (3, 4), (4, 1))
Q, K = at(ARENA, 1, 2, 4, 16), at(OTHER, 1, 2, 4, 16)
REFUSED_CALLS = {
    "a mask as indices": (call("index.Tensor", at(ARENA, 3, 4), [{"tensor": MASK}], output=at(OUTPUT, 4)), "whole numbers"),
    "division by a tensor": (
        call("floor_divide.default", at(ARENA, 4, dtype="int32"), numbers(OTHER, 4), output=numbers(OUTPUT, 4)),
        "no number above 0",
    ),
    "division by -1": (call("remainder.Scalar", numbers(ARENA, 4), -1, output=numbers(OUTPUT, 4)), "no number above 0"),
    "a text": (call("pad.default", at(ARENA, 1, 4), [1, 1], "reflect", output=at(OUTPUT, 1, 6)), "has the text"),
    "no tensor": (call("exp.default", None, output=at(OUTPUT, 4)), "has no tensor as self"),
    "values without keys": (
        call("scaled_dot_product_attention.default", Q, K, at(OTHER, 1, 2, 8, 16), output=at(OUTPUT, 1, 2, 4, 16)),
        "has operands of",
    ),
    "more results": (call("topk.default", at(ARENA, 4), 2, output=at(OUTPUT, 2)), "gives 2 results, not 1"),
    "another size": (call("neg.default", at(ARENA, 4), output=at(OUTPUT, 5)), "which has no place"),
    "a result without end": (
        replace(call("repeat.default", at(ARENA, 4), [2**37]), outputs=(None,)), r"GB, and this machine has"
    ),
    "a product without end": (
        call("matmul.default", Operand(ARENA, "float32", 0, (2**20, 1, 1, 2**20), (0, 0, 0, 0)), at(OTHER, 1, 4, 1, 1),
             output=at(OUTPUT, 4)),
        "fails|GB",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_CALLS)
def test_a_call_that_torch_would_not_check_is_refused(name: str) -> None:
    step, words = REFUSED_CALLS[name]
    buffers = tuple(replace(each, kind="kept", name="") if each.kind != "arena" else each for each in BUFFERS)
    memory = PlanMemory(buffers, (), (), {}, np.zeros(ARENA_BYTES, np.uint8))
    with pytest.raises(ValueError, match=words):
        bind_call(step, memory)


@pytest.mark.slow
def test_a_changed_plan_is_refused_in_a_sentence_or_runs(cpu_artifact: Callable[[str], Path], tmp_path: Path) -> None:
    names = ("gpt_oss", "lfm2")
    for name in names:
        shutil.copytree(cpu_artifact(name), tmp_path / name)
    done = run(["--plain", "--tries", "6", "--models", ",".join(names)], tmp_path)
    assert done.returncode == 0


@pytest.mark.full
def test_changed_plans_stay_in_their_memory_as_the_sanitizer_sees(tmp_path: Path) -> None:
    if sanitizer() is None:
        pytest.skip("the C++ compiler has no AddressSanitizer")
    make_artifacts(tmp_path, list(MODELS))
    done = run(["--seconds", os.environ.get("FUZZ_SECONDS", "120")], tmp_path)
    assert done.returncode == 0
