# SPDX-License-Identifier: Apache-2.0
"""The files of plans, and the facts that each plan was made for. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ...artifact.schema import TEXT, anything, first_difference, record, shown
from ...step.model_spec import SECTIONS, ModelSpec
from ...step.spec import GraphSpec


CACHE_KIND = "cpu"
PLAN_SUFFIX, CONSTANTS_SUFFIX = ".json", ".safetensors"
_FACTS = record(
    {
        "graph": record(dict.fromkeys((field.name for field in fields(GraphSpec)), anything), closed=True),
        "model": record(dict.fromkeys(("vocab_size", "num_embeddings", *SECTIONS), anything), closed=True),
        "dtype": TEXT,
    },
    closed=True,
)


@dataclass(frozen=True)
class PlanFacts:
    """The facts that the plan of a graph depends on."""

    graph: GraphSpec
    model: ModelSpec
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        lists: dict[str, Any] = {section: [] for section in SECTIONS}
        return {"graph": asdict(self.graph), "model": lists | self.model.to_dict(), "dtype": self.dtype}

    def check(self, found: Mapping[str, Any]) -> None:
        """Raise ValueError where a plan was made for other facts."""
        _FACTS("the plan", found)
        difference = first_difference(found, self.to_dict())
        if difference is not None:
            name, made, asked = difference
            raise ValueError(f"it was compiled for {name}={shown(made)}, and the artifact has {shown(asked)}")
