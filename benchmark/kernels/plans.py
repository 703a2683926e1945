# SPDX-License-Identifier: Apache-2.0
"""Plans of one step, and of one module, bound to tensors as the cpu target binds the plans of its graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from optimum_neuron.kernels.lower.lower import lower
from optimum_neuron.kernels.plan.program import Buffer, Operand, Plan, Step
from optimum_neuron.kernels.plan.values import contiguous, dtype_name
from optimum_neuron.kernels.run.memory import allocate_arena
from optimum_neuron.kernels.run.short_scales import short_scales
from optimum_neuron.step.spec import GraphSpec, TensorSpec
from optimum_neuron.targets.cpu.executable import BoundPlan


# From a plan's inputs to its outputs, which every run allocates, as torch's operators do.
Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


class Operands:
    """What a single step works on: tensors, which stay where they are, and outputs."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._tensors: dict[str, Tensor] = {}
        self._outputs: list[Tensor] = []

    def __call__(self, tensor: Tensor) -> Operand:
        """A contiguous tensor that the step reads."""
        name = str(len(self._tensors))
        self._tensors[name] = tensor
        return self._add(Buffer("tensor", name, tensor.nbytes), tensor)

    def output(self, shape: tuple[int, ...], dtype: torch.dtype) -> Operand:
        output = contiguous(shape, dtype)
        self._outputs.append(output)
        return self._add(Buffer("output", str(len(self._outputs) - 1), output.nbytes), output)

    def _add(self, buffer: Buffer, tensor: Tensor) -> Operand:
        self._buffers.append(buffer)
        shape, strides = tuple(tensor.shape), tuple(tensor.stride())
        return Operand(len(self._buffers) - 1, dtype_name(tensor.dtype), 0, shape, strides)

    def bind(self, step: Step) -> Run:
        """A plan of this step alone; it takes no inputs."""
        return _bind(Plan(tuple(self._buffers), (), (step,)), (), self._outputs, self._tensors)


def bind_module(module: nn.Module, inputs: Sequence[Tensor]) -> Run:
    """A module's plan, for inputs of the same shapes and types."""
    program = torch.export.export(module, tuple(inputs), strict=False)
    plan, constants = lower(program)
    results = program.graph_module.graph.output_node().args[0]
    outputs = [node.meta["val"] for node in cast("Sequence[torch.fx.Node]", results)]
    return _bind(plan, inputs, outputs, constants | dict(module.named_parameters()))


@dataclass(frozen=True)
class _Interface:
    """What a plan asks of its graph's spec."""

    before: tuple[TensorSpec, ...]
    after: tuple[TensorSpec, ...]

    def inputs(self) -> tuple[TensorSpec, ...]:
        return self.before

    def outputs(self, vocab_size: int) -> tuple[TensorSpec, ...]:
        return self.after


def _bind(plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Run:
    interface = _Interface(_specs(inputs), _specs(outputs))
    bound = BoundPlan(
        plan, cast("GraphSpec", interface), 0, tensors, allocate_arena([plan]), short_scales([plan], tensors)
    )
    return lambda given: bound.run(given, live=1)


def _specs(tensors: Sequence[Tensor]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec("", tuple(each.shape), dtype_name(each.dtype)) for each in tensors)
