# SPDX-License-Identifier: Apache-2.0
"""measurements.json: speeds and quality that were measured of an artifact. Beside its files, and not one of them: nothing is loaded by it.

    {"version": 1,
     "artifact": sha256 of what was measured: `identity`,
     "speeds": [{"name": "decode", "value": 12.5, "unit": "ms", "conditions": {"rows": 8, "context": 512}}, ...],
     "quality": [{"perplexity": ..., "reference_perplexity": ..., "kl_mean": ..., ...}, ...],
     "machine": {"cpu": "...", "threads": 2}}

A re-export leaves what is not its own in the folder, so the file says of which weights, graphs and sizes its numbers are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .artifact import Artifact, ArtifactError, is_weight_file
from .filesystem import replace_file
from .schema import TEXT, Check, listed, named, number, read_object, record, text, whole


MEASUREMENTS_NAME = "measurements.json"
VERSION = 1
_LARGEST_SIZE = 2**63 - 1


def _scalar(name: str, value: object) -> None:
    if isinstance(value, str):
        TEXT(name, value)
    elif value is not None and not isinstance(value, bool):
        number()(name, value)


_SPEED = record({"name": TEXT, "value": number(0), "unit": TEXT}, {"conditions": named(_scalar)}, closed=True)
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
        **dict.fromkeys(("activations", "kv_cache_dtype"), _scalar),
    },
    closed=True,
)
_DOCUMENT = record(
    {"version": whole(1, VERSION), "artifact": TEXT, "speeds": listed(_SPEED), "quality": listed(_QUALITY)},
    {"machine": named(_scalar)},
    closed=True,
)
_BENCH = record({"speeds": listed(_SPEED)}, {"machine": named(_scalar), "artifact": TEXT})
_SPREAD = record({"median": number(0)})
_RUN = record(
    {
        "config": record({}),
        "prefill": listed(record({"prompt_tokens": whole(1), "ttft_ms": _SPREAD, "tokens_per_second": _SPREAD})),
        "decode": listed(
            record({"rows": whole(1), "context_tokens": whole(0), "step_ms": _SPREAD, "tokens_per_second": number(0)})
        ),
    },
    {"machine": named(_scalar)},
)
_CHECK = record({"facts": record({}), "results": listed(record({"name": TEXT, "status": TEXT, "values": record({})}))})
_VARIANTS = record(
    {"variants": listed(record({"name": TEXT, "dtype": TEXT, "weight_bytes": whole(0, _LARGEST_SIZE)}))}
)


@dataclass(frozen=True)
class Measurements:
    """What was measured of one artifact.

    Attributes:
        artifact: its `identity`.
        speeds: a record each, with `name`, `value`, `unit` and `conditions`.
        quality: records of figures next to those of a reference, on a text.
        machine: on which speeds were measured.
    """

    artifact: str
    speeds: list[dict[str, Any]] = field(default_factory=list)
    quality: list[dict[str, Any]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replaces the folder's file, whole or not at all."""
        document = json.dumps({"version": VERSION, **asdict(self)}, indent=2, allow_nan=False)
        replace_file(folder / MEASUREMENTS_NAME, document + "\n")


def identity(artifact: Artifact) -> str:
    """A digest of all that speeds and quality follow from: the sizes, the target, and the digests of weights, graphs and config."""
    files = artifact.manifest["files"]
    of = {name: entry["sha256"] for name, entry in files.items() if "/" in name or name == "config.json"}
    document = json.dumps(
        {"config": artifact.config.to_dict(), "target": artifact.target, "files": of}, sort_keys=True
    )
    return hashlib.sha256(document.encode()).hexdigest()


def quality_follows_from(artifact: Artifact) -> dict[str, Any]:
    """As JSON: type and weights of an artifact, and to what codes it rounds activations, keys and values; artifacts that agree in these
    predict a text alike."""
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
    """What was recorded of an artifact; None where nothing was.

    Raises:
        ArtifactError: the file is none of these, or is of another artifact.
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
    """With the speeds of a file in the place of those before.

    Args:
        path: of `neuron bench --json`, of which medians are taken, of `neuron check --json`, of which latencies are, or of any other
            program, with `speeds` and `machine` as above.

    Raises:
        ValueError: it is none of these, or of another artifact.
        FileNotFoundError: it is not there.
    """
    document = _read(path)
    if "results" in document:
        _checked(_CHECK, document, path)
        speeds, machine = _latencies(document, path, artifact), {}
    elif "prefill" in document:
        _checked(_RUN, document, path)
        _check_config(document.get("config"), path, artifact)
        speeds, machine = _medians(document), document.get("machine", {})
    else:
        _checked(_BENCH, document, path)
        if document.get("artifact") not in (None, identity(artifact)):
            raise ValueError(f"{path} was measured of another artifact than {artifact.path}; measure this one")
        speeds, machine = document["speeds"], document.get("machine", {})
    if not speeds:
        raise ValueError(f"{path} holds no speeds; measure {artifact.path} again")
    return replace(measured, speeds=speeds, machine=machine)


def with_quality(measured: Measurements, path: Path, artifact: Artifact) -> Measurements:
    """Return the measurements with the figures of a file in the place of those before.

    Of the variants there, this artifact's is the one with its very weights, and its codes of activations, keys and values.

    Raises:
        ValueError: it is none, or there is no such variant.
        FileNotFoundError: it is not there.
    """
    document = _read(path)
    _checked(_VARIANTS, document, path)
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
    _checked(_QUALITY, found[0], path)
    name = found[0]["name"].rstrip("/").rpartition("/")[2]  # the artifact does not tell where it or a file was
    return replace(measured, quality=[found[0] | {"name": name}])


def _check_config(config: object, path: Path, artifact: Artifact) -> None:
    if config != artifact.config.to_dict():
        raise ValueError(f"{path} was measured with other sizes than {artifact.path} has; measure this one")


def _medians(document: dict[str, Any]) -> list[dict[str, Any]]:
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


def _latencies(document: dict[str, Any], path: Path, artifact: Artifact) -> list[dict[str, Any]]:
    _check_config(document["facts"].get("config"), path, artifact)
    values = [
        each["values"] for each in document["results"] if (each["name"], each["status"]) == ("latency", "passed")
    ]
    speeds = [
        {"name": name.removesuffix(" ms"), "value": value, "unit": "ms", "conditions": {}}
        for name, value in (values[0] if values else {}).items()
    ]
    for each in speeds:
        _checked(_SPEED, each, path)
    return speeds


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}; measure again") from error


def _checked(check: Check, document: object, path: Path) -> None:
    try:
        check("it", document)
    except ValueError as error:
        raise ValueError(f"{path} holds no such measurements: {error}; measure again") from error
