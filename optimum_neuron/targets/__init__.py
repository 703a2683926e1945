# SPDX-License-Identifier: Apache-2.0
"""Targets: where step graphs run. A target compiles and runs step graphs; nothing else knows which target it is."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..config import HLO_TARGETS, NeuronConfig
from .rank_options import IN_ENVIRONMENT, RankOptions


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from ..artifacts.artifact import Artifact
    from ..graphs.model_spec import ModelSpec
    from ..graphs.spec import GraphSpec


@dataclass(frozen=True)
class CompileJob:
    """What a target compiles from: a folder with config.json and weights, as an artifact has them.

    Attributes:
        folder: compiled files go to its `graphs/`.
        tied_weights: alias to stored name, as in the manifest.
    """

    folder: Path
    config: NeuronConfig
    model: ModelSpec
    graphs: tuple[GraphSpec, ...]
    tied_weights: dict[str, str]
    trust_remote_code: bool


class Executable(Protocol):
    """Loaded graphs. Weights and state are shared by all graphs by name: one copy in memory.

    Attributes:
        runs_ahead: whether it is an `AheadExecutable`. Where steps are computed by the caller's own process it is not: there is
            nothing to wait for, and nothing to copy.
    """

    runs_ahead: bool

    def run(self, graph: str, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Runs one step: inputs and outputs in the order of the graph's spec. The KV state is updated in place.

        Outputs are valid until the next run, of whichever graph.
        """

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Copies the first `length` cache columns of a slot into another, on the device: keys and values, no other state."""

    def read_state(self, name: str) -> Tensor:
        """A copy of a state tensor."""

    def write_state(self, name: str, tensor: Tensor) -> None:
        """Replaces a state tensor's values."""


@runtime_checkable
class TellsOperators(Protocol):
    """An executable that can also run a step one operator at a time, with the same results, for who wants to see them."""

    def run_by_operators(
        self, graph: str, inputs: Sequence[Tensor], ended: Callable[[str], None], *, outputs: bool = True
    ) -> Sequence[Tensor]:
        """As `Executable.run`, or where nobody reads `outputs`, as `RunsForStates.run_for_states`.

        Args:
            ended: is called with each operator's name as it ends.
        """


@runtime_checkable
class RunsForStates(Protocol):
    """An executable that can leave out what only a step's outputs need: of a prompt's chunk that does not end it nobody reads them."""

    def run_for_states(self, graph: str, inputs: Sequence[Tensor]) -> None:
        """As `Executable.run`, with the same states behind it."""


@runtime_checkable
class KeepsStates(Protocol):
    """An executable that copies what slots keep beside keys and values, for models that keep any: inputs of convolutions, states
    of recurrences, all of it."""

    def keep_state(self, slot: int, snapshot: int) -> None:
        """Copies a slot's state to a snapshot's place."""

    def restore_state(self, snapshot: int, slot: int) -> None:
        """Copies a snapshot to a slot."""


@runtime_checkable
class HoldsStates(Protocol):
    """An executable with its states in memory of this process, which the system gives page by page as they are first written."""

    def touch_states(self) -> None:
        """Take all memory of the states now, so that a slot's first request need not wait for it."""


@runtime_checkable
class HasOtherGraphs(Protocol):
    """An executable with graphs that are no steps: what draws tokens, tells log-probabilities or copies slots and state apart from them."""

    def idle_inputs(self) -> Mapping[str, Sequence[Tensor]]:
        """By the name of each such graph the inputs with which `Executable.run` changes no state."""


class AheadExecutable(Executable, Protocol):
    """Graphs whose next step can be started before the results of one are read.

    Where the device chooses tokens, its graphs keep each slot's last one: an id below 0 in a decode row stands for it.
    """

    def start(self, graph: str, inputs: Sequence[Tensor], *, logits: bool) -> Callable[[], Sequence[Tensor | None]]:
        """Starts a step, behind those that were started before, whose results need not have been read.

        Args:
            inputs: as in `run`; the caller may change them when the call returns.
            logits: whether somebody wants the outputs of this name; where nobody does they stay on the device.

        Returns:
            What waits for the step's end, and returns what `run` does, None in place of what stays on the device.
        """


class Target(Protocol):
    """Compiles step graphs and loads what it compiled."""

    def check(self, config: NeuronConfig) -> None:
        """Raises before anything is written where this machine cannot compile `config` for this target."""

    def rounds_activations(self) -> bool:
        """Return whether codes meet activations of int8 faster than plain ones here, so that an export rounds them by default."""

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        """Writes what `load` wants of the model itself, its weights above all, into an artifact's folder.

        Returns:
            The tied names: alias to stored name.
        """

    def compile(self, job: CompileJob) -> dict[str, Any]:
        """Writes compiled graphs; returns what `load` wants to find in the manifest's `target_data`."""

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> Executable:
        """Loads the graphs of an artifact; native code only where it is trusted, else it is compiled again here.

        Args:
            ranks: of the processes that hold a device's ranks; a target that has none refuses any choice.
        """


@dataclass(frozen=True)
class CacheKeys:
    """Where the compile cache has the graphs of an export.

    Attributes:
        kind: of the entries.
        suffix: of the file of code that each must have.
        keys: by graph.
    """

    kind: str
    suffix: str
    keys: dict[str, str]


@runtime_checkable
class KeepsGraphs(Protocol):
    """A target that looks for graphs in the compile cache before it compiles them."""

    def cache_keys(
        self, model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
    ) -> CacheKeys:
        """Under which keys `compile` will look, told without weights.

        Args:
            model: as `write_model` gets it, but on the meta device; is changed.
            config: as in a job.
            folder: holds config.json, and the model's code where that is trusted.

        Raises:
            ValueError: the graphs cannot be compiled for this target.
            RuntimeError: this machine lacks what decides on keys.
        """


def check_one_device(config: NeuronConfig) -> None:
    """Raises ValueError where a config asks the host, which is one device, for several."""
    if config.tensor_parallel_size != 1:
        raise ValueError(
            f"tensor_parallel_size={config.tensor_parallel_size} needs as many devices, and target={config.target!r} is "
            f"one; use tensor_parallel_size=1"
        )


_TARGETS = {"cpu": (".cpu", "CpuTarget"), "eager": (".eager", "EagerTarget")} | dict.fromkeys(
    HLO_TARGETS, (".neuron.target", "NeuronTarget")
)


def resolve_target(name: str) -> str:
    """The target that "auto" stands for on this machine: its Neuron devices, or else the CPU."""
    if name != "auto":
        return name
    from .neuron.sdk.devices import find_devices

    found = find_devices()
    return "cpu" if found is None or found.generation is None else found.generation


def get_target(name: str) -> Target:
    """Finds a target by name, importing it now.

    Raises:
        ValueError: there is no such target.
    """
    if name not in _TARGETS:
        raise ValueError(f"target={name!r} is not known; choose one of {', '.join(_TARGETS)}")
    module, attribute = _TARGETS[name]
    target: Target = getattr(importlib.import_module(module, __name__), attribute)()
    return target
