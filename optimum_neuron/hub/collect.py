# SPDX-License-Identifier: Apache-2.0
"""The facts of an artifact, read from its files. No graph is parsed, and nothing is loaded."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from ..artifact.artifact import GRAPHS_FOLDER, Artifact, ArtifactError, is_graph_file, is_weight_file
from ..artifact.schema import TEXT, Check, anything, listed, named, number, read_object, record, text, whole
from ..export.first_use import adapter_names, export_command, printable_name
from ..step.spec import GraphSpec
from ..step.state_specs import StateSizes, byte_count, kept_state_specs
from .facts import ArtifactFacts, Certified, Compared, GraphFacts, Quantized


CERTIFICATE_NAME = "certificate.json"
# The document of `neuron bench --json`, which a user writes into the artifact's folder.
BENCH_NAME = "bench.json"
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
_SPREAD = record({"median": number(0)})
_PREFILL = record({"prompt_tokens": whole(1), "ttft_ms": _SPREAD, "tokens_per_second": _SPREAD})
_DECODE = record({"rows": whole(1), "context_tokens": whole(0), "step_ms": _SPREAD, "tokens_per_second": number(0)})
_BENCH = record({"digest": TEXT, "machine": named(anything), "prefill": listed(_PREFILL), "decode": listed(_DECODE)})


def read_facts(artifact: Artifact) -> ArtifactFacts:
    """Return the facts of an artifact, but for those that are counted in its graphs; raise ArtifactError for a changed file but the weights."""
    artifact.verify()
    manifest, config, name = artifact.manifest, artifact.config, artifact.path.resolve().name
    model_type = _read_document(artifact.path / "config.json", anything).get("model_type")
    speeds, machine = read_speeds(artifact)
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
        weight_types=_weight_types(artifact),
        quantized=_quantized_weights(artifact),
        certificate=read_certificate(artifact),
        exported_with=dict(manifest["versions"]),
        compiled_with=dict(manifest["target_data"].get("versions", {})),
        speeds=speeds,
        machine=machine,
    )


def _read_document(path: Path, check: Check, remedy: str = "export it again") -> dict[str, Any]:
    try:
        document = read_object(path)
        check("it", document)
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; {remedy}") from error
    return document


def speed_digest(artifact: Artifact) -> str:
    """Return a digest of all causes of speeds: the sizes, the target, and the digests of weights, graphs and config."""
    files = artifact.manifest["files"]
    causes = {name: entry["sha256"] for name, entry in files.items() if "/" in name or name == "config.json"}
    document = json.dumps([artifact.config.to_dict(), artifact.target, causes], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()


def read_speeds(artifact: Artifact) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """Return the medians in bench.json and their machine, empty without that file; raise ArtifactError for one of another artifact."""
    path, remedy = artifact.path / BENCH_NAME, "remove it, or write it again: optimum-cli neuron bench --json"
    if not path.is_file():
        return (), {}
    document = _read_document(path, _BENCH, remedy)
    if document["digest"] != speed_digest(artifact):
        raise ArtifactError(f"{path} was measured of another artifact than {artifact.path} is; {remedy}")
    prompts = [({"prompt": each["prompt_tokens"]}, each) for each in document["prefill"]]
    rows = [({"rows": each["rows"], "context": each["context_tokens"]}, each) for each in document["decode"]]
    found = [
        *(("prefill", each["tokens_per_second"]["median"], "tokens/s", given) for given, each in prompts),
        *(("decode", each["tokens_per_second"], "tokens/s", given) for given, each in rows),
        *(("first token", each["ttft_ms"]["median"], "ms", given) for given, each in prompts),
        *(("decode step", each["step_ms"]["median"], "ms", given) for given, each in rows),
    ]
    names = ("name", "value", "unit", "conditions")
    return tuple(dict(zip(names, each, strict=True)) for each in found), document["machine"]


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
        "copies of state": byte_count(kept_state_specs(artifact.config, artifact.model)),
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
    document = _read_document(artifact.path / CERTIFICATE_NAME, _CERTIFICATE)
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
