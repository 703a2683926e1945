# SPDX-License-Identifier: Apache-2.0
"""Whether the graphs of an artifact are those of its manifest and weights: compiled code checks none of their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from ...artifact.artifact import Artifact, ArtifactError
from ...artifact.schema import first_difference, shown
from ...artifact.tensor_file import Stored
from ...step.spec import CHUNK, DECODE, GraphSpec, TensorSpec
from .copy_graphs import COPY_INPUTS, CopyGraph, copy_graphs
from .graph_io import CACHE, CHOSEN, SCORES, SNAPSHOTS, GraphIO, InputBinding, OutputBinding, cut_dim
from .score_graphs import ScoreGraph, chosen_state, score_graphs


def graph_names(artifact: Artifact) -> tuple[str, ...]:
    """The graphs that an artifact has: its steps, what reads their logits, and what copies prefixes and state."""
    return (
        *(spec.name for spec in artifact.graphs),
        *(graph.name for graph in score_graphs(artifact.config, artifact.model.vocab_size)),
        *(graph.name for graph in copy_graphs(artifact.config, artifact.model)),
    )


def left_states(artifact: Artifact) -> tuple[TensorSpec, ...]:
    """What steps leave for samplers and for the next step, as a rank has it: logits, and each slot's token."""
    graphs = score_graphs(artifact.config, artifact.model.vocab_size)
    chosen = (chosen_state(artifact.config),) if graphs else ()
    return (*dict.fromkeys(graph.scores for graph in graphs), *chosen)


def check_graphs(artifact: Artifact, graphs: Mapping[str, GraphIO]) -> None:
    """Compares what graphs take and return with what the manifest says of them.

    Raises:
        ArtifactError: something differs; the graph is named.
    """
    specs = {spec.name: spec for spec in artifact.graphs}
    readers = {graph.name: graph for graph in score_graphs(artifact.config, artifact.model.vocab_size)}
    copies = {graph.name: graph for graph in copy_graphs(artifact.config, artifact.model)}
    caches: list[list[InputBinding]] = []
    for name, io in graphs.items():
        try:
            _check_names(io)
            if io.world_size != artifact.config.tensor_parallel_size:
                raise ValueError(f"it is for {io.world_size} ranks, not {artifact.config.tensor_parallel_size}")
            if name in specs:
                _check_step(io, specs[name], artifact.model.vocab_size)
            if name in readers:
                _check_reader(io, readers[name])
                continue
            if name in copies:
                _check_copy(io, copies[name], caches[0] if caches else ())
                continue
            left = _left_by(specs.get(name), left_states(artifact))
            _check_chosen(io, left)
            _check_states(io, (*artifact.states(), *left))
            caches.append([each for each in _states(io) if each.name.startswith(CACHE)])
            if caches[-1] != caches[0]:
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


def _check_reader(io: GraphIO, graph: ScoreGraph) -> None:
    """It reads scores, and updates nothing but what it chose."""
    updated = [] if graph.chosen is None else [graph.chosen]
    _check_chosen(io, updated)
    _check_same("reads", _states(io), [*updated, graph.scores])
    _check_same("takes", [each for each in io.inputs if each.role == "input"], graph.inputs)
    returned = [each for each in io.outputs if each.alias_of is None]
    _check_same("returns", returned, graph.outputs)
    _check_same("updates", [each for each in io.outputs if each not in returned], updated)


def _check_copy(io: GraphIO, graph: CopyGraph, kept: Iterable[InputBinding]) -> None:
    """Check that it updates some states and reads others, as steps have them; `kept` is what a rank has of the cache."""
    _check_same("takes", [each for each in io.inputs if each.role == "input"], COPY_INPUTS)
    given, parts = _states(io), {each.name: each for each in kept}
    expected = [
        _part(each, parts.get(each.name.removeprefix(SNAPSHOTS)))
        for each in sorted(graph.states, key=lambda each: each.name)
    ]
    _check_same("keeps", given, expected)
    names = {each.name for each in graph.updated}
    _check_updates(io, [each for each in given if each.name in names])


def _states(io: GraphIO) -> list[InputBinding]:
    return sorted((each for each in io.inputs if each.role == "state"), key=lambda each: each.name)


def _left_by(step: GraphSpec | None, left: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Scores of the groups of rows that a step has, and its slots' tokens; nothing by what is no step."""
    if step is None:
        return []
    present = {SCORES + DECODE: step.has_decode, SCORES + CHUNK: step.has_chunk, CHOSEN: True}
    return [each for each in left if present[each.name]]


def _check_chosen(io: GraphIO, expected: Iterable[TensorSpec]) -> None:
    """Graphs of before kept no tokens: what that means stands first."""
    if any(each.name == CHOSEN for each in expected) and CHOSEN not in io.names("state"):
        raise ValueError("it keeps no chosen tokens, as graphs of earlier versions did not")


def _check_states(io: GraphIO, specs: Iterable[TensorSpec]) -> None:
    """All states are parameters, and each one's new value is a result."""
    given = _states(io)
    expected = sorted(specs, key=lambda each: each.name)
    if io.world_size > 1:
        expected = [_part(each, binding) for each, binding in zip(expected, given, strict=False)] + expected[
            len(given) :
        ]
    _check_same("keeps", given, expected)
    _check_updates(io, given)


def _check_updates(io: GraphIO, given: Sequence[InputBinding]) -> None:
    updated = sorted((each for each in io.outputs if each.alias_of is not None), key=lambda each: str(each.alias_of))
    if [each.alias_of for each in updated] != [each.name for each in given]:
        raise ValueError("its results are not a new value of each state")
    _check_same("updates", updated, given)


def _part(spec: TensorSpec, binding: InputBinding | None) -> TensorSpec:
    """What a rank has of a cache's state, or of snapshots of it: some of its heads or channels."""
    dim = cut_dim(spec.shape)
    if (
        binding is None
        or not spec.name.startswith((CACHE, SNAPSHOTS))
        or len(binding.shape) != len(spec.shape)
        or not 1 <= binding.shape[dim] <= spec.shape[dim]
    ):
        return spec
    return TensorSpec(spec.name, (*spec.shape[:dim], binding.shape[dim], *spec.shape[dim + 1 :]), spec.dtype)


def _check_same(
    verb: str, found: Iterable[InputBinding | OutputBinding], expected: Iterable[TensorSpec | InputBinding]
) -> None:
    has, wants = ([(each.name, each.shape, each.dtype) for each in tensors] for tensors in (found, expected))
    if has != wants:
        different = next((pair for pair in zip(has, wants, strict=False) if pair[0] != pair[1]), None)
        one, other = different or (f"{len(has)} tensors", f"{len(wants)}")
        raise ValueError(f"it {verb} {one}, and the manifest asks for {other}")
