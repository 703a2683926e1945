# SPDX-License-Identifier: Apache-2.0
"""measurements.json: measured speeds and quality of an artifact. The file is none of the artifact's own, and nothing is loaded by it.

    {"version": 1,
     "artifact": sha256 of the measured artifact: `identity`,
     "speeds": [{"name": "decode", "value": 12.5, "unit": "ms", "conditions": {"rows": 8, "context": 512}}, ...],
     "quality": [{"perplexity": ..., "reference_perplexity": ..., "kl_mean": ..., ...}, ...],
     "machine": {"cpu": "...", "threads": 2}}

A re-export leaves foreign files in the folder, so the file names the weights, graphs and sizes of its numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..artifact.artifact import Artifact, ArtifactError, is_weight_file
from ..artifact.filesystem import replace_file
from ..artifact.schema import TEXT, Check, listed, named, number, read_object, record, text, whole


MEASUREMENTS_NAME = "measurements.json"
VERSION = 1
_LARGEST_SIZE = 2**63 - 1


def _check_scalar(name: str, value: object) -> None:
    if isinstance(value, str):
        TEXT(name, value)
    elif value is not None and not isinstance(value, bool):
        number()(name, value)


_SPEED = record({"name": TEXT, "value": number(0), "unit": TEXT}, {"conditions": named(_check_scalar)}, closed=True)
_QUALITY = record(
    {
        **dict.fromkeys(("perplexity", "reference_perplexity", "kl_mean", "kl_p99", "kl_max", "top1"), number(0)),
        **dict.fromkeys(("reference", "text", "text_sha256"), TEXT),
        "tokens": whole(1),
    },
    {
        **dict.fromkeys(("name", "dtype"), TEXT),
        "weight_bytes": whole(0, _LARGEST_SIZE),
        "weights_sha256": text("[0-9a-f]{64}"),
        **dict.fromkeys(("activations", "kv_cache_dtype"), _check_scalar),
    },
    closed=True,
)
_DOCUMENT = record(
    {"version": whole(1, VERSION), "artifact": TEXT, "speeds": listed(_SPEED), "quality": listed(_QUALITY)},
    {"machine": named(_check_scalar)},
    closed=True,
)
_BENCH = record({"speeds": listed(_SPEED)}, {"machine": named(_check_scalar), "artifact": TEXT})
_SPREAD = record({"median": number(0)})
_RUN = record(
    {
        "config": record({}),
        "prefill": listed(record({"prompt_tokens": whole(1), "ttft_ms": _SPREAD, "tokens_per_second": _SPREAD})),
        "decode": listed(
            record({"rows": whole(1), "context_tokens": whole(0), "step_ms": _SPREAD, "tokens_per_second": number(0)})
        ),
    },
    {"machine": named(_check_scalar)},
)
_CHECK = record({"facts": record({}), "results": listed(record({"name": TEXT, "status": TEXT, "values": record({})}))})
_VARIANTS = record(
    {"variants": listed(record({"name": TEXT, "dtype": TEXT, "weight_bytes": whole(0, _LARGEST_SIZE)}))}
)


@dataclass(frozen=True)
class Measurements:
    """Measurements of one artifact.

    Attributes:
        artifact: its `identity`.
        speeds: a record each, with `name`, `value`, `unit` and `conditions`.
        quality: records of figures with those of a reference, on a text.
        machine: the machine of the speeds.
    """

    artifact: str
    speeds: list[dict[str, Any]] = field(default_factory=list)
    quality: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replace the folder's file, whole or not at all."""
        document = json.dumps({"version": VERSION, **asdict(self)}, indent=2, allow_nan=False)
        replace_file(folder / MEASUREMENTS_NAME, document + "\n")


def identity(artifact: Artifact) -> str:
    """Return a digest of all causes of speeds and quality: the sizes, the target, and the digests of weights, graphs and config."""
    files = artifact.manifest["files"]
    of = {name: entry["sha256"] for name, entry in files.items() if "/" in name or name == "config.json"}
    document = json.dumps(
        {"config": artifact.config.to_dict(), "target": artifact.target, "files": of}, sort_keys=True
    )
    return hashlib.sha256(document.encode()).hexdigest()


def quality_follows_from(artifact: Artifact) -> dict[str, Any]:
    """Return the causes of an artifact's quality as JSON: type and weights, and the codes of activations, keys and values."""
    files = {name: entry for name, entry in artifact.manifest["files"].items() if is_weight_file(name)}
    digests = json.dumps({name: entry["sha256"] for name, entry in files.items()}, sort_keys=True)
    return {
        "dtype": artifact.config.dtype,
        "weight_bytes": sum(entry["size"] for entry in files.values()),
        "weights_sha256": hashlib.sha256(digests.encode()).hexdigest(),
        "activations": artifact.config.activations,
        "kv_cache_dtype": artifact.config.kv_cache_dtype,
    }


