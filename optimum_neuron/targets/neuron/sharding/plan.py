# SPDX-License-Identifier: Apache-2.0
"""The plan of a model's shards: the part of every tensor that a rank holds, and the modules that compute with parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from .rules import HeadLayout, Section, ShardRule
from .trace import HeadSizes


RANK_BUFFER = "tensor_parallel_rank"
# The rank's own number, `[1]` int32: the one tensor that differs between ranks without being a shard.
RANK_TENSOR = f"model.{RANK_BUFFER}"


@dataclass(frozen=True)
class ShardedHeads:
    """One attention layer: its heads in the whole model, and their places on ranks."""

    sizes: HeadSizes
    layout: HeadLayout


@dataclass(frozen=True)
class ShardedRecurrence:
    """A layer's recurrence. Each rank has as many consecutive heads as any other, and the key heads that these use.

    Attributes:
        heads, key_heads: in the whole model.
        inputs: heads, and numbers of each, of a token's key and of the rest that changes the state (`ScanCall.inputs`).
        sizes: attributes by which the layer's code computes a rank's heads: the part of the layer, the name, a rank's value.
        filters: parameters of its convolutions `[channels, 1, kernel]`, by their names in the layer and in the order of their states.
    """

    world_size: int
    heads: int
    key_heads: int
    inputs: tuple[tuple[int, int], ...]
    sizes: tuple[tuple[str, str, int], ...] = ()
    filters: tuple[str, ...] = ()

    def heads_of(self, rank: int) -> list[int]:
        count = self.heads // self.world_size
        return list(range(rank * count, (rank + 1) * count))

    def key_heads_of(self, rank: int) -> list[int]:
        group = self.heads // self.key_heads
        return sorted({head // group for head in self.heads_of(rank)})

    def inputs_of(self, rank: int) -> list[int]:
        """Return the places of a rank's inputs among those of a token."""
        places, first = list[int](), 0
        for number, (heads, size) in enumerate(self.inputs):
            for head in self.heads_of(rank) if number else self.key_heads_of(rank):
                places += range(first + head * size, first + (head + 1) * size)
            first += heads * size
        return places


@dataclass
class ShardPlan:
    """The way in which `world_size` ranks share a model.

    Tensors have the names that `weights.named_tensors` gives them, modules those of the model.

    Attributes:
        vocab_size: logits of the whole model.
        shapes: of all tensors of the whole model.
        rules: tensors that are cut; a rank holds all others whole.
        row_linears: linear layers with partial sums as outputs.
        reduced: other modules with partial sums as outputs.
        whole_inputs: modules between sharded layers that need their whole input, such as a norm over all heads; and the cut of its last dimension.
        attention: attention layers of which a rank has some heads.
        convolutions: modules that keep inputs of a convolution; each rank has as many consecutive channels as any other.
        recurrences: layers with a recurrence of which a rank has some heads; others are whole on every rank.
        embedding: the input embedding, of which a rank has some rows.
    """

    model_type: str
    world_size: int
    vocab_size: int
    shapes: dict[str, tuple[int, ...]]
    rules: dict[str, ShardRule] = field(default_factory=dict)
    row_linears: list[str] = field(default_factory=list)
    reduced: list[str] = field(default_factory=list)
    whole_inputs: dict[str, Section] = field(default_factory=dict)
    attention: dict[str, ShardedHeads] = field(default_factory=dict)
    convolutions: list[str] = field(default_factory=list)
    recurrences: dict[str, ShardedRecurrence] = field(default_factory=dict)
    embedding: str = ""

    @property
    def local_vocab_size(self) -> int:
        """Return the logits of one rank; the last rank's may be more than the vocabulary has."""
        return -(-self.vocab_size // self.world_size)

    @property
    def whole(self) -> set[str]:
        """Return tensors that every rank holds whole."""
        return self.shapes.keys() - self.rules.keys()

    def cut_tensor(self, name: str, dim: int, *sections: Section) -> None:
        """Add the rule of a tensor, named as in the model; a negative `dim` counts from the end."""
        tensor = f"model.{name}"
        self.rules[tensor] = ShardRule(dim % len(self.shapes[tensor]), sections)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a rank's part of a tensor, the same for all ranks."""
        shape = list(self.shapes[name])
        if name in self.rules:
            rule = self.rules[name]
            shape[rule.dim] = rule.local_size(self.world_size)
        return tuple(shape)

    def channels(self, layer: str, index: int, rank: int) -> tuple[int, ...] | None:
        """Return the channels of a recurrent layer's convolution that a rank has; None for all."""
        rule = self.rules.get(f"model.{layer}.{self.recurrences[layer].filters[index]}")
        return None if rule is None else rule.places(rank, self.world_size)

    def shard(self, tensor: Tensor, name: str, rank: int) -> Tensor:
        """Return a rank's part of a whole tensor: a view of it, or a copy of the part's size."""
        return self.rules[name].shard(tensor, rank, self.world_size) if name in self.rules else tensor

    def make_refusal(self, reason: object) -> ValueError:
        """Return the error that refuses a model."""
        return ValueError(
            f"{self.model_type} cannot be shared by tensor_parallel_size={self.world_size} ranks: {reason}; use "
            f"tensor_parallel_size=1"
        )
