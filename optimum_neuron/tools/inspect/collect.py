# SPDX-License-Identifier: Apache-2.0
"""Collects what is told of an artifact. Digests of all files but the weights are compared before any is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...artifact.artifact import GRAPHS_FOLDER, MANIFEST_NAME, Artifact, ArtifactError, is_graph_file, is_weight_file
from ...artifact.measurements import Measurements, identity, read_measurements
from ...artifact.schema import read_object
from ...export.export_command import adapters, export_command, named
from ...step.spec import GraphSpec
from ...step.state_sizes import StateSizes, byte_count
from ..certify import is_certified
from .facts import Certified, Compared, Facts, Graph, Linted, Quantized
from .memory import memory_of
from .operators import Counted, count_operators


HELPER = "helper"


def collect(artifact: Artifact, measured: Measurements | None = None) -> Facts:
    """All that is told of an artifact.

    Args:
        measured: speeds and quality in the place of those that are recorded in its folder.

    Raises:
        ArtifactError: a file was changed after the export, is no such file, or measurements are of another artifact.
    """
    artifact.verify()
    counted = count_operators(artifact)
    memory, notes = memory_of(artifact, counted.arena)
    recorded = measured or read_measurements(artifact) or Measurements(identity(artifact))
    return replace(
        outline(artifact),
        graphs=_graphs(artifact, counted),
        memory=memory,
        weight_types=_weight_types(artifact),
        quantized=_quantized(artifact),
        certificate=_certificate(artifact),
        lint=counted.lint,
        speeds=tuple(recorded.speeds),
        quality=tuple(recorded.quality),
        machine=recorded.machine,
        notes=notes,
    )


def outline(artifact: Artifact) -> Facts:
    """What the manifest tells by itself; no other file is read, and torch is not imported."""
    manifest, config = artifact.manifest, artifact.config
    name = artifact.path.resolve().name
    return Facts(
        name=name,
        target=artifact.target,
        options=config.to_dict(),
        command=export_command(manifest, config, f"{name}/"),
        source=named(manifest.get("source", "")),
        origin=manifest.get("origin", {}),
        adapters=tuple(adapters(manifest)),
        model_type=_model_type(artifact),
        layers=artifact.model.depth,
        vocab_size=artifact.model.vocab_size,
        graphs=tuple(_graph(artifact, spec) for spec in artifact.graphs),
        sizes=_sizes(artifact),
        memory=(),
        weight_types={},
        quantized=(),
        certificate=None,
        lint=Linted(missing="it was not run"),
        exported_with=dict(manifest["versions"]),
        compiled_with=dict(manifest["target_data"].get("versions", {})),
        speeds=(),
        quality=(),
        machine={},
        notes=(),
    )


def _model_type(artifact: Artifact) -> str:
    try:
        found = read_object(artifact.path / "config.json").get("model_type")
    except ValueError as error:
        raise ArtifactError(
            f"{artifact.path / 'config.json'} cannot be read: {error}; export the model again"
        ) from error
    return found if isinstance(found, str) and found.isprintable() else "unknown"


def _sizes(artifact: Artifact) -> dict[str, int]:
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


def _graph(artifact: Artifact, spec: GraphSpec) -> Graph:
    smaller = [size for size in artifact.config.chunk_sizes if size < spec.chunk_size]
    padding = 1 - (max(smaller, default=0) + 1) / spec.chunk_size if spec.has_chunk else None
    return Graph(
        name=spec.name,
        kind=spec.kind,
        decode_rows=spec.batch_size if spec.has_decode else 0,
        chunk_rows=spec.ctx_batch_size if spec.has_chunk else 0,
        chunk_size=spec.chunk_size if spec.has_chunk else 0,
        context=spec.context_length,
        bytes=_bytes_of(artifact, spec.name),
        padding=padding,
    )


def _bytes_of(artifact: Artifact, graph: str) -> int:
    files = artifact.manifest["files"].items()
    return sum(entry["size"] for name, entry in files if name.startswith(f"{GRAPHS_FOLDER}/{graph}."))


def _graphs(artifact: Artifact, counted: Counted) -> tuple[Graph, ...]:
    """Steps, and behind them the graphs that are none."""
    steps = [_graph(artifact, spec) for spec in artifact.graphs]
    others = sorted(counted.operators.keys() - {each.name for each in steps})
    helpers = [Graph(name, HELPER, 0, 0, 0, 0, _bytes_of(artifact, name), None) for name in others]
    return tuple(
        replace(each, operators=counted.operators.get(each.name, {}), cost=counted.costs.get(each.name, {}))
        for each in (*steps, *helpers)
    )


def _weight_types(artifact: Artifact) -> dict[str, int]:
    """Bytes by torch's name of the type, told by the heads of the files of weights."""
    from ...artifact.tensor_file import stored_tensors

    found: Counter[str] = Counter()
    for name in filter(is_weight_file, artifact.manifest["files"]):
        for tensor in stored_tensors(artifact.path / name).values():
            found[str(tensor.dtype).removeprefix("torch.")] += tensor.stop - tensor.start
    return dict(found.most_common())


def _quantized(artifact: Artifact) -> tuple[Quantized, ...]:
    from ...artifact.quantization import read_formats

    alike: dict[Any, list[str]] = {}
    for name, each in read_formats(artifact.path).items():
        alike.setdefault(each, []).append(name)
    return tuple(
        Quantized(form.kind, form.groups, form.scale, form.has_shift, form.activations, len(names), names[0])
        for form, names in sorted(alike.items(), key=lambda item: -len(item[1]))
    )


def _certificate(artifact: Artifact) -> Certified | None:
    if not is_certified(artifact):
        return None
    from ..certify.document import Certificate

    found = Certificate.read(artifact.path)
    return Certified(
        layers=found.layers,
        all_layers=found.all_layers,
        steps=found.steps,
        tokens=found.tokens,
        rules=found.rules,
        rules_version=found.rules_version,
        comparisons=tuple(
            Compared(each.subject, each.dtype, each.place, each.difference, each.bound, each.count)
            for each in found.comparisons
        ),
    )


def check_output(artifact: Artifact, path: Path) -> None:
    """Raises ValueError where a file may not be written because it is the artifact's own, or would be taken for one.

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
