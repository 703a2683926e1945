# SPDX-License-Identifier: Apache-2.0
"""Kernels on tensors: plans of one step, and plans of exported functions, for any instruction set of this machine."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from emulation import AMX, EMULATED, EmulatedLibrary, emulator
from filelock import FileLock
from helpers import decode_tokens, prefill_pieces
from torch import Tensor, nn
from torch.nn.functional import linear

from optimum_neuron.arrays import to_numpy, to_torch
from optimum_neuron.artifact.user_cache import CACHE_VARIABLE
from optimum_neuron.kernels.host import native_build
from optimum_neuron.kernels.host.instruction_sets import CPU_VARIABLE, list_instruction_sets
from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.kernels.plan import Plan
from optimum_neuron.kernels.run.encode import encode_step
from optimum_neuron.kernels.run.memory import allocate_arena
from optimum_neuron.kernels.run.short_scales import are_short
from optimum_neuron.kernels.steps import steps
from optimum_neuron.kernels.steps.operands import Buffer, Codes, Layer, Operand
from optimum_neuron.kernels.steps.steps import Map, Step
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.coded_states import CodedStates
from optimum_neuron.step.features.codes.weight import CODE_DTYPES, PACKED, UNUSED_SCALE_BITS, QuantizedWeight
from optimum_neuron.step.spec import TensorSpec
from optimum_neuron.targets.cpu.native_library import fetch_library


# Where a run plays a machine of one set, the kernels of that one alone.
NAMES = tuple(each.name for each in list_instruction_sets() if os.environ.get(CPU_VARIABLE, "") in ("", each.name))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Half the distance of two neighbouring numbers, relative to them.
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
Weight = Tensor | QuantizedWeight
SHORT = "short"
_GUARD, _GUARD_BYTE = 256, 0xA5
NAN, INFINITY = math.nan, math.inf

with_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def random(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(sizes).to(dtype)


def int32(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors are equal to the bit; any NaN is another."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    numbers = [_bits(each.nan_to_num(0)) if each.is_floating_point() else each for each in (left, right)]
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(*numbers)


def all_same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(left, right, strict=True))


def check_linear(result: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Within the rounding of sums in float32, of codes, of their scales and of shifts, and one of the result."""
    plain = (weight if isinstance(weight, Tensor) else weight.dequantize()).double()
    exact, size = linear(x.double(), plain, None if bias is None else bias.double()), plain.abs()
    if isinstance(weight, QuantizedWeight) and weight.shift is not None:
        scaled = replace(weight, shift=torch.zeros_like(weight.scale.float())).dequantize().double().abs()
        size = scaled + weight.shift.double().abs().repeat_interleave(weight.group_size, -1)
    terms, error = linear(x.double().abs(), size) + 1, (result.double() - exact).abs()
    assert result.dtype == x.dtype and result.shape == exact.shape
    least = 2**-21 if isinstance(weight, Tensor) else 2**-20
    assert (error <= terms * least + exact.abs() * ROUNDING[x.dtype] * 1.001).all()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RefusedError(Exception):
    """A step was given an index that it does not have."""


@dataclass
class Tensors:
    """The tensors of a step, as buffers that end where the tensors' memory does."""

    held: list[Tensor] = field(default_factory=list)

    def __call__(self, tensor: Tensor) -> Operand:
        self.held.append(tensor)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Operand(len(self.held) - 1, dtype, tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))

    def member(self, value: Any) -> Any:
        """A member of a step: operands for tensors and for a weight's scales; all else as it is."""
        if isinstance(value, QuantizedWeight):
            return Codes(value.kind, self(value.scale), self.member(value.shift), value.activations)
        return self(value) if isinstance(value, Tensor) else value

    @property
    def short_scales(self) -> set[str]:
        """Of parts of one tensor all or none: it is to be known of the whole."""
        halves = ((str(i), _whole(each)) for i, each in enumerate(self.held) if each.dtype == torch.float16)
        return {name for name, whole in halves if are_short(whole.numpy())}

    @property
    def buffers(self) -> list[Buffer]:
        return [Buffer("tensor", str(i), each.untyped_storage().nbytes()) for i, each in enumerate(self.held)]


def _whole(tensor: Tensor) -> Tensor:
    return torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())


