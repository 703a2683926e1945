# SPDX-License-Identifier: Apache-2.0
"""Checks that the graphs of an artifact are those of its manifest and weights: compiled code checks none of their sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from ....arrays import dtype_name
from ....artifact.artifact import Artifact, ArtifactError
from ....artifact.schema import first_difference, shown
from ....artifact.tensor_file import TensorLike
from ....step.spec import CHUNK, DECODE, GraphSpec, TensorSpec
from ....step.state_specs import KEPT
from .io import CACHE, CHOSEN, PROBE, PROBE_INPUT, SCORES, GraphIO, InputBinding, OutputBinding, cut_dim
from .state_graphs import chosen_state, score_graphs, state_graphs


def graph_names(artifact: Artifact) -> tuple[str, ...]:
    """Return the names of an artifact's graphs: steps, then the graphs over states."""
    others = state_graphs(artifact.config, artifact.model, artifact.model.vocab_size)
    probe = (PROBE,) if artifact.config.tensor_parallel_size > 1 else ()
    return (*(spec.name for spec in artifact.graphs), *(graph.name for graph in others), *probe)


def left_states(artifact: Artifact) -> tuple[TensorSpec, ...]:
    """Return what steps leave for samplers and for the next step, as a rank has it: logits, and each slot's token."""
    graphs = score_graphs(artifact.config, artifact.model.vocab_size)
    chosen = (chosen_state(artifact.config),) if graphs else ()
    return (*dict.fromkeys(graph.read[0] for graph in graphs), *chosen)


def check_graphs(artifact: Artifact, graphs: Mapping[str, GraphIO]) -> None:
    """Compare graphs with the manifest; raise ArtifactError, which names the graph and the first difference."""
    vocab_size = artifact.model.vocab_size
    steps = {spec.name: spec for spec in artifact.graphs}
    others = {each.name: each for each in state_graphs(artifact.config, artifact.model, vocab_size)}
    first: list[InputBinding] | None = None
    for name, io in graphs.items():
        try:
            _check_form(io, artifact.config.tensor_parallel_size)
            if name == PROBE:
                counts = [TensorSpec(each.name, (1,), "float32") for each in io.outputs]
                _check_calls(io, [TensorSpec(PROBE_INPUT, (1,), "float32")], counts)
                continue
            if name in others:
                graph = others[name]
                _check_calls(io, graph.inputs, graph.outputs)
                parts = {each.name: each for each in first or ()}
                states = [_cut_part(each, parts.get(each.name.removeprefix(KEPT))) for each in graph.states]
                _check_states(io, states, updated={each.name for each in graph.updated})
                continue
            _check_step(io, steps[name], vocab_size)
            present = {SCORES + DECODE: steps[name].has_decode, SCORES + CHUNK: steps[name].has_chunk}
            left = [each for each in left_states(artifact) if present.get(each.name, True)]
            _check_states(io, (*artifact.states(), *left), updated=None)
            cache = [each for each in _find_states(io) if each.name.startswith(CACHE)]
            first = cache if first is None else first
            if cache != first:
                raise ValueError("its states are not those of the other graphs")
        except ValueError as error:
            raise ArtifactError(
                f"graph {name} of {artifact.path} is not that of its manifest: {error}; export the model again"
            ) from error


def check_weights(where: object, tensors: Mapping[str, TensorLike], graphs: Iterable[GraphIO]) -> None:
    """Compare a file's tensors, tied ones under all their names, with what graphs take; raise ValueError where one differs."""
    for binding in (each for io in graphs for each in io.inputs if each.role == "weight"):
        found = tensors.get(binding.name)
        if found is None:
            raise ValueError(f"{where} lacks {binding.name}, which a graph needs; export the model again")
        if tuple(found.shape) != binding.shape or dtype_name(found.dtype) != binding.dtype:
            raise ValueError(
                f"{where} has {binding.name} as {dtype_name(found.dtype)} {list(found.shape)}, and a graph takes it as "
                f"{binding.dtype} {list(binding.shape)}; export the model again"
            )


def _check_form(io: GraphIO, ranks: int) -> None:
    for bindings in (io.inputs, io.outputs):
        names = [each.name for each in bindings]
        if len(set(names)) < len(names):
            raise ValueError("two of its parameters or results have one name")
    if io.world_size != ranks:
        raise ValueError(f"it is for {io.world_size} ranks, not {ranks}")


def _check_step(io: GraphIO, spec: GraphSpec, vocab_size: int) -> None:
    difference = None if io.spec is None else first_difference(io.spec, asdict(spec))
    if difference is not None:
        field, lowered, asked = difference
        raise ValueError(f"it was lowered for {field}={shown(lowered)}, and the manifest says {shown(asked)}")
    _check_calls(io, [each for each in spec.inputs() if each.name not in io.unused_inputs], spec.outputs(vocab_size))


def _check_calls(io: GraphIO, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
    _check_same("takes", [each for each in io.inputs if each.role == "input"], inputs)
    _check_same("returns", [each for each in io.outputs if each.alias_of is None], outputs)


def _check_states(io: GraphIO, specs: Iterable[TensorSpec], updated: set[str] | None) -> None:
    """Check that all states are parameters, and that the new values of those to update are results; None: of all."""
    given, expected = _find_states(io), sorted(specs, key=lambda each: each.name)
    # Graphs of earlier versions kept no tokens: this cause comes before its effects.
    if any(each.name == CHOSEN for each in expected) and CHOSEN not in io.names("state"):
        raise ValueError("it keeps no chosen tokens, as graphs of earlier versions did not")
    if io.world_size > 1 and updated is None:
        own = [_cut_part(each, binding) for each, binding in zip(expected, given, strict=False)]
        expected = own + expected[len(given) :]
    _check_same("keeps", given, expected)
    renewed = [each for each in given if updated is None or each.name in updated]
    results = sorted((each for each in io.outputs if each.alias_of is not None), key=lambda each: str(each.alias_of))
    if [each.alias_of for each in results] != [each.name for each in renewed]:
        raise ValueError("its results are not a new value of each state")
    _check_same("updates", results, renewed)


def _find_states(io: GraphIO) -> list[InputBinding]:
    return sorted((each for each in io.inputs if each.role == "state"), key=lambda each: each.name)


def _cut_part(spec: TensorSpec, binding: InputBinding | None) -> TensorSpec:
    dim = cut_dim(spec.shape)
    cut = spec.name.startswith((CACHE, KEPT)) and binding is not None and len(binding.shape) == len(spec.shape)
    if binding is None or not cut or not 1 <= binding.shape[dim] <= spec.shape[dim]:
        return spec
    return TensorSpec(spec.name, (*spec.shape[:dim], binding.shape[dim], *spec.shape[dim + 1 :]), spec.dtype)


def _check_same(
    verb: str, found: Iterable[InputBinding | OutputBinding], expected: Sequence[TensorSpec | InputBinding]
) -> None:
    has, wants = ([(each.name, each.shape, each.dtype) for each in tensors] for tensors in (found, expected))
    if has != wants:
        different = next((pair for pair in zip(has, wants, strict=False) if pair[0] != pair[1]), None)
        one, other = different or (f"{len(has)} tensors", f"{len(wants)}")
        raise ValueError(f"it {verb} {one}, and the manifest asks for {other}")
