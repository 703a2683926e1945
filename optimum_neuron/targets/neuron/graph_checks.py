# SPDX-License-Identifier: Apache-2.0
"""Whether the graphs of an artifact are those of its manifest and weights: compiled code checks none of their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from ...artifacts.artifact import Artifact, ArtifactError
from ...artifacts.schema import first_difference, shown
from ...artifacts.tensor_file import Stored
from ...graphs.spec import GraphSpec, TensorSpec
from .graph_io import COPY_SLOT, GraphIO, InputBinding, OutputBinding


_HEADS = 1  # dimension of a state of which a rank has its part


def graph_names(artifact: Artifact) -> tuple[str, ...]:
    """The graphs that an artifact has: its steps, and where slots share prefixes the one that copies them."""
    steps = tuple(spec.name for spec in artifact.graphs)
    copies = artifact.config.batch_size > 1 and artifact.model.reuses_prefixes
    return (*steps, COPY_SLOT) if copies else steps


def check_graphs(artifact: Artifact, graphs: Mapping[str, GraphIO]) -> None:
    """Compares what graphs take and return with what the manifest says of them.

    Raises:
        ArtifactError: something differs; the graph is named.
    """
    specs = {spec.name: spec for spec in artifact.graphs}
    states: list[dict[str, InputBinding]] = []
    for name, io in graphs.items():
        try:
            _check_names(io)
            if io.world_size != artifact.config.tensor_parallel_size:
                raise ValueError(f"it is for {io.world_size} ranks, not {artifact.config.tensor_parallel_size}")
            if name in specs:
                _check_step(io, specs[name], artifact.model.vocab_size)
            _check_states(io, artifact.states())
            states.append({each.name: each for each in io.inputs if each.role == "state"})
            if states[-1] != states[0]:
                raise ValueError("its states are not those of the other graphs")
        except ValueError as error:
            raise ArtifactError(
                f"graph {name} of {artifact.path} is not that of its manifest: {error}; export the model again"
            ) from error


def check_weights(where: object, tensors: Mapping[str, Stored], graphs: Iterable[GraphIO]) -> None:
    """Compares a file's tensors, tied ones under all their names, with what graphs take.

    Raises:
        ValueError: one is missing, or has another shape or type.
    """
    for binding in (each for io in graphs for each in io.inputs if each.role == "weight"):
        found = tensors.get(binding.name)
        if found is None:
            raise ValueError(f"{where} lacks {binding.name}, which a graph needs; export the model again")
        if tuple(found.shape) != binding.shape or str(found.dtype) != f"torch.{binding.dtype}":
            raise ValueError(
                f"{where} has {binding.name} as {found.dtype} {list(found.shape)}, and a graph takes it as "
                f"torch.{binding.dtype} {list(binding.shape)}; export the model again"
            )


def _check_names(io: GraphIO) -> None:
    for bindings in (io.inputs, io.outputs):
        names = [each.name for each in bindings]
        if len(set(names)) < len(names):
            raise ValueError("two of its parameters or results have one name")


def _check_step(io: GraphIO, spec: GraphSpec, vocab_size: int) -> None:
    difference = None if io.spec is None else first_difference(io.spec, asdict(spec))
    if difference is not None:
        field, lowered, asked = difference
        raise ValueError(f"it was lowered for {field}={shown(lowered)}, and the manifest says {shown(asked)}")
    given = [each for each in io.inputs if each.role == "input"]
    _check_same("takes", given, [each for each in spec.inputs() if each.name not in io.unused_inputs])
    _check_same("returns", [each for each in io.outputs if each.alias_of is None], spec.outputs(vocab_size))


def _check_states(io: GraphIO, specs: Iterable[TensorSpec]) -> None:
    """All states are parameters, and each one's new value is a result."""
    given = sorted((each for each in io.inputs if each.role == "state"), key=lambda each: each.name)
    expected = sorted(specs, key=lambda each: each.name)
    if io.world_size > 1:
        expected = [_part(each, binding) for each, binding in zip(expected, given, strict=False)] + expected[
            len(given) :
        ]
    _check_same("keeps", given, expected)
    updated = sorted((each for each in io.outputs if each.alias_of is not None), key=lambda each: str(each.alias_of))
    if [each.alias_of for each in updated] != [each.name for each in given]:
        raise ValueError("its results are not a new value of each state")
    _check_same("updates", updated, given)


def _part(spec: TensorSpec, binding: InputBinding) -> TensorSpec:
    """What a rank has of a state: some of its heads."""
    if len(binding.shape) != len(spec.shape) or not 1 <= binding.shape[_HEADS] <= spec.shape[_HEADS]:
        return spec
    return TensorSpec(spec.name, (*spec.shape[:_HEADS], binding.shape[_HEADS], *spec.shape[_HEADS + 1 :]), spec.dtype)


def _check_same(
    verb: str,
    found: Iterable[InputBinding | OutputBinding],
    expected: Iterable[TensorSpec | InputBinding],
) -> None:
    has, wants = ([(each.name, each.shape, each.dtype) for each in tensors] for tensors in (found, expected))
    if has != wants:
        different = next((pair for pair in zip(has, wants, strict=False) if pair[0] != pair[1]), None)
        one, other = different or (f"{len(has)} tensors", f"{len(wants)}")
        raise ValueError(f"it {verb} {one}, and the manifest asks for {other}")
