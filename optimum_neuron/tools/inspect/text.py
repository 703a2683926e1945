# SPDX-License-Identifier: Apache-2.0
"""Tables of an artifact for a terminal: options, sizes, versions, graphs and measurements. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...artifact.artifact import Artifact
from ...cli import graph_table
from ...config import HLO_TARGETS
from ...hub.facts import rounding_text
from ...hub.measurements import Measurements
from ...step.state_specs import StateSizes, byte_count
from ..certify import NOT_CERTIFIED, is_certified


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_artifact(artifact: Artifact, measured: Measurements | None, terminal: Console) -> None:
    """Print the tables; no file but the manifest is read."""
    terminal.print(_facts_table(artifact))
    if artifact.config.activations is not None:
        terminal.print(rounding_text(artifact.config.activations), soft_wrap=True)
    terminal.print(graph_table(artifact, f"{len(artifact.graphs)} graphs for {artifact.target}"))
    if measured is not None and measured.speeds:
        terminal.print(_speeds_table(measured.speeds))


def _facts_table(artifact: Artifact) -> Table:
    from rich.table import Table

    facts = Table("option", "value", title=str(artifact.path), title_justify="left")
    for name, value in artifact.config.to_dict().items():
        facts.add_row(name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    facts.add_section()
    kept = StateSizes.measure(artifact.states())
    facts.add_row("cache per token", f"{kept.per_token:,} bytes")
    facts.add_row("state per slot", f"{kept.per_slot:,} bytes")
    for name, specs in (("KV cache and state", artifact.states()), ("snapshots of state", artifact.snapshots())):
        if stored := byte_count(specs):
            facts.add_row(name, f"{stored:,} bytes, {len(specs)} tensors")
    facts.add_section()
    if artifact.target in HLO_TARGETS:
        facts.add_row("certified", "yes; --verify repeats it" if is_certified(artifact) else NOT_CERTIFIED)
    for name, version in artifact.manifest["versions"].items():
        facts.add_row(f"exported with {name}", version)
    data = artifact.manifest["target_data"]
    if "lnc" in data:  # compiled for a device
        for name, version in data.get("versions", {}).items():
            facts.add_row(f"compiled with {name}", version)
        facts.add_row("logical NeuronCore", f"{data.get('lnc')} physical")
    return facts


def _speeds_table(speeds: Iterable[dict[str, Any]]) -> Table:
    from rich.table import Table

    table = Table("measured", "with", title="speeds", title_justify="left")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for each in speeds:
        conditions = ", ".join(f"{name} {value}" for name, value in each.get("conditions", {}).items())
        table.add_row(each["name"], conditions, f"{each['value']:,.4g}", each["unit"])
    return table
