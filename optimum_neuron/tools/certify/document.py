# SPDX-License-Identifier: Apache-2.0
"""certificate.json: written once, by an export with --certify, and read strictly."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...artifact.artifact import ArtifactError
from ...artifact.schema import TEXT, choice, listed, named, number, optional, read_object, record, text, whole
from ...config import NeuronConfig
from . import CERTIFICATE_NAME
from .comparison import Comparison
from .expected import STATISTICS, TIMES_ROUNDING, Expected, ExpectedValues


VERSION = 1
_DIGEST = text("[0-9a-f]{64}")
_COMPARISON = record(
    {"subject": TEXT, "place": TEXT, "dtype": choice(tuple(STATISTICS)), "count": whole(0, 2**63 - 1)}
    | dict.fromkeys(("difference", "noise", "bound"), number(0)),
    closed=True,
)
_OUTPUT = record(
    {"step": whole(0), "name": TEXT, "rank": whole(0), "subject": TEXT, "place": TEXT, "noise": number(0)}
    | {"rows": optional(listed(whole(0))), "heads": optional(listed(whole(0)))}
    | {"positions": listed(whole(0, 2**63 - 1)), "values": listed(number())},
    closed=True,
)
_TOKENS = record({"step": whole(0), "name": TEXT, "row": whole(0), "accepted": listed(whole(0))}, closed=True)
_EXPECTED = record(
    {"dtype": choice(tuple(STATISTICS)), "outputs": listed(_OUTPUT), "tokens": listed(_TOKENS)}, closed=True
)
_RULES = record({"version": whole(1), "passed": listed(TEXT)}, closed=True)
_EXECUTED = record(
    {"layers": whole(1), "all_layers": whole(1), "config": record({}), "graphs": named(_DIGEST)}, closed=True
)
_STEPS = record({"count": whole(1), "tokens": whole(1), "sha256": _DIGEST}, closed=True)
_DOCUMENT = record(
    {"version": whole(1, VERSION), "rules": _RULES, "graphs": named(_DIGEST), "executed": _EXECUTED, "steps": _STEPS}
    | {"scales": named(whole(-126, 126)), "comparisons": listed(_COMPARISON), "expected": listed(_EXPECTED)}
    | {"versions": named(TEXT)},
    closed=True,
)
# Objects of the file, and the fields of a certificate that they hold.
_OBJECTS = {
    "rules": {"version": "rules_version", "passed": "rules"},
    "executed": {"layers": "layers", "all_layers": "all_layers", "config": "config", "graphs": "executed"},
    "steps": {"count": "steps", "tokens": "tokens", "sha256": "steps_sha256"},
}


@dataclass(frozen=True)
class Certificate:
    """The record of a certified export.

    Attributes:
        rules_version, rules: version of the lint, and its rules that no graph broke.
        graphs: sha256 of every HLO module of the artifact by name.
        layers, all_layers: executed layers, and layers of the model.
        config: sizes at which they were executed.
        executed: sha256 of the executed modules.
        steps, tokens, steps_sha256: amount of the executed work, and a digest of all inputs.
        scales: power of two of each state's history.
        expected: numbers of the eager step, in each type in which modules were executed.
        versions: of the libraries that computed and lowered, by distribution.
    """

    rules_version: int
    rules: tuple[str, ...]
    graphs: dict[str, str]
    layers: int
    all_layers: int
    config: NeuronConfig
    executed: dict[str, str]
    steps: int
    tokens: int
    steps_sha256: str
    scales: dict[str, int]
    comparisons: tuple[Comparison, ...]
    expected: tuple[Expected, ...]
    versions: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the file; raise ValueError where a number is not finite, which JSON does not have."""
        data = vars(self) | {
            "config": self.config.to_dict(),
            "comparisons": [dataclasses.asdict(each) for each in self.comparisons],
            "expected": [_expected_to_dict(each) for each in self.expected],
        }
        objects = {name: {key: data.pop(field) for key, field in fields.items()} for name, fields in _OBJECTS.items()}
        data |= {"version": VERSION, **objects}
        document = json.dumps(data, allow_nan=False, sort_keys=True)
        (folder / CERTIFICATE_NAME).write_text(document + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Certificate:
        """Read a folder's certificate.

        Raises:
            FileNotFoundError: it has none.
            ArtifactError: it is not one that an export wrote, or certifies what does not hold.
        """
        path = folder / CERTIFICATE_NAME
        try:
            return _certificate_from_dict(read_object(path))
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is no certificate: {error}; export the model again") from error


def _certificate_from_dict(data: dict[str, Any]) -> Certificate:
    _DOCUMENT("the certificate", data)
    del data["version"]
    objects = {name: data.pop(name) for name in _OBJECTS}
    data |= {field: objects[name][key] for name, fields in _OBJECTS.items() for key, field in fields.items()}
    comparisons = tuple(Comparison(**each) for each in data["comparisons"])
    for each in comparisons:
        if not each.holds or each.bound != TIMES_ROUNDING * each.noise:
            raise ValueError(
                f"it certifies that {each.subject} differ by {each.difference:.2g} within {each.bound:.2g}, where "
                f"{TIMES_ROUNDING:g} times rounding is {TIMES_ROUNDING * each.noise:.2g}"
            )
    if not comparisons or not data["expected"]:
        raise ValueError("it compares nothing")
    changes = {
        "rules": tuple(data["rules"]),
        "config": NeuronConfig.from_dict(data["config"]),
        "comparisons": comparisons,
        "expected": tuple(_expected_from_dict(each) for each in data["expected"]),
    }
    return Certificate(**data | changes)


def _expected_to_dict(expected: Expected) -> dict[str, Any]:
    outputs = [
        {"step": step, "name": name, "rank": rank, **vars(entry), "values": entry.values.float().tolist()}
        for (step, name, rank), entry in expected.outputs.items()
    ]
    for each in outputs:
        del each["trash"]  # it lies after all positions
    tokens = [
        {"step": step, "name": name, "row": row, "accepted": list(accepted)}
        for (step, name), rows in expected.tokens.items()
        for row, accepted in rows.items()
    ]
    return {"dtype": expected.dtype, "outputs": outputs, "tokens": tokens}


def _expected_from_dict(data: dict[str, Any]) -> Expected:
    expected = Expected(data["dtype"])
    for each in data["outputs"]:
        if len(each["positions"]) != len(each["values"]):
            raise ValueError(f"{each['name']} has {len(each['values'])} values at {len(each['positions'])} positions")
        step, name, rank = (each.pop(key) for key in ("step", "name", "rank"))
        each["rows"] = None if each["rows"] is None else tuple(each["rows"])
        each["values"] = torch.tensor(each["values"])
        expected.outputs[step, name, rank] = ExpectedValues(**each, trash=0)
    for each in data["tokens"]:
        expected.tokens.setdefault((each["step"], each["name"]), {})[each["row"]] = tuple(each["accepted"])
    return expected
