# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of one rank from its safetensors file, tensor by tensor, checked against what the graphs want."""

from __future__ import annotations

from collections.abc import Iterator

from safetensors import safe_open
from torch import Tensor

from ..graph_io import InputBinding
from .load_plan import LoadPlan


def read_rank_weights(plan: LoadPlan, rank: int) -> Iterator[tuple[list[str], Tensor]]:
    """Every stored tensor that a graph of the plan needs, once, with all names that graphs have for it.

    Raises:
        ValueError: the file lacks one, or has it with another shape or type.
    """
    wanted: dict[str, dict[str, InputBinding]] = {}
    for io in plan.graphs.values():
        for binding in io.inputs:
            if binding.role == "weight":
                stored = plan.tied_weights.get(binding.name, binding.name)
                wanted.setdefault(stored, {})[binding.name] = binding
    path = plan.weights[rank]
    with safe_open(path, framework="pt") as file:
        lacking = sorted(wanted.keys() - set(file.keys()))
        if lacking:
            raise ValueError(f"{path} lacks {lacking[0]}, which a graph needs; export the model again")
        for stored, bindings in wanted.items():
            tensor = file.get_tensor(stored)
            for binding in bindings.values():
                if tuple(tensor.shape) != binding.shape or str(tensor.dtype) != f"torch.{binding.dtype}":
                    raise ValueError(
                        f"{path} has {stored} as {tensor.dtype} {list(tensor.shape)}, and a graph takes it as "
                        f"torch.{binding.dtype} {list(binding.shape)}; export the model again"
                    )
            yield list(bindings), tensor
