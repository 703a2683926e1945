# SPDX-License-Identifier: Apache-2.0
"""The facts that all graphs of one model share, and the list of kinds of layer state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from ..config import NeuronConfig
from .attention.state import KeyValueState
from .features.compressed_keys.state import CompressedKeyState
from .features.convolution.state import ConvolutionState
from .features.recurrence.state import RecurrentState
from .features.selected_keys.state import IndexKeyState
from .layer_state import LayerState


# A new kind of state goes here. The order is that of the state tensors, after those that have a place for each token.
KINDS: tuple[type[LayerState], ...] = (
    KeyValueState,
    ConvolutionState,
    RecurrentState,
    IndexKeyState,
    CompressedKeyState,
)
SECTIONS = tuple(kind.section for kind in KINDS)
_Kind = TypeVar("_Kind", bound=LayerState)


@dataclass(frozen=True)
class ModelSpec:
    """Facts of one model, found by running the model once rather than read from its config.

    Attributes:
        vocab_size: token ids that it chooses among, the width of its logits.
        states: what its layers keep, sorted by kind.
        num_embeddings: token ids that it can be given.
    """

    vocab_size: int
    states: tuple[LayerState, ...]
    num_embeddings: int = field(kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "states", tuple(sorted(self.states, key=lambda state: KINDS.index(type(state)))))

    def states_of(self, kind: type[_Kind]) -> tuple[_Kind, ...]:
        return tuple(state for state in self.states if isinstance(state, kind))

    @property
    def reuses_prefixes(self) -> bool:
        """Return whether requests can share the first tokens of a slot: a state of all its tokens allows none."""
        return all(state.by_token for state in self.states)

    @property
    def depth(self) -> int:
        """The number of layers that keep anything."""
        return len({state.layer_idx for state in self.states})

    def check_kept_states(self, name: str, config: NeuronConfig) -> None:
        """Raise ValueError where a config asks for copies of state that the slots of the named model do not keep."""
        for option, count in config.kept_states.items():
            if count and self.reuses_prefixes:
                raise ValueError(
                    f"{option}={count} is for state that slots keep, and those of {name} keep keys and values alone, of which "
                    f"any prefix is reused; leave {option} out"
                )

    def to_dict(self) -> dict[str, Any]:
        sections = {kind.section: [asdict(state) for state in self.states_of(kind)] for kind in KINDS}
        kept = {name: states for name, states in sections.items() if states or name == KeyValueState.section}
        return {"vocab_size": self.vocab_size, "num_embeddings": self.num_embeddings, **kept}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        states: Iterable[LayerState] = (kind(**state) for kind in KINDS for state in data.get(kind.section, ()))
        embeddings = data.get("num_embeddings", data["vocab_size"])
        return cls(data["vocab_size"], tuple(states), num_embeddings=embeddings)
