# SPDX-License-Identifier: Apache-2.0
"""Compressed keys: the state of a layer that attends to keys made of several tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....config import NeuronConfig
from ...layer_state import CheckedModel, LayerState


@dataclass(frozen=True)
class CompressedKeyState(LayerState):
    """Keys for `rate` consecutive tokens each, and the last tokens of each slot, which no key is made of yet.

    The tokens are `[batch_size + rows, 1, spans * rate, width]`, the keys `[batch_size + rows, 1, sequence_length // rate, key_dim]`,
    with as many more rows as take padding. A key is made of `spans` groups: its own, and with 2 the one before it.
    """

    section = "compressions"
    roles = ("buffer", "group")
    index: int
    rate: int
    spans: int
    width: int
    key_dim: int

    def has_groups(self, config: NeuronConfig) -> bool:
        return self.rate <= config.sequence_length

    def list_sizes(self, config: NeuronConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
        if not self.has_groups(config):
            return
        slots, windows = config.batch_size, config.ctx_batch_size * -(-config.prefill_chunk_size // self.rate)
        for role, taken, columns, dim in (
            ("buffer", slots + config.prompt_capacity, self.spans * self.rate, self.width),
            ("group", slots + windows, config.sequence_length // self.rate, self.key_dim),
        ):
            yield role, (slots + -(-taken // columns), 1, columns, dim), config.dtype

    @classmethod
    def load_backends(cls) -> tuple[Any, Any]:
        from .compression import CompressionRecorder
        from .slot_groups import SlotGroups

        return CompressionRecorder, SlotGroups

    @classmethod
    def check_config(cls, states: Sequence[CompressedKeyState], model: CheckedModel, config: NeuronConfig) -> None:
        layers = len({each.layer_idx for each in states if each.has_groups(config)})
        if layers and config.blocks_in_place:
            raise ValueError(
                f"{layers} layers of {model.name} keep compressed keys, a slot's side by side, and on target={config.target!r} "
                f"blocks attend where they lie; leave out kv_block_size={config.kv_block_size} and kv_cache_tokens"
            )
        if layers and config.kv_cache_dtype is not None:
            raise ValueError(
                f"{layers} layers of {model.name} attend to compressed keys and to others, and "
                f"kv_cache_dtype={config.kv_cache_dtype!r} has no codes of these; leave it out"
            )
