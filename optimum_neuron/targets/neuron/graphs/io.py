# SPDX-License-Identifier: Apache-2.0
"""Descriptions of lowered graphs, as data: enough to bind a graph without torch or this program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ....artifact.artifact import ArtifactError
from ....artifact.schema import TEXT, choice, listed, optional, read_object, record, text, whole
from ....step.spec import CHUNK, DECODE


Role = Literal["weight", "state", "input"]
DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
    "float8_e4m3fn",
)  # fmt: skip
# The types that devices have in place of others. A gather's indices are made unsigned; further operators may undo that.
NARROW = {"int64": "int32", "float64": "float32", "uint32": "int32"}
# The graphs that are no steps: see state_graphs.py.
COPIES = COPY_SLOT, KEEP_STATE, RESTORE_STATE = "copy_slot", "keep_state", "restore_state"
# The graph that tries the collectives of all others: its input, and the beginning of its outputs' names.
PROBE, PROBE_INPUT, PROBED = "probe_collectives", "probe.scale", "probe."
SAMPLERS = {DECODE: "sample_decode", CHUNK: "sample_chunk"}
# The beginnings of the names of states. Every step updates those of the cache; scores belong to its groups of rows.
CACHE, SCORES = "kv_cache.", "scores."
# The state that has each slot's last token: steps and samplers update it where the device chooses tokens.
CHOSEN = "chosen.tokens"


def cut_dim(shape: Sequence[int]) -> int:
    """Return the dimension along which ranks cut a state: heads of `[slots, heads, columns, dim]`, or channels of `[slots, past, channels]`."""
    return 1 if len(shape) == 4 else len(shape) - 1


@dataclass(frozen=True)
class InputBinding:
    """A parameter of the HLO module, in the order of parameter numbers."""

    name: str
    role: Role  # a weight is bound by name once, a state is also updated in place, an input comes with every step
    shape: tuple[int, ...]
    dtype: str  # torch's name of the type


@dataclass(frozen=True)
class OutputBinding:
    """An element of the module's result tuple; `alias_of` names the state that it renews."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    alias_of: str | None


_TENSOR = {"name": TEXT, "shape": listed(whole(0)), "dtype": choice(DTYPES)}
_DOCUMENT = record(
    {
        "inputs": listed(record(_TENSOR | {"role": choice(("weight", "state", "input"))}, closed=True)),
        "outputs": listed(record(_TENSOR | {"alias_of": optional(TEXT)}, closed=True)),
        "unused_inputs": listed(TEXT),
        "hlo_sha256": text("[0-9a-f]{64}"),
        "world_size": whole(1),
    },
    {"spec": optional(record({}))},
    closed=True,
)


@dataclass(frozen=True)
class GraphIO:
    """Parameters and results of one lowered graph."""

    inputs: tuple[InputBinding, ...]  # inputs of every step, then states, then weights
    outputs: tuple[OutputBinding, ...]  # those of the step, then the new value of every state that it updates
    unused_inputs: tuple[str, ...]  # names of the step's inputs that no instruction needs
    hlo_sha256: str
    world_size: int  # ranks that run the module together; all run the same bytes
    # Fields of the lowered GraphSpec; None for a graph that is no step, or from a version that did not write it.
    spec: dict[str, Any] | None = None

    def names(self, role: Role) -> tuple[str, ...]:
        return tuple(binding.name for binding in self.inputs if binding.role == role)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphIO:
        """Read a description; raise ValueError where `data` is none."""
        _DOCUMENT("the description", data)
        inputs = tuple(InputBinding(**entry | {"shape": tuple(entry["shape"])}) for entry in data["inputs"])
        outputs = tuple(OutputBinding(**entry | {"shape": tuple(entry["shape"])}) for entry in data["outputs"])
        return cls(**data | {"inputs": inputs, "outputs": outputs, "unused_inputs": tuple(data["unused_inputs"])})


HLO_SUFFIX, IO_SUFFIX = ".hlo", ".json"


@dataclass(frozen=True)
class LoweredGraph:
    """A graph as the compiler takes it: a serialized HloModuleProto, and its parameters and results."""

    name: str
    kind: str
    hlo: bytes
    io: GraphIO


def write_graph(graph: LoweredGraph, folder: Path) -> None:
    (folder / (graph.name + HLO_SUFFIX)).write_bytes(graph.hlo)
    text = json.dumps(asdict(graph.io), indent=1) + "\n"
    (folder / (graph.name + IO_SUFFIX)).write_text(text, encoding="utf-8")


def read_hlo(path: Path) -> bytes:
    """Return the bytes of a graph's HLO module, or raise ArtifactError where the file holds none."""
    from . import hlo

    data = path.read_bytes()
    try:
        hlo.parse(data)
    except ValueError as error:
        raise ArtifactError(f"{path} holds no graph: {error}; export the model again") from error
    return data


def read_graph_io(path: Path) -> GraphIO:
    """Return the description of the graph in an HLO file, or raise ArtifactError."""
    described = path.with_suffix(IO_SUFFIX)
    try:
        return GraphIO.from_dict(read_object(described))
    except ValueError as error:
        raise ArtifactError(f"{described} describes no graph: {error}; export the model again") from error
