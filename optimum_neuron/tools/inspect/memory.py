# SPDX-License-Identifier: Apache-2.0
"""What of memory each core takes for an artifact, or the host where nothing is shared: weights, what slots keep, and scratch."""

from __future__ import annotations

from collections.abc import Iterable

from ...artifact.artifact import Artifact, is_graph_file, is_weight_file
from ...config import HLO_TARGETS, NEURON_TARGETS
from ...errors import first_line
from ...step.spec import TensorSpec
from ...step.state_sizes import BY_TOKEN, byte_count
from .facts import Memory


WEIGHTS, CACHE, STATE = "weights", "KV cache", "state of slots"
SNAPSHOTS, SCRATCH, RESERVE = "snapshots", "scratch", "reserve"
_SNAPSHOT_PREFIX = "snapshots."


def memory_of(artifact: Artifact, arena: int) -> tuple[tuple[Memory, ...], tuple[str, ...]]:
    """The memory of each core in order, and sentences about what could not be told.

    Of a device, scratch memory and the runtime's reserve are estimated, as `optimum-cli neuron estimate` does.

    Args:
        arena: bytes of scratch memory that plans take on the host.
    """
    weights = [entry["size"] for name, entry in sorted(artifact.manifest["files"].items()) if is_weight_file(name)]
    if artifact.target not in HLO_TARGETS:
        parts = {WEIGHTS: sum(weights), **_kept((*artifact.states(), *artifact.snapshots()))}
        return (Memory("host", parts | ({SCRATCH: arena} if arena else {})),), ()
    kept = _kept(_states_of_a_rank(artifact))
    scratch: dict[str, int] = {}
    capacity: int | None = None
    notes: tuple[str, ...] = ()
    if artifact.target in NEURON_TARGETS:
        scratch, capacity, notes = _estimated(artifact)
    order = sorted(zip(_ranks(artifact), weights, strict=True))
    return tuple(
        Memory(f"core {rank}", {WEIGHTS: size, **kept, **scratch}, tuple(scratch), capacity) for rank, size in order
    ), notes


def _ranks(artifact: Artifact) -> list[int]:
    """The rank of each file of weights, in the order of their names."""
    names = sorted(name for name in artifact.manifest["files"] if is_weight_file(name))
    digits = ["".join(letter for letter in name if letter.isdigit()) for name in names]
    return [int(each) if len(names) > 1 and each else index for index, each in enumerate(digits)]


def _kept(states: Iterable[TensorSpec]) -> dict[str, int]:
    by_part: dict[str, list[TensorSpec]] = {CACHE: [], STATE: [], SNAPSHOTS: []}
    for state in states:
        is_snapshot = state.name.startswith(_SNAPSHOT_PREFIX)
        by_part[SNAPSHOTS if is_snapshot else CACHE if state.name.startswith(BY_TOKEN) else STATE].append(state)
    return {part: size for part, members in by_part.items() if (size := byte_count(members))}


def _states_of_a_rank(artifact: Artifact) -> list[TensorSpec]:
    """What graphs update in place: all ranks run the same module, on states of the same shapes."""
    from ...targets.neuron.graph_files import HLO_SUFFIX, read_graph_io

    found = {}
    for name in artifact.manifest["files"]:
        if is_graph_file(name) and name.endswith(HLO_SUFFIX):
            for each in read_graph_io(artifact.path / name).inputs:
                if each.role == "state":
                    found[each.name] = TensorSpec(each.name, each.shape, each.dtype)
    return list(found.values())


def _estimated(artifact: Artifact) -> tuple[dict[str, int], int | None, tuple[str, ...]]:
    """Scratch memory and reserve of a core, its device memory, and why they are not known."""
    from ..estimate.estimate import estimate_model

    try:
        report = estimate_model(
            str(artifact.path), {}, [artifact.target], tensor_parallel_size=artifact.config.tensor_parallel_size
        )
    except (ValueError, RuntimeError, OSError) as error:
        return {}, None, (f"Scratch memory is not estimated: {first_line(error)}.",)
    one = report.estimates[0]
    return {SCRATCH: one.memory.activations, RESERVE: one.memory.reserve}, one.hbm, ()
