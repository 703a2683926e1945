# SPDX-License-Identifier: Apache-2.0
"""A record: digests of artifacts and plans, with the versions of torch and transformers that graphs depend on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from records.artifacts import digest_model
from records.schedules import digest_schedules


Record = dict[str, Any]


def versions() -> dict[str, str]:
    """Return what the graphs of a model depend on, apart from this package."""
    return {"torch": torch.__version__.partition("+")[0], "transformers": transformers.__version__}


def make_record(models: Sequence[str], wanted: Sequence[str]) -> Record:
    return {
        "versions": versions(),
        "schedules": digest_schedules(),
        "models": {name: digest_model(name, wanted) for name in models},
    }


def write_record(record: Record, file: Path) -> None:
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(file: Path) -> Record:
    record: Record = json.loads(file.read_text(encoding="utf-8"))
    return record


def compare(file: Path) -> list[str]:
    """Make the digests of a record again; return what differs, as `differences` does."""
    expected = read_record(file)
    found = {name: digest_model(name, wanted) for name, wanted in expected["models"].items()}
    return differences(expected, {"versions": versions(), "schedules": digest_schedules(), "models": found})


def differences(expected: Record, found: Record) -> list[str]:
    """Return a line for each entry that differs, and for each that only one of two records of the same models has."""
    theirs, ours = dict(_entries(expected)), dict(_entries(found))
    return [
        f"{name}: {ours.get(name, 'nothing')} instead of {theirs.get(name, 'nothing')}"
        for name in sorted(theirs.keys() | ours.keys())
        if theirs.get(name) != ours.get(name)
    ]


def _entries(record: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(record, Mapping):
        for key, value in record.items():
            yield from _entries(value, f"{name}, {key}" if name else key)
    elif isinstance(record, list):
        for number, value in enumerate(record):
            yield from _entries(value, f"{name}, part {number}")
    else:
        yield name, record
