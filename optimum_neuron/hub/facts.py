# SPDX-License-Identifier: Apache-2.0
"""Facts of an artifact as plain data, which becomes JSON, a table, a page or a model card. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class GraphFacts:
    """A compiled graph: a step of a GraphSpec's kind, or a "helper", with the `bytes` of its files.

    `padding` is the largest share of its chunk rows where no smaller graph would do, and None without such rows. `operators` are steps of a plan
    or HLO instructions by name, and `cost` the bytes and operations of one run on a core; both are empty where they are not counted.
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
class MemoryParts:
    """Memory of one core, or of the host: bytes by their use, some of them estimated, and the capacity where it is known."""

    place: str
    parts: dict[str, int]
    estimated: tuple[str, ...] = ()
    capacity: int | None = None

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Compared:
    """A comparison of a certificate: the subject, and its largest error."""

    subject: str
    dtype: str
    place: str
    difference: float
    bound: float
    count: int


@dataclass(frozen=True)
class Certified:
    """A certificate: the executed work, its comparisons with the model, and the sha256 of each graph."""

    layers: int
    all_layers: int
    steps: int
    tokens: int
    rules: tuple[str, ...]
    rules_version: int
    comparisons: tuple[Compared, ...]
    graphs: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Linted:
    """Findings of the lint, each as graph, severity, problem and remedy; or the reason why it did not run."""

    findings: tuple[dict[str, str], ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class Quantized:
    """Weights of one form: codes, scales of an output, rounding of activations, and the number of such weights."""

    kind: str
    groups: int
    scale: str
    has_shift: bool
    activations: str | None
    weights: int
    example: str


@dataclass(frozen=True)
class ArtifactFacts:
    """All facts of an artifact; the last three are counted in its graphs.

    `sizes` and `weight_types` are bytes by name. Each of `speeds` has a name, value, unit and conditions. `notes` say why facts are missing.
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
    graphs: tuple[GraphFacts, ...]
    sizes: dict[str, int]
    weight_types: dict[str, int]
    quantized: tuple[Quantized, ...]
    certificate: Certified | None
    exported_with: dict[str, str]
    compiled_with: dict[str, str]
    speeds: tuple[dict[str, Any], ...]
    machine: dict[str, Any]
    memory: tuple[MemoryParts, ...] = ()
    lint: Linted = Linted(missing="it was not run")
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def rounding(self) -> str:
        return rounding_text(self.options["activations"])


def rounding_text(activations: str | None) -> str:
    """Return a sentence without its end, on the rounding of activations in an artifact of quantized weights."""
    if activations is None:
        return "activations stay as they are"
    return (
        f"activations are rounded to {activations}, each token's by blocks of 64 inputs, where they meet weights of int8 or int4; this is "
        f"faster on some CPUs and less exact, and an export with --activations none keeps them"
    )


def count_text(count: float) -> str:
    """Return a number of operations in the same way."""
    return bytes_text(count, ("", "k", "M", "G", "T")).strip()


def bytes_text(value: float, units: tuple[str, ...] = ("bytes", "kB", "MB", "GB", "TB")) -> str:
    """Return bytes in the largest unit of powers of 1000 that leaves a number of 1 or more, with three digits."""
    for unit in units[:-1]:
        if value < 1000:
            whole = value >= 100 or value == int(value)
            return f"{value:,.0f} {unit}" if whole else f"{value:,.{1 if value >= 10 else 2}f} {unit}"
        value /= 1000
    return f"{value:,.0f} {units[-1]}"
