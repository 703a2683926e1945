# SPDX-License-Identifier: Apache-2.0
"""What each process of ranks gets to load: graphs with their places in shared memory, and where in which file its weights are."""

from __future__ import annotations

from ....artifact.tensor_file import parse_head, read_head
from ..graph_checks import check_weights
from ..graph_io import GraphIO, InputBinding, OutputBinding
from ..rank.plan import Graph, RankPlan, Tensor, Weight
from .load_plan import LoadPlan
from .shared_tensors import SharedTensors


def rank_plan(plan: LoadPlan, tensors: SharedTensors, runtime: str, ranks: tuple[int, ...]) -> RankPlan:
    """The plan of the process that holds these ranks.

    Raises:
        ValueError: a file of weights lacks a tensor, or has it with another shape or type.
        FileNotFoundError: a compiled graph is missing.
    """
    graphs = {name: _graph(str(plan.neff(name)), io, tensors) for name, io in plan.graphs.items()}
    weights = tuple(_weights(plan, rank) for rank in ranks)
    return RankPlan(runtime, ranks, plan.world_size, tensors.size, weights, graphs)


def _graph(neff: str, io: GraphIO, tensors: SharedTensors) -> Graph:
    inputs = tuple(_tensor(each, each.role, tensors) for each in io.inputs)
    outputs = (_tensor(each, "output", tensors, each.alias_of) for each in io.outputs)
    return Graph(neff, inputs, tuple(outputs))


def _tensor(
    binding: InputBinding | OutputBinding, role: str, tensors: SharedTensors, alias_of: str | None = None
) -> Tensor:
    in_memory = role == "input" or (role == "output" and alias_of is None)
    place = tensors.place(binding) if in_memory else None
    return Tensor(binding.name, role, binding.shape, binding.dtype, place, alias_of)


def _weights(plan: LoadPlan, rank: int) -> tuple[Weight, ...]:
    """Every stored tensor that a graph needs, once, with all names that graphs have for it."""
    path, wanted = plan.weights[rank], dict[str, list[str]]()
    with path.open("rb") as file:
        head = read_head(file, path)
    layout = parse_head(head, path)
    # A name that is tied stands for the other tensor alone, whatever the file holds under it.
    own = {name: stored for name, stored in layout.items() if name not in plan.tied_weights}
    tied = {alias: layout[stored] for alias, stored in plan.tied_weights.items() if stored in layout}
    check_weights(path, own | tied, plan.graphs.values())
    for io in plan.graphs.values():
        for name in io.names("weight"):
            names = wanted.setdefault(plan.tied_weights.get(name, name), [])
            if name not in names:
                names.append(name)
    found = ((names, layout[stored]) for stored, names in wanted.items())
    return tuple(
        Weight(
            tuple(names), str(path), len(head) + stored.start, stored.shape, str(stored.dtype).removeprefix("torch.")
        )
        for names, stored in found
    )
