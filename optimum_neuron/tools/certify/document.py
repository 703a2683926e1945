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
from .expected import STATISTICS, TIMES_ROUNDING, Entry, Expected


VERSION = 1
_DIGEST = text("[0-9a-f]{64}")
_COMPARISON = record(
    {"subject": TEXT, "place": TEXT, "dtype": choice(tuple(STATISTICS)), "count": whole(0, 2**63 - 1)}
    | dict.fromkeys(("difference", "noise", "bound"), number(0)),
    closed=True,
)
_ENTRY = record(
    {
        "step": whole(0),
        "name": TEXT,
        "rank": whole(0),
        "subject": TEXT,
        "place": TEXT,
        "noise": number(0),
        "rows": optional(listed(whole(0))),
        "heads": optional(listed(whole(0))),
        "positions": listed(whole(0, 2**63 - 1)),
        "values": listed(number()),
    },
    closed=True,
)
_TOKENS = record({"step": whole(0), "name": TEXT, "row": whole(0), "accepted": listed(whole(0))}, closed=True)
_EXPECTED = record(
    {"dtype": choice(tuple(STATISTICS)), "outputs": listed(_ENTRY), "tokens": listed(_TOKENS)}, closed=True
)
_DOCUMENT = record(
    {
        "version": whole(1, VERSION),
        "rules": record({"version": whole(1), "passed": listed(TEXT)}, closed=True),
        "graphs": named(_DIGEST),
        "executed": record(
            {"layers": whole(1), "all_layers": whole(1), "config": record({}), "graphs": named(_DIGEST)}, closed=True
        ),
        "steps": record({"count": whole(1), "tokens": whole(1), "sha256": _DIGEST}, closed=True),
        "scales": named(whole(-126, 126)),
        "comparisons": listed(_COMPARISON),
        "expected": listed(_EXPECTED),
        "versions": named(TEXT),
    },
    closed=True,
)


@dataclass(frozen=True)
class Certificate:
    """What was found when the artifact was exported.

    Attributes:
        rules_version, rules: of the lint: the rules that no graph broke.
        graphs: sha256 of every HLO module of the artifact by name.
        layers, all_layers: how many layers were executed, of how many.
        config: the sizes at which they were.
        executed: sha256 of the modules that were.
        steps, tokens, steps_sha256: how much was executed, and a digest of all inputs.
        scales: of each state's history, a power of two.
        expected: numbers that the eager step made, in each type in which modules were executed.
        versions: of what computed and lowered, by distribution.
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

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "rules": {"version": self.rules_version, "passed": list(self.rules)},
            "graphs": self.graphs,
            "executed": {
                "layers": self.layers,
                "all_layers": self.all_layers,
                "config": self.config.to_dict(),
                "graphs": self.executed,
            },
            "steps": {"count": self.steps, "tokens": self.tokens, "sha256": self.steps_sha256},
            "scales": self.scales,
            "comparisons": [dataclasses.asdict(each) for each in self.comparisons],
            "expected": [_expected_to_dict(each) for each in self.expected],
            "versions": self.versions,
        }

    def write(self, folder: Path) -> None:
        """Raises ValueError where a number is not finite: JSON has none such."""
        document = json.dumps(self.to_dict(), allow_nan=False, sort_keys=True)
        (folder / CERTIFICATE_NAME).write_text(document + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Certificate:
        """A folder's certificate.

        Raises:
            FileNotFoundError: it has none.
            ArtifactError: it is not one that an export wrote, or certifies what does not hold.
        """
        path = folder / CERTIFICATE_NAME
        try:
            return _from_dict(read_object(path))
        except (TypeError, ValueError) as error:
            raise ArtifactError(f"{path} is no certificate: {error}; export the model again") from error


def _from_dict(data: dict[str, Any]) -> Certificate:
    _DOCUMENT("the certificate", data)
    executed, steps = data["executed"], data["steps"]
    comparisons = tuple(Comparison(**each) for each in data["comparisons"])
    for each in comparisons:
        if not each.holds or each.bound != TIMES_ROUNDING * each.noise:
            raise ValueError(
                f"it certifies that {each.subject} differ by {each.difference:.2g} within {each.bound:.2g}, where "
                f"{TIMES_ROUNDING:g} times rounding is {TIMES_ROUNDING * each.noise:.2g}"
            )
    if not comparisons or not data["expected"]:
        raise ValueError("it compares nothing")
    return Certificate(
        rules_version=data["rules"]["version"],
        rules=tuple(data["rules"]["passed"]),
        graphs=data["graphs"],
        layers=executed["layers"],
        all_layers=executed["all_layers"],
        config=NeuronConfig.from_dict(executed["config"]),
        executed=executed["graphs"],
        steps=steps["count"],
        tokens=steps["tokens"],
        steps_sha256=steps["sha256"],
        scales=data["scales"],
        comparisons=comparisons,
        expected=tuple(_expected_from_dict(each) for each in data["expected"]),
        versions=data["versions"],
    )


def _expected_to_dict(expected: Expected) -> dict[str, Any]:
    outputs = [
        {
            "step": step,
            "name": name,
            "rank": rank,
            **{name: value for name, value in vars(entry).items() if name != "trash"},
            "values": entry.values.float().tolist(),
        }
        for (step, name, rank), entry in expected.outputs.items()
    ]
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
        expected.outputs[step, name, rank] = Entry(**each, trash=0)  # which lies behind all positions
    for each in data["tokens"]:
        expected.tokens.setdefault((each["step"], each["name"]), {})[each["row"]] = tuple(each["accepted"])
    return expected