def guarded(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new tensor amid bytes that nobody may write to; see `check_guards`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.full((size + 2 * _GUARD,), _GUARD_BYTE, dtype=torch.uint8)
    return memory[_GUARD : _GUARD + size].view(dtype).view(tuple(shape))


def check_guards(tensor: Tensor) -> None:
    memory = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    assert (torch.cat([memory[:_GUARD], memory[-_GUARD:]]) == _GUARD_BYTE).all(), "it wrote next to its output"


def parts_of(weight: Weight) -> tuple[Tensor, QuantizedWeight | None]:
    return (weight, None) if isinstance(weight, Tensor) else (weight.codes, weight)


class Kernels:
    """The kernels of one instruction set, as functions of tensors; `library` gives its C functions for plans over such buffers."""

    def __init__(self, name: str, library: Callable[[Sequence[Buffer]], Any]) -> None:
        self.name, self.library, self.threads = name, library, 2

    @contextmanager
    def with_threads(self, count: int) -> Iterator[None]:
        before, self.threads = self.threads, count
        try:
            yield
        finally:
            self.threads = before

    def run(self, step: Step, tensors: Tensors) -> None:
        words = np.array(encode_step(step, tensors.buffers, tensors.short_scales), dtype=np.int64)
        places = [each.untyped_storage().data_ptr() for each in tensors.held]
        addresses = (ctypes.c_void_p * len(places))(*places)
        library = self.library(tensors.buffers)
        plan = library.step_plan(words.ctypes.data, len(words))
        assert plan
        try:
            result = library.step_run(plan, 0, 1, ctypes.addressof(addresses), 1, self.threads)
        finally:
            library.step_free(plan)
        assert result in (-1, 0)
        if result == 0:
            raise RefusedError

    def call(self, make: Callable[..., Step], output: Tensor, **members: Any) -> Tensor:
        """Runs a step of an output and other members, in which a weight stands for its codes' scales; returns the output."""
        tensors = Tensors()
        own = {name: tensors.member(each) for name, each in members.items()}
        self.run(make(**own, output=tensors(output)), tensors)
        check_guards(output)
        return output

    def linears(self, x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> list[Tensor]:
        tensors, outputs, layers = Tensors(), [], []
        for weight, bias in zip(weights, biases, strict=True):
            plain, codes = parts_of(weight)
            outputs.append(guarded((len(x), plain.shape[-2]), x.dtype))
            layers.append(Layer(*map(tensors.member, (plain, bias, outputs[-1], codes))))
        self.run(steps.Linears(tensors(x), tuple(layers)), tensors)
        for output in outputs:
            check_guards(output)
        return outputs

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self.linears(x, [weight], [bias])[0]

    def expert_linear(
        self, x: Tensor, index: Tensor, weight: Weight, bias: Tensor | None = None, *, output: Tensor | None = None
    ) -> Tensor:
        plain, codes = parts_of(weight)
        output = guarded((*index.shape, plain.shape[1]), x.dtype) if output is None else output
        return self.call(steps.Experts, output, x=x, index=index.to(torch.int32), weight=plain, bias=bias, codes=codes)

    def attend(
        self,
        query: Tensor,
        keys: Tensor | CodedStates,
        values: Tensor | CodedStates,
        slots: Tensor | None,
        positions: Tensor,
        *options: Any,
        **named: Any,
    ) -> Tensor:
        """`options` are the scaling, and what else there is of the window, the softcap, sinks, and a bias by column."""
        rows, heads, tokens, _ = query.shape
        dim = (values if isinstance(values, Tensor) else values.codes).shape[-1]
        output = named.pop("output", None)
        output = guarded((rows, tokens, heads, dim), query.dtype) if output is None else output
        members = {"window": 0, "softcap": 0.0, "sinks": None, "column_bias": None}
        members |= dict(zip(("scaling", *members), options, strict=False)) | named
        for name, each in (("key", keys), ("value", values)):
            plain = isinstance(each, Tensor)
            members |= {f"{name}s": each if plain else each.codes, f"{name}_scale": None if plain else each.scale}
        return self.call(steps.Attend, output, query=query, blocks=slots, positions=positions, **members)

    def select(
        self, source: Tensor, index: Tensor, dim: int = 0, *, wraps: bool = False, output: Tensor | None = None
    ) -> Tensor:
        if output is None:
            output = guarded((*source.shape[:dim], *index.shape, *source.shape[dim + 1 :]), source.dtype)
        return self.call(steps.Select, output, source=source, index=index, dim=dim, wraps=wraps)

    def write_cache(self, cache: Tensor, states: Tensor, rows: Tensor, columns: Tensor) -> None:
        tensors = Tensors()
        self.run(steps.WriteCache(*map(tensors, (cache, states, rows, columns))), tensors)

    def write_codes(self, cache: CodedStates, states: Tensor, rows: Tensor, columns: Tensor) -> None:
        tensors = Tensors()
        self.run(steps.WriteCodes(*map(tensors, (cache.codes, cache.scale, states, rows, columns))), tensors)

    def sample(self, logits: Tensor, params: Tensor, uniforms: Tensor) -> Tensor:
        return self.call(
            steps.Sample, guarded((len(logits),), torch.int32), logits=logits, params=params, uniforms=uniforms
        )


@cache
def load_kernels(name: str) -> Kernels:
    """Those of one instruction set; of the processes of a test run, one builds them."""
    with FileLock(f"{os.environ[CACHE_VARIABLE]}-{name}.lock"), pytest.MonkeyPatch.context() as patch:
        if name in EMULATED:
            return Kernels(name, partial(EmulatedLibrary, emulator(name)))
        if name == AMX.name:
            patch.setattr(native_build, "choose_instruction_set", lambda: AMX)
        patch.setenv(CPU_VARIABLE, name)
        compiled = native_build.load_library(fetch_library)
        return Kernels(name, lambda buffers: compiled)


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = lambda *inputs: function(*inputs)


class Planned:
    """A function of tensors as a plan; `tokens` are rows of each of its outputs, of which a run can leave out the last."""

    def __init__(
        self, kernels: Kernels, function: Callable[..., Any], inputs: Sequence[Tensor], tokens: int = 0
    ) -> None:
        module = function if isinstance(function, nn.Module) else _Function(function)
        with torch.no_grad():
            program = torch.export.export(module, tuple(inputs), strict=False)
        output = next(node for node in program.graph_module.graph.nodes if node.op == "output")
        outputs = [_spec(node.meta["val"]) for node in output.args[0]]
        self.plan: Plan
        self.plan, constants = lower(program, tokens, [str(number) for number in range(len(outputs))])
        tensors = constants | {name: each.detach() for name, each in module.state_dict().items()}
        self._arena = allocate_arena([self.plan])
        self._bound = self.plan.bind(
            {name: to_numpy(each) for name, each in tensors.items()},
            [_spec(each) for each in inputs],
            outputs,
            self._arena,
            library=kernels.library(self.plan.buffers),
        )

    @property
    def operators(self) -> set[str]:
        """What the plan's maps compute by."""
        return {item.op for step in self.plan.steps if isinstance(step, Map) for item in step.items}

    def __call__(self, *inputs: Tensor, live: int = 1 << 40) -> list[Tensor]:
        """Runs it for the first `live` tokens, in memory that holds NaN: as integers, no indices."""
        self._arena.fill(0xFF)
        outputs = self._bound.run([to_numpy(each) for each in inputs], live)
        return [to_torch(each.copy()) for each in outputs]  # the next run uses their memory again


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec("", tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def quantized(
    kind: str,
    *shape: int,
    group: int,
    shifted: bool = False,
    scale: torch.dtype | str = torch.float32,
    activations: str | None = None,
) -> QuantizedWeight:
    """Any codes that a weight can have but NaN, with scales of both signs.

    Args:
        scale: their type; or SHORT, those of float16 that are so.
    """
    *others, outputs, inputs = shape
    codes = torch.randint(0, 256, (*others, outputs, inputs // 2 if kind in PACKED else inputs)).to(torch.uint8)
    if kind == "fp8":
        codes[codes % 128 == 127] = 3
    groups = (*others, outputs, inputs // group)
    shift = torch.randn(groups) if shifted else None
    scales = torch.randn(groups)
    own = shortened(scales) if isinstance(scale, str) else scales.to(scale)
    return QuantizedWeight(kind, codes.view(CODE_DTYPES[kind]), own, shift, activations)


def shortened(scales: Tensor) -> Tensor:
    return (scales.half().view(torch.int16) & ~UNUSED_SCALE_BITS).view(torch.float16)


def row(weight: Weight, rows: slice | int) -> Any:
    if isinstance(weight, Tensor):
        return weight[rows]
    shift = None if weight.shift is None else weight.shift[rows]
    return replace(weight, codes=weight.codes[rows], scale=weight.scale[rows], shift=shift)


def experts_by_linears(kernels: Kernels, x: Tensor, index: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """What linear layers make of the rows of each expert, and zero where an index is none of an expert."""
    rows = x[:, None].expand(*index.shape, x.shape[-1]) if x.dim() == 2 else x
    plain, _ = parts_of(weight)
    output = torch.zeros((*index.shape, plain.shape[1]), dtype=x.dtype)
    for expert in set(index.flatten().tolist()) & {*range(len(plain))}:
        chosen = rows[index == expert].contiguous()
        output[index == expert] = kernels.linear(chosen, row(weight, expert), None if bias is None else bias[expert])
    return output


def check_chunks(runner: GraphRunner, prompt: np.ndarray) -> Tensor:
    """The logits behind a prompt of 21 tokens, which are the same however it is cut, alone and beside an idle row."""
    runner.reset_slots()
    whole = prefill_pieces(runner, 0, prompt, [16, 5])
    runner.reset_slots()
    assert torch.equal(prefill_pieces(runner, 0, prompt, [8, 5, 8]), whole)
    runner.reset_slots()
    for slot in (0, 1):
        prefill_pieces(runner, slot, prompt[:20], [16, 4])
        assert torch.equal(decode_tokens(runner, {slot: int(prompt[20])})[1][slot], whole)
    return whole
