# SPDX-License-Identifier: Apache-2.0
"""The facts of an artifact, from its files. Digests of all files but the weights are compared before any is read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from ...artifact.artifact import GRAPHS_FOLDER, MANIFEST_NAME, Artifact, ArtifactError, is_graph_file, is_weight_file
from ...artifact.measurements import Measurements, identity, read_measurements
from ...artifact.quantization import read_formats
from ...artifact.schema import read_object
from ...artifact.tensor_file import stored_tensors
from ...export.export_command import adapters, export_command, named
from ...step.spec import GraphSpec
from ...step.state_sizes import StateSizes, byte_count
from ..certify import is_certified
from .facts import ArtifactFacts, Certified, GraphFacts, Quantized
from .memory import collect_memory
from .operators import CountedGraphs, count_operators


HELPER = "helper"


def collect_facts(artifact: Artifact, measured: Measurements | None = None) -> ArtifactFacts:
    """Return all facts of an artifact.

    Args:
        measured: speeds and quality in place of those that are recorded in its folder.

    Raises:
        ArtifactError: a file was changed after the export, or is malformed, or measurements are of another artifact.
    """
    artifact.verify()
    counted = count_operators(artifact)
    memory, notes = collect_memory(artifact, counted.arena)
    recorded = measured or read_measurements(artifact) or Measurements(identity(artifact))
    manifest, config = artifact.manifest, artifact.config
    name = artifact.path.resolve().name
    return ArtifactFacts(
        name=name,
        target=artifact.target,
        options=config.to_dict(),
        command=export_command(manifest, config, f"{name}/"),
        source=named(manifest.get("source", "")),
        origin=manifest.get("origin", {}),
        adapters=tuple(adapters(manifest)),
        model_type=_read_model_type(artifact),
        layers=artifact.model.depth,
        vocab_size=artifact.model.vocab_size,
        graphs=_collect_graphs(artifact, counted),
        sizes=_file_sizes(artifact),
        memory=memory,
        weight_types=_weight_types(artifact),
        quantized=_quantized_weights(artifact),
        certificate=_read_certificate(artifact),
        lint=counted.lint,
        exported_with=dict(manifest["versions"]),
        compiled_with=dict(manifest["target_data"].get("versions", {})),
        speeds=tuple(recorded.speeds),
        quality=tuple(recorded.quality),
        machine=recorded.machine,
        notes=notes,
    )


def _read_model_type(artifact: Artifact) -> str:
    path = artifact.path / "config.json"
    try:
        found = read_object(path).get("model_type")
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export the model again") from error
    return found if isinstance(found, str) and found.isprintable() else "unknown"


def _file_sizes(artifact: Artifact) -> dict[str, int]:
    files = artifact.manifest["files"].items()
    kept = StateSizes.of(artifact.states())
    return {
        "weights": sum(entry["size"] for name, entry in files if is_weight_file(name)),
        "graphs": sum(entry["size"] for name, entry in files if is_graph_file(name)),
        "files": sum(entry["size"] for _, entry in files),
        "cache and state": byte_count(artifact.states()),
        "cache per token": kept.per_token,
        "state per slot": kept.per_slot,
        "snapshots": byte_count(artifact.snapshots()),
    }


def _collect_graphs(artifact: Artifact, counted: CountedGraphs) -> tuple[GraphFacts, ...]:
    """Return steps, and after them the graphs that are none."""
    steps = {spec.name: spec for spec in artifact.graphs}
    helpers = sorted(counted.operators.keys() - steps.keys())
    return tuple(_graph_facts(artifact, counted, name, steps.get(name)) for name in (*steps, *helpers))


def _graph_facts(artifact: Artifact, counted: CountedGraphs, name: str, spec: GraphSpec | None) -> GraphFacts:
    files = artifact.manifest["files"].items()
    size = sum(entry["size"] for file, entry in files if file.startswith(f"{GRAPHS_FOLDER}/{name}."))
    operators, cost = counted.operators.get(name, {}), counted.costs.get(name, {})
    if spec is None:
        return GraphFacts(name, HELPER, 0, 0, 0, 0, size, None, operators, cost)
    smaller = [chunk for chunk in artifact.config.chunk_sizes if chunk < spec.chunk_size]
    return GraphFacts(
        name=name,
        kind=spec.kind,
        decode_rows=spec.batch_size if spec.has_decode else 0,
        chunk_rows=spec.ctx_batch_size if spec.has_chunk else 0,
        chunk_size=spec.chunk_size if spec.has_chunk else 0,
        context=spec.context_length,
        bytes=size,
        padding=1 - (max(smaller, default=0) + 1) / spec.chunk_size if spec.has_chunk else None,
        operators=operators,
        cost=cost,
    )


def _weight_types(artifact: Artifact) -> dict[str, int]:
    """Return bytes by torch's name of the type, from the heads of the files of weights."""
    found: Counter[str] = Counter()
    for name in filter(is_weight_file, artifact.manifest["files"]):
        for tensor in stored_tensors(artifact.path / name).values():
            found[str(tensor.dtype).removeprefix("torch.")] += tensor.stop - tensor.start
    return dict(found.most_common())


def _quantized_weights(artifact: Artifact) -> tuple[Quantized, ...]:
    alike: dict[Any, list[str]] = {}
    for name, each in read_formats(artifact.path).items():
        alike.setdefault(each, []).append(name)
    return tuple(
        Quantized(form.kind, form.groups, form.scale, form.has_shift, form.activations, len(names), names[0])
        for form, names in sorted(alike.items(), key=lambda item: -len(item[1]))
    )


def _read_certificate(artifact: Artifact) -> Certified | None:
    if not is_certified(artifact):
        return None
    from ..certify.document import Certificate  # needs protobuf

    found = vars(Certificate.read(artifact.path))
    return Certified(**{name: found[name] for name in Certified.__dataclass_fields__})


def check_output(artifact: Artifact, path: Path) -> None:
    """Refuse to write a file that is the artifact's own, or would be taken for one.

    Raises:
        ValueError: it is.
        IsADirectoryError: it is a folder.
    """
    folder, real = artifact.path.resolve(), path.expanduser().resolve()
    if real.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file")
    if not real.is_relative_to(folder):
        return
    name = real.relative_to(folder).as_posix()
    if name in artifact.manifest["files"] or name == MANIFEST_NAME or is_graph_file(name) or is_weight_file(name):
        raise ValueError(f"{path} is, or would be, a file of the artifact itself; name another file")