def read_measurements(artifact: Artifact) -> Measurements | None:
    """Return the measurements in an artifact's folder; None where there are none.

    Raises:
        ArtifactError: the file is none of these, or belongs to another artifact.
    """
    path = artifact.path / MEASUREMENTS_NAME
    if not path.is_file():
        return None
    try:
        document = read_object(path)
        _DOCUMENT("it", document)
    except ValueError as error:
        raise ArtifactError(f"{path} cannot be read: {error}; remove it, and record measurements again") from error
    if document["artifact"] != identity(artifact):
        raise ArtifactError(
            f"{path} was measured of another artifact ({document['artifact'][:12]}…, and this one is "
            f"{identity(artifact)[:12]}…); remove it, and measure this one"
        )
    return Measurements(**{name: value for name, value in document.items() if name != "version"})


def with_bench(measured: Measurements, path: Path, artifact: Artifact) -> Measurements:
    """Replace the speeds by those of a file.

    Args:
        path: the medians of `neuron bench --json`, the latencies of `neuron check --json`, or any other program's `speeds` and `machine` as
            above.

    Raises:
        ValueError: it is none of these, or belongs to another artifact.
        FileNotFoundError: it is not there.
    """
    document = _read_document(path)
    if "results" in document:
        _check_document(_CHECK, document, path)
        speeds, machine = _read_latencies(document, path, artifact), {}
    elif "prefill" in document:
        _check_document(_RUN, document, path)
        _check_config(document.get("config"), path, artifact)
        speeds, machine = _read_medians(document), document.get("machine", {})
    else:
        _check_document(_BENCH, document, path)
        if document.get("artifact") not in (None, identity(artifact)):
            raise ValueError(f"{path} was measured of another artifact than {artifact.path}; measure this one")
        speeds, machine = document["speeds"], document.get("machine", {})
    if not speeds:
        raise ValueError(f"{path} holds no speeds; measure {artifact.path} again")
    return replace(measured, speeds=speeds, machine=machine)


def with_quality(measured: Measurements, path: Path, artifact: Artifact) -> Measurements:
    """Replace the figures by those of a file.

    The artifact's variant there is the one with its very weights, and its codes of activations, keys and values.

    Raises:
        ValueError: the file is none, or has no such variant.
        FileNotFoundError: it is not there.
    """
    document = _read_document(path)
    _check_document(_VARIANTS, document, path)
    own = quality_follows_from(artifact)
    found = [each for each in document["variants"] if {name: each.get(name) for name in own} == own]
    if not found:
        there = ", ".join(
            f"{each['name']} ({each['dtype']}, {each['weight_bytes']:,} bytes)" for each in document["variants"]
        )
        raise ValueError(
            f"{path} has no variant with the weights of {artifact.path} ({own['dtype']}, {own['weight_bytes']:,} bytes, sha256 "
            f"{own['weights_sha256'][:12]}…, activations={own['activations']!r}, kv_cache_dtype={own['kv_cache_dtype']!r}), but {there or 'none'}; measure this artifact"
        )
    _check_document(_QUALITY, found[0], path)
    name = found[0]["name"].rstrip("/").rpartition("/")[2]  # the record names no folder
    return replace(measured, quality=[found[0] | {"name": name}])


def _check_config(config: object, path: Path, artifact: Artifact) -> None:
    if config != artifact.config.to_dict():
        raise ValueError(f"{path} was measured with other sizes than {artifact.path} has; measure this one")


def _read_medians(document: dict[str, Any]) -> list[dict[str, Any]]:
    speeds = []

    def add(name: str, value: float, unit: str, **conditions: int) -> None:
        speeds.append({"name": name, "value": value, "unit": unit, "conditions": conditions})

    for each in document["prefill"]:
        add("prefill", each["tokens_per_second"]["median"], "tokens/s", prompt=each["prompt_tokens"])
    for each in document["decode"]:
        add("decode", each["tokens_per_second"], "tokens/s", rows=each["rows"], context=each["context_tokens"])
    for each in document["prefill"]:
        add("first token", each["ttft_ms"]["median"], "ms", prompt=each["prompt_tokens"])
    for each in document["decode"]:
        add("decode step", each["step_ms"]["median"], "ms", rows=each["rows"], context=each["context_tokens"])
    return speeds


def _read_latencies(document: dict[str, Any], path: Path, artifact: Artifact) -> list[dict[str, Any]]:
    _check_config(document["facts"].get("config"), path, artifact)
    values = [
        each["values"] for each in document["results"] if (each["name"], each["status"]) == ("latency", "passed")
    ]
    speeds = [
        {"name": name.removesuffix(" ms"), "value": value, "unit": "ms", "conditions": {}}
        for name, value in (values[0] if values else {}).items()
    ]
    for each in speeds:
        _check_document(_SPEED, each, path)
    return speeds


def _read_document(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; measure again") from error


def _check_document(check: Check, document: object, path: Path) -> None:
    try:
        check("it", document)
    except ValueError as error:
        raise ValueError(f"{path} holds no such measurements: {error}; measure again") from error
