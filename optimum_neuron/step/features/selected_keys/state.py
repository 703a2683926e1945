# SPDX-License-Identifier: Apache-2.0
"""Index keys: the state of a layer that selects the keys it attends to."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....config import NeuronConfig
from ...layer_state import CheckedModel, LayerState


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IndexKeyState(LayerState):
    """An index key for each token. Tokens attend to `always` keys, whatever their scores; `width` neighbors are selected together."""

    section = "selections"
    roles = ("index",)
    by_token = True
    key_dim: int
    always: int
    width: int = 1

    def selects_keys(self, config: NeuronConfig) -> bool:
        return self.always < config.sequence_length

    def list_sizes(self, config: NeuronConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
        if self.selects_keys(config):
            places = config.kv_blocks + config.trash_blocks
            yield "index", (places, 1, config.block_length, self.key_dim), config.dtype

    @classmethod
    def load_backends(cls) -> tuple[Any, Any]:
        from .index_keys import IndexRecorder
        from .slot_index import SlotIndex

        return IndexRecorder, SlotIndex

    @classmethod
    def check_config(cls, states: Sequence[IndexKeyState], model: CheckedModel, config: NeuronConfig) -> None:
        selecting = [each for each in states if each.selects_keys(config)]
        if selecting and config.blocks_in_place:
            raise ValueError(
                f"{len(selecting)} layers of {model.name} select {min(each.always for each in states)} keys of up to "
                f"sequence_length={config.sequence_length}, and on target={config.target!r} blocks attend where they lie, all of them; "
                f"leave out kv_block_size={config.kv_block_size} and kv_cache_tokens, or lower sequence_length"
            )
        without = [each for each in states if each not in selecting]
        if without:
            logger.warning(
                "%d layers of %s attend to all keys, and their selection is left out: they select %d, and no text has more than %d tokens",
                len(without),
                model.name,
                min(each.always for each in without),
                config.sequence_length,
            )
