# SPDX-License-Identifier: Apache-2.0
"""A plan is data from anybody: it writes what is its own, and never over what it reads."""

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
from fuzz_plans import MODELS, make_artifacts, run, sanitizer
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.steps import steps
from optimum_neuron.kernels.steps.access import ALL_SIZES, PlanError, find_operands, list_accesses, list_written
from optimum_neuron.kernels.steps.check import check_order, check_steps
from optimum_neuron.kernels.steps.operands import Buffer, Codes, Layer, Operand
from optimum_neuron.kernels.steps.steps import Item, Linears, Map, Select, Step


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


def checked(*steps: Step, once: tuple[Step, ...] = (), buffers: tuple[Buffer, ...] = BUFFERS) -> None:
    """Checks steps that follow others which write all that they may read, and all outputs."""
    check_steps(Plan(buffers, once, (*WRITES.values(), *steps), ARENA_BYTES), DTYPES)


def copy(source: Operand, target: Operand) -> Map:
    items = Item("load", 0, access=source), Item("store", -1, (0,), (False,), access=target)
    return Map(1, 4, 1, items)


def fill(target: Operand) -> Map:
    return Map(1, 4, 1, (Item("store", -1, (0,), (False,), access=target),))


WRITES = {buffer: fill(at(buffer, 1024)) for buffer in (ARENA, OTHER, OUTPUT)}


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
}  # fmt: skip


def _list_other_forms(operand: Operand) -> Iterator[tuple[str, Operand]]:
    """An operand of another size, type, number of dimensions or order of elements, each with what is other."""

    def of_shape(*shape: int) -> Operand:
        return at(operand.buffer, *shape, dtype=operand.dtype, offset=operand.offset)

    for dim, size in enumerate(operand.shape):
        yield f"{dim}", of_shape(*operand.shape[:dim], size - 1 or 2, *operand.shape[dim + 1 :])
    yield "type", replace(operand, dtype="bool", offset=0)
    yield "dimensions", of_shape(*operand.shape[1:])
    if sum(size > 1 for size in operand.shape) > 1:
        yield "order", replace(operand, strides=at(0, *operand.shape[::-1]).strides[::-1])


# The places of operands of which there may be fewer, whatever the others have: slots, columns, rows of a table, and words.
FREE = {"WriteCache": {(0, "0"), (0, "2")}, "Select": {(0, "0")}, "Convolve": {(3, "0")}, "Sample": {(0, "1")}}
FREE |= {name: {(5, "0")} for name in ("Walk", "Walk by rates")}
FREE |= {"TopK": {(0, "1")}, "Gather": {(0, "1")}, "Scatter": {(1, "1")}}


@pytest.mark.parametrize("name", STEPS)
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
    "layers of bool": (Linears(at(ARENA, 3, 8, dtype="bool"), (_PLAIN,)), "a linear layer of another form"),
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
    with pytest.raises(PlanError, match=f"its Map writes to the {BUFFERS[buffer].kind}"):
        checked(copy(at(ARENA, 4), at(buffer, 4)))


@pytest.mark.parametrize("buffer", [ARENA, STATE, OUTPUT, WEIGHT])
def test_what_is_computed_once_is_written_to_what_is_kept(buffer: int) -> None:
    checked(once=(copy(at(WEIGHT, 4), at(KEPT, 4)),))
    with pytest.raises(PlanError, match="its Map writes to the"):
        checked(once=(copy(at(OTHER, 4), at(buffer, 4)),))


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (2, 1), (4, 0)])
def test_written_elements_have_places_of_their_own(strides: tuple[int, int]) -> None:
    output = Operand(OTHER, "float32", 0, (2**38, 4), strides)
    if strides[0]:
        output = replace(output, shape=(3, 4))
    with pytest.raises(PlanError, match="writes several elements to one place"):
        checked(copy(at(ARENA, *output.shape[1:]), output))


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
    checked(copy(at(ARENA, 4), at(OTHER, 4)))
    with pytest.raises(PlanError):
        checked(copy(replace(at(ARENA, 4), **WRONG_SIZES[name]), at(OTHER, 4)))


@pytest.mark.parametrize("buffer", [replace(BUFFERS[ARENA], **each) for each in (
    {"bytes": -1}, {"bytes": 10**30}, {"offset": -64}, {"offset": 32}, {"offset": ARENA_BYTES}, {"bytes": 2**40},
)], ids=str)  # fmt: skip
def test_a_buffer_lies_in_the_arena(buffer: Buffer) -> None:
    with pytest.raises(PlanError, match="it has"):
        checked(buffers=(*BUFFERS, buffer))


def ordered(*steps: Step, once: tuple[Step, ...] = ()) -> None:
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


def test_a_buffer_holds_nothing_once_another_is_written_in_its_place() -> None:
    reads = [copy(at(buffer, 1024), at(OUTPUT, 1024)) for buffer in (ARENA, OVER)]
    writes = [fill(at(buffer, 1024)) for buffer in (ARENA, OVER)]
    ordered(writes[0], reads[0], writes[1], reads[1])
    with pytest.raises(PlanError, match=f"of its arena buffer {ARENA}, which no step wrote before"):
        ordered(*writes, reads[1], reads[0])


def test_the_steps_write_all_of_an_output() -> None:
    halves = [fill(Operand(OUTPUT, "float32", offset, (32, 16), (32, 1))) for offset in (0, 16)]
    ordered(*halves)
    for half in halves:
        with pytest.raises(PlanError, match="it does not write all of output 0"):
            ordered(half)


@pytest.mark.parametrize("buffer", [INPUT, OUTPUT, ARENA, KEPT])
def test_what_is_computed_once_reads_weights_and_what_is_kept(buffer: int) -> None:
    kept = copy(at(WEIGHT, 4), at(KEPT, 4))
    ordered(WRITES[OUTPUT], once=(kept, copy(at(KEPT, 4), at(KEPT, 4, offset=4))))
    with pytest.raises(PlanError, match="which no step wrote before"):
        ordered(*WRITES.values(), once=(copy(at(buffer, 4), at(KEPT, 4)),))


def test_more_pieces_than_can_be_followed_are_refused() -> None:
    odd = Operand(ARENA, "int8", 1, (2,), (3,))
    buffers = (Buffer("arena", "", 2**40),)
    with pytest.raises(PlanError, match="it takes its memory in 1099511627776 pieces"):
        check_order(Plan(buffers, (), (fill(replace(odd, buffer=0)),), 2**40))


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
    calls = [fill(each) for each in writes]
    calls += [copy(read, at(OUTPUT, 1024)), WRITES[OUTPUT]]
    whole = own(read).all()
    with nullcontext() if whole else pytest.raises(PlanError, match="which no step wrote before"):
        ordered(*calls)


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
