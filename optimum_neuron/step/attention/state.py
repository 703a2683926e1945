# SPDX-License-Identifier: Apache-2.0
"""Keys and values: the state of a layer that attends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import NeuronConfig
from ..layer_state import CheckedModel, LayerState


logger = logging.getLogger(__name__)

# Types of codes, by their names in `NeuronConfig.kv_cache_dtype`.
_CODES = {"int8": "int8", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True)
class KeyValueState(LayerState):
    """Keys and values of one attention layer, `[kv_blocks + trash_blocks, kv_heads, block_length, dim]` each.

    Without blocks that is `[batch_size + 1, kv_heads, sequence_length, dim]`. With `kv_cache_dtype` they are codes, and have scales
    `[..., block_length, 1]` in float32. A layer that attends several times has one such state for each call (LayerCalls).
    """

    section = "layers"
    roles = ("key", "value", "keyscale", "valuescale")
    by_token = True
    kv_heads: int
    key_dim: int
    value_dim: int

    def list_sizes(self, config: NeuronConfig) -> Iterator[tuple[str, tuple[int, ...], str]]:
        places = (config.kv_blocks + config.trash_blocks, self.kv_heads, config.block_length)
        codes = _CODES.get(config.kv_cache_dtype or "")
        for role, dim in (("key", self.key_dim), ("value", self.value_dim)):
            yield role, (*places, dim), codes or config.dtype
            if codes is not None:
                yield f"{role}scale", (*places, 1), "float32"

    @classmethod
    def load_backends(cls) -> tuple[Any, Any]:
        from .cached_attention import CachedAttention, KeyRecorder

        return KeyRecorder, CachedAttention

    @classmethod
    def check_config(cls, states: Sequence[KeyValueState], model: CheckedModel, config: NeuronConfig) -> None:
        if model.attends_alone and config.blocks_in_place:
            raise ValueError(
                f"{model.name} attends by code of its own, over slots, and on target={config.target!r} blocks attend where "
                f"they lie; leave out kv_block_size={config.kv_block_size} and kv_cache_tokens"
            )
        if config.kv_cache_dtype is not None and (model.attends_alone or not states):
            reason = (
                "attends by code of its own, which takes keys and values as numbers, not as codes"
                if states
                else "keeps none: states of recurrences and convolutions stay as they are"
            )
            raise ValueError(
                f"kv_cache_dtype={config.kv_cache_dtype!r} is for keys and values, and {model.name} {reason}; leave it out"
            )
        if model.attends_alone and config.kv_block_size is not None:
            logger.warning(
                "%d layers of %s gather their blocks in each step: they attend by code of their own, over all %d rows of %d tokens, "
                "however few blocks these have; a smaller --batch-size makes steps shorter",
                len(states),
                model.name,
                config.batch_size,
                config.sequence_length,
            )
