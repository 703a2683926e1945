# SPDX-License-Identifier: Apache-2.0
"""What a plan's steps are called where a person reads it: their kind, and the artifact's tensor that tells which they are."""

from __future__ import annotations

from collections.abc import Sequence

from .program import (
    Attend,
    Buffer,
    Convolve,
    Experts,
    Linears,
    Map,
    Operand,
    Select,
    Step,
    TorchCall,
    Walk,
    WriteCache,
    WriteCodes,
)


def step_name(step: Step, buffers: Sequence[Buffer]) -> str:
    """As "Linears model.model.layers.0.self_attn.q_proj.weight + 2", of three that share their input."""
    operands: list[Operand] = []
    if isinstance(step, Linears):
        operands = [layer.weight for layer in step.layers]
    elif isinstance(step, Experts):
        operands = [step.weight]
    elif isinstance(step, Attend):
        operands = [step.keys]
    elif isinstance(step, Select):
        operands = [step.source]
    elif isinstance(step, WriteCache):
        operands = [step.cache]
    elif isinstance(step, WriteCodes):
        operands = [step.codes]
    elif isinstance(step, Convolve | Walk):
        operands = [step.state]
    elif isinstance(step, Map):
        operands = [item.access for item in step.items if item.access is not None]
    kind = step.operator if isinstance(step, TorchCall) else type(step).__name__
    names = [buffers[each.buffer].name for each in operands if buffers[each.buffer].kind == "tensor"]
    named = list(dict.fromkeys(names))
    more = f" + {len(named) - 1}" if len(named) > 1 else ""
    return f"{kind} {named[0]}{more}" if named else kind
