# SPDX-License-Identifier: Apache-2.0
"""The interface of a kind of layer state, and what records states; model_spec.py lists all kinds. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import NeuronConfig
from ..errors import UnsupportedModelError
from .spec import TensorSpec


@dataclass(frozen=True)
class CheckedModel:
    """A model's class name, for messages, and whether its own code attends, without transformers' attention interface."""

    name: str
    attends_alone: bool


@dataclass(frozen=True)
class LayerState(ABC):
    """Something that one layer keeps of each request's text. A feature's folder defines its kind in `state.py`.

    The fields are whole numbers, as a manifest lists them under `section`. Those named `layer_idx` and `index` may be 0.

    Attributes:
        roles: names of the state tensors, `kv_cache.<role>_<layer_idx>`, followed by `_<index>` where a layer has several.
        by_token: each token has a place of its own, so that requests can share a prefix. Otherwise the state belongs to all
            tokens of a slot, and its tensors have a row for each slot.
    """

    section: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    by_token: ClassVar[bool] = False
    layer_idx: int

    @abstractmethod
    def list_sizes(self, config: NeuronConfig) -> Iterable[tuple[str, tuple[int, ...], str]]:
        """Return role, shape and dtype of the state tensors of this layer."""

    def list_tensors(self, config: NeuronConfig) -> Iterable[TensorSpec]:
        number = "_".join(map(str, self.numbers))
        return [
            TensorSpec(f"kv_cache.{role}_{number}", shape, dtype) for role, shape, dtype in self.list_sizes(config)
        ]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in ("layer_idx", "index") if hasattr(self, name))

    @classmethod
    def list_common_tensors(cls, config: NeuronConfig) -> Iterable[TensorSpec]:
        """Return state tensors that all layers with this kind share."""
        return ()

    @classmethod
    @abstractmethod
    def load_backends(cls) -> tuple[Any, Any]:
        """Import what makes the backends of this kind: a `StateRecorder`, and from a `StepLayout` what serves layers in one step."""

    @classmethod
    def check_config(cls, states: Sequence[Any], model: CheckedModel, config: NeuronConfig) -> None:
        """Raise ValueError, with the remedy, where graphs of a config cannot keep these states of a model; warn of what costs more."""
        return None


@dataclass
class StateRecorder:
    """A backend that computes nothing, and adds the states of each layer to those that are `found`."""

    found: list[Any]
    make_state: Callable[..., Any]

    def add_state(self, twice: str, *sizes: int) -> None:
        """Add a state; raise UnsupportedModelError, in the words `twice`, where the layer has one of that number."""
        state = self.make_state(*sizes)
        if any(each.numbers == state.numbers for each in self.found):
            raise UnsupportedModelError(f"layer {state.layer_idx} keeps {twice}")
        self.found.append(state)
