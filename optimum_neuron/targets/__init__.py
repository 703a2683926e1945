# SPDX-License-Identifier: Apache-2.0
"""Targets compile and run step graphs; nothing else knows which target it is."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import HLO_TARGETS, NeuronConfig


if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from transformers import PreTrainedModel

    from ..artifact.artifact import Artifact
    from ..step.model_spec import ModelSpec
    from ..step.spec import GraphSpec


@dataclass(frozen=True)
class CompileJob:
    """The input of a target's compiler: a folder with config.json and weights, as an artifact has them.

    Compiled files go to its `graphs/`. `tied_weights` are alias to stored name, as in the manifest.
    """

    folder: Path
    config: NeuronConfig
    model: ModelSpec
    graphs: tuple[GraphSpec, ...]
    tied_weights: dict[str, str]
    trust_remote_code: bool


class Executable:
    """Loaded graphs. Weights and state are shared by all graphs by name: one copy in memory.

    `start` can be called where it `runs_ahead`: not where steps are computed by the caller's own process, which has nothing to wait for.
    Where the device chooses tokens, its graphs keep each slot's last one: an id below 0 in a decode row stands for it.
    """

    runs_ahead = False

    def run(self, graph: str, inputs: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
        """Run one step: inputs and outputs in the order of the graph's spec. The KV state is updated in place.

        Outputs are valid until the next run, of whichever graph.
        """
        raise NotImplementedError

    def run_for_states(self, graph: str, inputs: Sequence[np.ndarray]) -> None:
        """Leave the same states as `run`. What only outputs need may be left out."""
        self.run(graph, inputs)

    def run_by_operators(
        self, graph: str, inputs: Sequence[np.ndarray], ended: Callable[[str], None], *, outputs: bool = True
    ) -> Sequence[np.ndarray]:
        """Do as `run`, or without `outputs` as `run_for_states`, one operator at a time where possible; `ended` gets the name of each."""
        if outputs:
            return self.run(graph, inputs)
        self.run_for_states(graph, inputs)
        return ()

    def start(
        self, graph: str, inputs: Sequence[np.ndarray], *, logits: bool
    ) -> Callable[[], Sequence[np.ndarray | None]]:
        """Start a step after those that were started before. The results of these need not have been read.

        Args:
            inputs: as in `run`; the caller may change them when the call returns.
            logits: whether the caller reads the outputs of this name. Else they stay on the device.

        Returns:
            A function that waits for the step, and returns what `run` does, None in place of what stays on the device.
        """
        raise NotImplementedError

    def copy_slot(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` cache columns of a slot into another, on the device: keys and values, no other state."""
        raise NotImplementedError

    def keep_state(self, slot: int, place: int) -> None:
        """Copy the states of a slot, but for keys and values, to a place for later."""
        raise NotImplementedError

    def restore_state(self, place: int, slot: int) -> None:
        """Copy what `keep_state` left at a place to a slot."""
        raise NotImplementedError

    def read_state(self, name: str) -> np.ndarray:
        """Return a copy of a state tensor."""
        raise NotImplementedError

    def write_state(self, name: str, array: np.ndarray) -> None:
        """Replace a state tensor's values."""
        raise NotImplementedError

    def touch_states(self) -> None:
        """Take all memory of the states now, where the system gives it page by page, so that no request waits for it."""

    def idle_inputs(self) -> Mapping[str, Sequence[np.ndarray]]:
        """Return inputs with which `run` changes no state, by the name of each graph that is no step."""
        return {}


@dataclass(frozen=True)
class RankOptions:
    """Choices for the processes that hold a Neuron device's ranks; None is what the environment says, or the default.

    They are the interpreter of an environment that has numpy and a Neuron runtime, the seconds that one step may take, and an existing
    folder to which the ranks' runtime writes a profile.
    """

    python: str | None = None
    timeout: float | None = None
    capture: Path | None = None

    def refuse(self, target: str) -> None:
        """Raise ValueError where something is chosen, for a target that runs in this process."""
        for option, value in (("rank_python", self.python), ("rank_timeout", self.timeout), ("capture", self.capture)):
            if value is not None:
                here = f"an artifact for {target} runs in this one"
                raise ValueError(
                    f"{option}={value!r} is for the processes of a Neuron device, and {here}; leave it out"
                )


IN_ENVIRONMENT = RankOptions()


@dataclass(frozen=True)
class CacheKeys:
    """The keys of an export's graphs in the compile cache, by graph; each entry has a file of code with this suffix."""

    kind: str
    suffix: str
    keys: dict[str, str]


class Target:
    """A compiler of step graphs, and the loader of what it compiled; with `keeps_graphs`, it looks for them in the compile cache first."""

    keeps_graphs = False

    def prepare(self) -> None:
        """Begin what takes long and depends on no model; raise where this machine cannot do it."""

    def check(self, config: NeuronConfig) -> None:
        """Raise before anything is written where this machine, by default one device, cannot compile `config` for this target."""
        if config.tensor_parallel_size != 1:
            raise ValueError(
                f"tensor_parallel_size={config.tensor_parallel_size} needs as many devices, and target={config.target!r} is one; "
                f"use tensor_parallel_size=1"
            )

    def rounds_activations(self) -> bool:
        """Return whether codes meet activations of int8 faster than plain ones here, so that an export rounds them by default."""
        return False

    def write_model(self, model: PreTrainedModel, config: NeuronConfig, folder: Path) -> dict[str, str]:
        """Write what `load` reads of the model itself into an artifact's folder; return the tied names, alias to stored name."""
        raise NotImplementedError

    def compile(self, job: CompileJob) -> dict[str, Any]:
        """Write compiled graphs, if there are any; return what `load` reads in the manifest's `target_data`."""
        return {}

    def cache_keys(
        self, model: PreTrainedModel, config: NeuronConfig, folder: Path, *, trust_remote_code: bool
    ) -> CacheKeys:
        """Return the keys that `compile` will look for, without weights, of a model on the meta device, which is changed.

        Raises:
            ValueError: the graphs cannot be compiled for this target.
            RuntimeError: this machine lacks what decides on keys.
        """
        raise NotImplementedError

    def load(
        self,
        artifact: Artifact,
        *,
        trust_native_code: bool,
        trust_remote_code: bool,
        ranks: RankOptions = IN_ENVIRONMENT,
    ) -> Executable:
        """Load the graphs of an artifact; native code only where it is trusted, else it is compiled again here.

        The options `ranks` are for a device's processes; a target that has none refuses any choice.
        """
        raise NotImplementedError


_TARGETS = {"cpu": (".cpu", "CpuTarget"), "eager": (".eager", "EagerTarget")} | dict.fromkeys(
    HLO_TARGETS, (".neuron.target", "NeuronTarget")
)


def resolve_target(name: str) -> str:
    """Return the target that "auto" stands for on this machine: its Neuron devices, or else the CPU."""
    if name != "auto":
        return name
    from .neuron.sdk.devices import find_devices

    found = find_devices()
    return "cpu" if found is None or found.generation is None else found.generation


def get_target(name: str) -> Target:
    """Return a target by name, importing it now.

    Raises:
        ValueError: there is no such target.
    """
    if name not in _TARGETS:
        raise ValueError(f"target={name!r} is not known; choose one of {', '.join(_TARGETS)}")
    module, attribute = _TARGETS[name]
    target: Target = getattr(importlib.import_module(module, __name__), attribute)()
    return target
