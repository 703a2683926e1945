# SPDX-License-Identifier: Apache-2.0
"""Memory of an artifact by core, or of the host where nothing is shared: weights, states of slots, and scratch."""

from __future__ import annotations

from collections.abc import Iterable

from ...artifact.artifact import Artifact, is_graph_file, is_weight_file
from ...config import HLO_TARGETS, NEURON_TARGETS
from ...errors import first_line
from ...hub.facts import MemoryParts
from ...step.spec import TensorSpec
from ...step.state_specs import BY_TOKEN, byte_count


WEIGHTS, CACHE, STATE = "weights", "KV cache", "state of slots"
SNAPSHOTS, SCRATCH, RESERVE = "snapshots", "scratch", "reserve"
_SNAPSHOT_PREFIX = "snapshots."


def collect_memory(artifact: Artifact, arena: int) -> tuple[tuple[MemoryParts, ...], tuple[str, ...]]:
    """Return the memory of each core in order, and sentences about missing parts.

    Scratch memory of a device and the runtime's reserve are estimated, as `optimum-cli neuron estimate` does.

    Args:
        arena: bytes of scratch memory that plans take on the host.
    """
    files = sorted(artifact.manifest["files"].items())
    weights = [(name, entry["size"]) for name, entry in files if is_weight_file(name)]
    if artifact.target not in HLO_TARGETS:
        total = sum(size for _, size in weights)
        parts = {WEIGHTS: total, **_state_parts((*artifact.states(), *artifact.snapshots()))}
        return (MemoryParts("host", parts | ({SCRATCH: arena} if arena else {})),), ()
    kept = _state_parts(_rank_states(artifact))
    scratch: dict[str, int] = {}
    capacity: int | None = None
    notes: tuple[str, ...] = ()
    if artifact.target in NEURON_TARGETS:
        scratch, capacity, notes = _estimate_rest(artifact)
    ranks = {}
    for index, (name, size) in enumerate(weights):
        digits = "".join(letter for letter in name if letter.isdigit())
        ranks[int(digits) if len(weights) > 1 and digits else index] = size
    return tuple(
        MemoryParts(f"core {rank}", {WEIGHTS: ranks[rank], **kept, **scratch}, tuple(scratch), capacity)
        for rank in sorted(ranks)
    ), notes


def _state_parts(states: Iterable[TensorSpec]) -> dict[str, int]:
    by_part: dict[str, list[TensorSpec]] = {CACHE: [], STATE: [], SNAPSHOTS: []}
    for state in states:
        is_snapshot = state.name.startswith(_SNAPSHOT_PREFIX)
        by_part[SNAPSHOTS if is_snapshot else CACHE if state.name.startswith(BY_TOKEN) else STATE].append(state)
    return {part: size for part, members in by_part.items() if (size := byte_count(members))}


def _rank_states(artifact: Artifact) -> list[TensorSpec]:
    """Return the states that graphs update in place: all ranks run the same module, on states of the same shapes."""
    from ...targets.neuron.graphs.io import HLO_SUFFIX, read_graph_io

    found = {}
    for name in artifact.manifest["files"]:
        if is_graph_file(name) and name.endswith(HLO_SUFFIX):
            for each in read_graph_io(artifact.path / name).inputs:
                if each.role == "state":
                    found[each.name] = TensorSpec(each.name, each.shape, each.dtype)
    return list(found.values())


def _estimate_rest(artifact: Artifact) -> tuple[dict[str, int], int | None, tuple[str, ...]]:
    """Return scratch memory and reserve of a core, its device memory, and the reason why they are not known."""
    from ..estimate.estimate import estimate_model

    try:
        report = estimate_model(
            str(artifact.path), {}, [artifact.target], tensor_parallel_size=artifact.config.tensor_parallel_size
        )
    except (ValueError, RuntimeError, OSError) as error:
        return {}, None, (f"Scratch memory is not estimated: {first_line(error)}.",)
    one = report.estimates[0]
    return {SCRATCH: one.memory.activations, RESERVE: one.memory.reserve}, one.hbm, ()
