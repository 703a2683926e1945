# SPDX-License-Identifier: Apache-2.0
"""Indexers in a step: the cache that they hand keys to, and our functions for those that loop over pools of keys.

Each indexer is known by its attributes and by what its forward takes. `inspect_model` compares what ours computes with the loop.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...attention.masks import CausalMask
from ...serving import StandIn, plain_index
from .index_keys import IndexBackend, IndexKeys


class IndexCache:
    """A cache that keeps index keys and nothing else."""

    is_compileable = False

    def __init__(self, index: IndexBackend) -> None:
        self._index = index

    def get_seq_length(self, layer_idx: int = 0) -> Tensor | int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return sizes without a meaning: masks are made from positions."""
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Any, Any]:
        return key, value

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> IndexKeys:
        return IndexKeys.keep(self._index, plain_index(layer_idx), indexer_key_states)

    @property
    def layers(self) -> Any:
        return IndexLayer(self)


@dataclass(frozen=True)
class IndexLayer(StandIn):
    """A layer of the cache, as far as layers use it that select keys; the item of all layers by a layer's number."""

    pronoun = "a layer of its cache"
    cache: IndexCache
    layer_idx: int = -1

    def __getitem__(self, layer_idx: int) -> IndexLayer:
        return IndexLayer(self.cache, layer_idx)

    def update_index(self, idx_k: Tensor) -> IndexKeys:
        return self.cache.update_indexer(idx_k, self.layer_idx)


def _pools_by_mean(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: CausalMask,
    past_key_values: IndexCache,
) -> Any:
    """Select pools of keys by the mean of each, turned to the place of its first one; and the keys of no complete pool."""
    rotate = vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]
    tokens, width = hidden_states.shape[1], indexer.compress_ratio
    own = indexer.index_qk_proj(hidden_states).unflatten(-1, (-1, indexer.index_head_dim))
    query, keys = own.split([indexer.index_n_heads, indexer.index_kv_heads], dim=2)
    cos, sin = (each[:, -tokens:] for each in position_embeddings)
    query = rotate(indexer.q_layernorm(query), cos=cos, sin=sin, unsqueeze_dim=2)

    def finish_pools(means: Tensor) -> Tensor:
        cos, sin = (each[:, : means.shape[1] * width : width] for each in position_embeddings)
        turned: Tensor = rotate(indexer.k_layernorm(means)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
        return turned

    pools = past_key_values.update_indexer(keys.squeeze(2), indexer.layer_idx).pool_keys(width, finish_pools)
    scores: Any = torch.matmul(query.float(), pools.float().transpose(-1, -2).unsqueeze(1))  # type: ignore[arg-type]
    scores = torch.relu(scores).sum(dim=-2) / math.sqrt(indexer.index_head_dim)
    return (scores + attention_mask).topk(indexer.token_budget // width, dim=-1).indices


# The attributes of an indexer that `_pools_by_mean` reads, and what it takes after the indexer.
_READ = (
    "compress_ratio", "index_head_dim", "index_kv_heads", "index_n_heads", "index_qk_proj", "k_layernorm", "layer_idx", "q_layernorm",
    "token_budget",
)  # fmt: skip
_TAKEN = tuple(inspect.signature(_pools_by_mean).parameters)[1:]


def set_indexers(model: nn.Module) -> None:
    """Make indexers that loop over pools of keys call our function where a step runs."""
    for module in model.modules():
        kind = type(module)
        taken = tuple(inspect.signature(kind.forward).parameters)[1:]
        alike = taken == _TAKEN and all(hasattr(module, name) for name in _READ)
        if alike and not hasattr(kind.forward, "_without_step"):
            kind.forward = _in_steps(kind.forward)


def _in_steps(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = inspect.signature(theirs).bind(*args, **kwargs).arguments["past_key_values"]
        return (_pools_by_mean if isinstance(cache, IndexCache) else theirs)(*args, **kwargs)

    forward._without_step = theirs  # type: ignore[attr-defined]
    return forward
