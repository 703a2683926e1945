# SPDX-License-Identifier: Apache-2.0
"""The facts of an artifact, read from its files. No graph is parsed, and nothing is loaded."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..artifact.artifact import GRAPHS_FOLDER, Artifact, ArtifactError, is_graph_file, is_weight_file
from ..artifact.schema import TEXT, listed, named, number, read_object, record, text, whole
from ..export.first_use import adapter_names, export_command, printable_name
from ..step.spec import GraphSpec
from ..step.state_specs import StateSizes, byte_count
from .facts import ArtifactFacts, Certified, Compared, GraphFacts, Linted, Quantized
from .measurements import Measurements, identity, read_measurements


CERTIFICATE_NAME = "certificate.json"
_COMPARISON = record(
    dict.fromkeys(("subject", "dtype", "place"), TEXT)
    | dict.fromkeys(("difference", "bound"), number(0))
    | {"count": whole(0, 2**63 - 1)}
)
_CERTIFICATE = record(
    {
        "graphs": named(text("[0-9a-f]{64}")),
        "rules": record({"version": whole(1), "passed": listed(TEXT)}),
        "executed": record({"layers": whole(1), "all_layers": whole(1)}),
        "steps": record({"count": whole(1), "tokens": whole(1)}),
        "comparisons": listed(_COMPARISON),
    }
)


def read_facts(artifact: Artifact, measured: Measurements | None = None) -> ArtifactFacts:
    """Return the facts of an artifact, with `measured` in the place of the speeds that its folder records.

    Raise ArtifactError where a file but the weights was changed after the export, or measurements belong to another artifact.
    """
    artifact.verify()
    manifest, config, name = artifact.manifest, artifact.config, artifact.path.resolve().name
    measured = measured or read_measurements(artifact) or Measurements(identity(artifact))
    try:
        model_type = read_object(artifact.path / "config.json").get("model_type")
    except ValueError as error:
        raise ArtifactError(f"{artifact.path / 'config.json'} cannot be read: {error}; export it again") from error
    return ArtifactFacts(
        name=name,
        target=artifact.target,
        options=config.to_dict(),
        command=export_command(manifest, config, f"{name}/"),
        source=printable_name(manifest.get("source", "")),
        origin=manifest.get("origin", {}),
        adapters=tuple(adapter_names(manifest)),
        model_type=model_type if isinstance(model_type, str) and model_type.isprintable() else "unknown",
        layers=artifact.model.depth,
        vocab_size=artifact.model.vocab_size,
        graphs=tuple(graph_facts(artifact, spec) for spec in artifact.graphs),
        sizes=_file_sizes(artifact),
        memory=(),
        weight_types=_weight_types(artifact),
        quantized=_quantized_weights(artifact),
        certificate=read_certificate(artifact),
        lint=Linted(missing="it was not run"),
        exported_with=dict(manifest["versions"]),
        compiled_with=dict(manifest["target_data"].get("versions", {})),
        speeds=tuple(measured.speeds),
        machine=measured.machine,
        notes=(),
    )


def _file_sizes(artifact: Artifact) -> dict[str, int]:
    files = artifact.manifest["files"].items()
    kept = StateSizes.measure(artifact.states())
    return {
        "weights": sum(entry["size"] for name, entry in files if is_weight_file(name)),
        "graphs": sum(entry["size"] for name, entry in files if is_graph_file(name)),
        "files": sum(entry["size"] for _, entry in files),
        "cache and state": byte_count(artifact.states()),
        "cache per token": kept.per_token,
        "state per slot": kept.per_slot,
        "snapshots": byte_count(artifact.snapshots()),
    }


def graph_facts(artifact: Artifact, spec: GraphSpec) -> GraphFacts:
    smaller = [size for size in artifact.config.chunk_sizes if size < spec.chunk_size]
    return GraphFacts(
        name=spec.name,
        kind=spec.kind,
        decode_rows=spec.batch_size if spec.has_decode else 0,
        chunk_rows=spec.ctx_batch_size if spec.has_chunk else 0,
        chunk_size=spec.chunk_size if spec.has_chunk else 0,
        context=spec.context_length,
        bytes=graph_bytes(artifact, spec.name),
        padding=1 - (max(smaller, default=0) + 1) / spec.chunk_size if spec.has_chunk else None,
    )


def graph_bytes(artifact: Artifact, graph: str) -> int:
    files = artifact.manifest["files"].items()
    return sum(entry["size"] for name, entry in files if name.startswith(f"{GRAPHS_FOLDER}/{graph}."))


def _weight_types(artifact: Artifact) -> dict[str, int]:
    """Return bytes by torch's name of the type, from the headers of the files of weights."""
    from ..artifact.tensor_file import stored_tensors

    found: Counter[str] = Counter()
    for name in filter(is_weight_file, artifact.manifest["files"]):
        for tensor in stored_tensors(artifact.path / name).values():
            found[str(tensor.dtype).removeprefix("torch.")] += tensor.stop - tensor.start
    return dict(found.most_common())


def _quantized_weights(artifact: Artifact) -> tuple[Quantized, ...]:
    from ..artifact.quantization import read_formats

    alike: dict[Any, list[str]] = {}
    for name, each in read_formats(artifact.path).items():
        alike.setdefault(each, []).append(name)
    return tuple(
        Quantized(form.kind, form.groups, form.scale, form.has_shift, form.activations, len(names), names[0])
        for form, names in sorted(alike.items(), key=lambda item: -len(item[1]))
    )


def read_certificate(artifact: Artifact) -> Certified | None:
    """Return what an export with --certify recorded; None without it. Raise ArtifactError where it is malformed."""
    if CERTIFICATE_NAME not in artifact.manifest["files"]:
        return None
    path = artifact.path / CERTIFICATE_NAME
    try:
        document = read_object(path)
        _CERTIFICATE("it", document)
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; export it again") from error
    rules, executed, steps = document["rules"], document["executed"], document["steps"]
    fields = ("subject", "dtype", "place", "difference", "bound", "count")
    return Certified(
        layers=executed["layers"],
        all_layers=executed["all_layers"],
        steps=steps["count"],
        tokens=steps["tokens"],
        rules=tuple(rules["passed"]),
        rules_version=rules["version"],
        comparisons=tuple(Compared(*(each[name] for name in fields)) for each in document["comparisons"]),
        graphs=document["graphs"],
    )
