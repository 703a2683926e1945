# SPDX-License-Identifier: Apache-2.0
"""measurements.json: measured speeds of an artifact. The file is none of the artifact's own, and nothing is loaded by it.

    {"version": 2,
     "artifact": sha256 of the measured artifact: `identity`,
     "speeds": [{"name": "decode", "value": 12.5, "unit": "ms", "conditions": {"rows": 8, "context": 512}}, ...],
     "machine": {"cpu": "...", "threads": 2}}

A re-export leaves foreign files in the folder, so the file names the weights, graphs and sizes of its numbers.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..artifact.artifact import Artifact, ArtifactError
from ..artifact.filesystem import replace_file
from ..artifact.schema import TEXT, Check, listed, named, number, read_object, record, whole


MEASUREMENTS_NAME = "measurements.json"
VERSION = 2


def _check_scalar(name: str, value: object) -> None:
    if isinstance(value, str):
        TEXT(name, value)
    elif value is not None and not isinstance(value, bool):
        number()(name, value)


_SPEED = record({"name": TEXT, "value": number(0), "unit": TEXT}, {"conditions": named(_check_scalar)}, closed=True)
_MACHINE = {"machine": named(_check_scalar)}
_OWN = {"version": whole(VERSION, VERSION), "artifact": TEXT, "speeds": listed(_SPEED)}
_DOCUMENT = record(_OWN, _MACHINE, closed=True)
_BENCH = record({"speeds": listed(_SPEED)}, _MACHINE | {"artifact": TEXT})
_SPREAD = record({"median": number(0)})
_RUN = record(
    {
        "config": record({}),
        "prefill": listed(record({"prompt_tokens": whole(1), "ttft_ms": _SPREAD, "tokens_per_second": _SPREAD})),
        "decode": listed(
            record({"rows": whole(1), "context_tokens": whole(0), "step_ms": _SPREAD, "tokens_per_second": number(0)})
        ),
    },
    _MACHINE,
)


@dataclass(frozen=True)
class Measurements:
    """Measurements of the artifact with an `identity`: records of speeds, and their machine."""

    artifact: str
    speeds: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replace the folder's file, whole or not at all."""
        document = json.dumps({"version": VERSION, **asdict(self)}, indent=2, allow_nan=False)
        replace_file(folder / MEASUREMENTS_NAME, document + "\n")


def identity(artifact: Artifact) -> str:
    """Return a digest of all causes of speeds: the sizes, the target, and the digests of weights, graphs and config."""
    files = artifact.manifest["files"]
    of = {name: entry["sha256"] for name, entry in files.items() if "/" in name or name == "config.json"}
    document = json.dumps(
        {"config": artifact.config.to_dict(), "target": artifact.target, "files": of}, sort_keys=True
    )
    return hashlib.sha256(document.encode()).hexdigest()


def read_measurements(artifact: Artifact) -> Measurements | None:
    """Return the measurements in an artifact's folder, or None; raise ArtifactError for another file, or those of another artifact."""
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
    """Replace the speeds by the medians of `neuron bench --json`, or by any other program's `speeds` and `machine` as above.

    Raises:
        ValueError: the file is none of these, or belongs to another artifact.
        FileNotFoundError: it is not there.
    """
    document = _read_document(path)
    if "prefill" in document:
        _check_document(_RUN, document, path)
        if document["config"] != artifact.config.to_dict():
            raise ValueError(f"{path} was measured with other sizes than {artifact.path} has; measure this one")
        speeds = _read_medians(document)
    else:
        _check_document(_BENCH, document, path)
        if document.get("artifact") not in (None, identity(artifact)):
            raise ValueError(f"{path} was measured of another artifact than {artifact.path}; measure this one")
        speeds = document["speeds"]
    if not speeds:
        raise ValueError(f"{path} holds no speeds; measure {artifact.path} again")
    return replace(measured, speeds=speeds, machine=document.get("machine", {}))


def _read_medians(document: dict[str, Any]) -> list[dict[str, Any]]:
    prompts = [({"prompt": each["prompt_tokens"]}, each) for each in document["prefill"]]
    rows = [({"rows": each["rows"], "context": each["context_tokens"]}, each) for each in document["decode"]]
    found = [
        *(("prefill", each["tokens_per_second"]["median"], "tokens/s", given) for given, each in prompts),
        *(("decode", each["tokens_per_second"], "tokens/s", given) for given, each in rows),
        *(("first token", each["ttft_ms"]["median"], "ms", given) for given, each in prompts),
        *(("decode step", each["step_ms"]["median"], "ms", given) for given, each in rows),
    ]
    return [dict(zip(("name", "value", "unit", "conditions"), each, strict=True)) for each in found]


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
