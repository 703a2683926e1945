# SPDX-License-Identifier: Apache-2.0
"""Reads the weights of one rank from its safetensors file, tensor by tensor, checked against what the graphs want."""

from __future__ import annotations

from collections.abc import Iterator

from safetensors import safe_open
from torch import Tensor

from ....artifacts.tensor_file import stored_tensors
from ..graph_checks import check_weights
from .load_plan import LoadPlan


def read_rank_weights(plan: LoadPlan, rank: int) -> Iterator[tuple[list[str], Tensor]]:
    """Every stored tensor that a graph of the plan needs, once, with all names that graphs have for it.

    Raises:
        ValueError: the file lacks one, or has it with another shape or type.
    """
    path, wanted = plan.weights[rank], dict[str, list[str]]()
    layout = stored_tensors(path)
    # A name that is tied stands for the other tensor alone, whatever the file holds under it.
    own = {name: stored for name, stored in layout.items() if name not in plan.tied_weights}
    tied = {alias: layout[stored] for alias, stored in plan.tied_weights.items() if stored in layout}
    check_weights(path, own | tied, plan.graphs.values())
    for io in plan.graphs.values():
        for binding in io.inputs:
            if binding.role == "weight":
                names = wanted.setdefault(plan.tied_weights.get(binding.name, binding.name), [])
                if binding.name not in names:
                    names.append(binding.name)
    with safe_open(path, framework="pt") as file:
        for stored, names in wanted.items():
            yield names, file.get_tensor(stored)
