# SPDX-License-Identifier: Apache-2.0
"""What is told of an artifact, as plain data that becomes JSON, a table, a page or a model card. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Graph:
    """A compiled graph.

    Attributes:
        kind: of GraphSpec; "helper" of a graph that is no step: it copies slots, or tells what a step left of its logits.
        decode_rows, chunk_rows, chunk_size, context: of a step, in rows and tokens; 0 where it has none.
        bytes: of its files.
        padding: the most of its chunk rows that is padding where no smaller graph would do, as a share; None without chunk rows.
        operators: how many of each: steps of a plan, or HLO instructions; empty where they are not known.
        cost: what one run moves and computes on a core, by name; empty where it is not counted.
    """

    name: str
    kind: str
    decode_rows: int
    chunk_rows: int
    chunk_size: int
    context: int
    bytes: int
    padding: float | None
    operators: dict[str, int] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.decode_rows + self.chunk_rows * self.chunk_size

    @property
    def shape(self) -> str:
        """Rows times tokens, of both groups."""
        groups = [f"{self.decode_rows} x 1"] if self.decode_rows else []
        return " + ".join(groups + ([f"{self.chunk_rows} x {self.chunk_size}"] if self.chunk_size else []))


@dataclass(frozen=True)
class Memory:
    """Of one core, or of the host.

    Attributes:
        parts: bytes by what takes them.
        estimated: which of the parts are estimates; the others are exact.
        capacity: bytes that there are; None where that is not known.
    """

    place: str
    parts: dict[str, int]
    estimated: tuple[str, ...] = ()
    capacity: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Compared:
    """Of a certificate: what was executed and compared with the model, and the largest error."""

    subject: str
    dtype: str
    place: str
    difference: float
    bound: float
    count: int


@dataclass(frozen=True)
class Certified:
    """Of a certificate: how much was executed, and what was compared."""

    layers: int
    all_layers: int
    steps: int
    tokens: int
    rules: tuple[str, ...]
    rules_version: int
    comparisons: tuple[Compared, ...]


@dataclass(frozen=True)
class Linted:
    """Of the lint: what it found, each as graph, severity, problem and remedy; or why it did not run."""

    findings: tuple[dict[str, str], ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Quantized:
    """Weights of one form: codes, how many share a scale, what activations are rounded to for them, and how many weights have it."""

    kind: str
    groups: int
    scale: str
    has_shift: bool
    activations: str | None
    weights: int
    example: str


@dataclass(frozen=True)
class Facts:
    """All that is told of an artifact.

    Attributes:
        name: of its folder.
        options: of its NeuronConfig.
        command: that exports it again.
        source: what it was exported from, as the user named it.
        origin: of `export.origin`.
        sizes: bytes by name: weights, graphs, files; cache, cache per token, state per slot, snapshots.
        weight_types: bytes of weights by type.
        speeds, quality, machine: of `artifacts.measurements`.
        notes: what could not be told, and why.
    """

    name: str
    target: str
    options: dict[str, Any]
    command: str
    source: str
    origin: dict[str, Any]
    adapters: tuple[str, ...]
    model_type: str
    layers: int
    vocab_size: int
    graphs: tuple[Graph, ...]
    sizes: dict[str, int]
    memory: tuple[Memory, ...]
    weight_types: dict[str, int]
    quantized: tuple[Quantized, ...]
    certificate: Certified | None
    lint: Linted
    exported_with: dict[str, str]
    compiled_with: dict[str, str]
    speeds: tuple[dict[str, Any], ...]
    quality: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    notes: tuple[str, ...]

    def to_dict(self) -> Mapping[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def rounding(self) -> str:
        return rounding_of(self.options["activations"])


def rounding_of(activations: str | None) -> str:
    """Return a sentence without its end, on what an artifact of quantized weights does with activations."""
    if activations is None:
        return "activations stay as they are"
    return (
        f"activations are rounded to {activations}, each token's by blocks of 64 inputs, where they meet weights of int8 or int4; this is "
        f"faster on some CPUs and less exact, and an export with --activations none keeps them"
    )
