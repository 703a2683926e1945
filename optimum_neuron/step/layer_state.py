# SPDX-License-Identifier: Apache-2.0
"""The interface of a kind of layer state; model_spec.py lists all kinds. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..config import NeuronConfig
from .spec import TensorSpec


@dataclass(frozen=True)
class CheckedModel:
    """A model's class name, for messages, and whether its own code attends, without transformers' attention interface."""

    name: str
    attends_alone: bool


@dataclass(frozen=True)
class LayerState(ABC):
    """Something that one layer keeps of each request's text. A feature's folder defines its kind in `state.py`.

    The fields are whole numbers. A manifest lists them as they are. Those named `layer_idx` and `index` may be 0.

    Attributes:
        section: the key of such states in a manifest.
        roles: names of the state tensors, `kv_cache.<role>_<layer_idx>`, followed by `_<index>` where a layer has several.
        by_token: each token has a place of its own, so that requests can share a prefix. Otherwise the state belongs to all
            tokens of a slot, and its tensors have a row for each slot.
        layer_idx: the layer's number in the model.
    """

    section: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]
    by_token: ClassVar[bool] = False
    layer_idx: int

    @abstractmethod
    def list_tensors(self, config: NeuronConfig) -> Iterable[TensorSpec]:
        """Return the state tensors of this layer."""

    @classmethod
    def list_common_tensors(cls, config: NeuronConfig) -> Iterable[TensorSpec]:
        """Return state tensors that all layers with this kind share."""
        return ()

    @classmethod
    @abstractmethod
    def load_backends(cls) -> tuple[Any, Any]:
        """Import what makes the backends of this kind.

        Returns:
            From a list and the kind, a recorder, which computes nothing and adds the states of each layer to the list; and from a
            `StepLayout` the backend that serves layers in one step.
        """

    @classmethod
    def check_config(cls, states: Sequence[Any], model: CheckedModel, config: NeuronConfig) -> None:
        """Check that graphs of a config can keep these states of one model; warn of what costs more.

        Raises:
            ValueError: they cannot; the message names the option and the remedy.
        """
        return None
