# SPDX-License-Identifier: Apache-2.0
"""What the layers of a model keep of a text, and the rest that its graphs have in common. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from ..config import NeuronConfig


@dataclass(frozen=True)
class LayerCache:
    """Sizes of one attention layer's KV cache; `layer_idx` is the layer's own number in the model."""

    layer_idx: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ConvolutionState:
    """What a causal convolution keeps per slot: the inputs of the last `past` tokens.

    Attributes:
        index: which of the layer's convolutions.
    """

    layer_idx: int
    index: int
    past: int
    channels: int


@dataclass(frozen=True)
class RecurrentState:
    """What a recurrence keeps per slot, in float32: a state `[heads, key_dim, value_dim]`, and what the target needs beside it.

    Attributes:
        index: which of the layer's recurrences.
        width: numbers of a token that change the state.
    """

    layer_idx: int
    index: int
    heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def is_selective(self) -> bool:
        """Whether each of its columns has decays of its own, by the numbers of a token: a key, values, and as many decays."""
        return self.heads == 1 and self.width == self.key_dim + 2 * self.value_dim


@dataclass(frozen=True)
class KeySelection:
    """A layer that attends to the keys that it selects: it keeps an index key per token, where some may be left out.

    Attributes:
        key_dim: of an index key.
        always: so many keys are all attended to, whatever their scores.
        width: so many keys are selected together, which stand side by side.
    """

    layer_idx: int
    key_dim: int
    always: int
    width: int = 1

    def selects(self, config: NeuronConfig) -> bool:
        """Whether a token of these graphs may see more keys than it attends to."""
        return self.always < config.sequence_length


@dataclass(frozen=True)
class Compression:
    """Keys of a layer that stand for `rate` consecutive tokens each, and what slots keep until they have all of these.

    Attributes:
        index: which of the layer's compressions.
        spans: groups of `rate` tokens that a key is made of: its own, and where it is 2 the one before it.
        width: numbers of a token that keys are made of.
        key_dim: of a key.
    """

    layer_idx: int
    index: int
    rate: int
    spans: int
    width: int
    key_dim: int

    def has_groups(self, config: NeuronConfig) -> bool:
        """Whether a text of these graphs may have as many tokens as a key stands for."""
        return self.rate <= config.sequence_length


@dataclass(frozen=True)
class ModelSpec:
    """What the graphs of one model have in common: found by running the model once, not read from its config.

    Attributes:
        vocab_size: token ids that it chooses among, the width of its logits.
        num_embeddings: token ids that it can be given, the rows of the smallest table that it looks them up in.
    """

    vocab_size: int
    layers: tuple[LayerCache, ...]
    convolutions: tuple[ConvolutionState, ...] = ()
    recurrences: tuple[RecurrentState, ...] = ()
    selections: tuple[KeySelection, ...] = ()
    compressions: tuple[Compression, ...] = ()
    num_embeddings: int = field(kw_only=True)

    @property
    def reuses_prefixes(self) -> bool:
        """Whether a slot's first tokens alone can be another request's: not where state belongs to all tokens of a slot."""
        return not self.convolutions and not self.recurrences and not self.compressions

    @property
    def stateful_layers(self) -> set[int]:
        """Numbers of the layers that keep inputs of convolutions, states of recurrences, or compressed keys."""
        layers = {each.layer_idx for each in self.convolutions} | {each.layer_idx for each in self.recurrences}
        return layers | {each.layer_idx for each in self.compressions}

    @property
    def depth(self) -> int:
        """How many layers keep anything of a text."""
        return len({layer.layer_idx for layer in self.layers} | self.stateful_layers)

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "vocab_size": self.vocab_size,
            "num_embeddings": self.num_embeddings,
            "layers": [asdict(layer) for layer in self.layers],
        }
        if self.convolutions:
            data["convolutions"] = [asdict(state) for state in self.convolutions]
        if self.recurrences:
            data["recurrences"] = [asdict(state) for state in self.recurrences]
        if self.selections:
            data["selections"] = [asdict(selection) for selection in self.selections]
        if self.compressions:
            data["compressions"] = [asdict(compression) for compression in self.compressions]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelSpec:
        return cls(
            data["vocab_size"],
            tuple(LayerCache(**layer) for layer in data["layers"]),
            tuple(ConvolutionState(**state) for state in data.get("convolutions", ())),
            tuple(RecurrentState(**state) for state in data.get("recurrences", ())),
            tuple(KeySelection(**selection) for selection in data.get("selections", ())),
            tuple(Compression(**compression) for compression in data.get("compressions", ())),
            num_embeddings=data.get("num_embeddings", data["vocab_size"]),
        )
