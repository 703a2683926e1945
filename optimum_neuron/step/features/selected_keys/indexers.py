# SPDX-License-Identifier: Apache-2.0
"""Indexers that transformers writes as a loop over tokens, whose shapes follow their positions: in a step, the same of all tokens at once.

Each is known by what it has: all that our function reads of it, and a forward that takes what ours does. `inspect_model` compares
what that computes with the loop.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...masks import CausalMask
from ...model_cache import IndexCache


def _pools_by_mean(
    indexer: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: CausalMask,
    past_key_values: IndexCache,
) -> Any:
    """Selects pools of keys by the mean of each, turned to the place of its first one; and the keys of no complete pool.

    Args:
        hidden_states: `[1, tokens, hidden]`.
        position_embeddings: each `[1, columns + tokens, dim]`: of all places of a text, and of the step's tokens.
    """
    rotate = vars(sys.modules[type(indexer).__module__])["apply_rotary_pos_emb"]
    tokens, width = hidden_states.shape[1], indexer.compress_ratio
    own = indexer.index_qk_proj(hidden_states).unflatten(-1, (-1, indexer.index_head_dim))
    query, keys = own.split([indexer.index_n_heads, indexer.index_kv_heads], dim=2)
    cos, sin = (each[:, -tokens:] for each in position_embeddings)
    query = rotate(indexer.q_layernorm(query), cos=cos, sin=sin, unsqueeze_dim=2)

    def finish(means: Tensor) -> Tensor:
        cos, sin = (each[:, : means.shape[1] * width : width] for each in position_embeddings)
        turned: Tensor = rotate(indexer.k_layernorm(means)[:, :, None], cos=cos, sin=sin, unsqueeze_dim=2)[:, :, 0]
        return turned

    pools = past_key_values.update_indexer(keys.squeeze(2), indexer.layer_idx).pooled(width, finish)
    scores: Any = torch.matmul(query.float(), pools.float().transpose(-1, -2).unsqueeze(1))  # type: ignore[arg-type]
    scores = torch.relu(scores).sum(dim=-2) / math.sqrt(indexer.index_head_dim)
    return (scores + attention_mask).topk(indexer.token_budget // width, dim=-1).indices


# By what each function reads of an indexer, beside the rotation of its file.
_OURS: dict[tuple[str, ...], Callable[..., Any]] = {
    (
        "compress_ratio",
        "index_head_dim",
        "index_kv_heads",
        "index_n_heads",
        "index_qk_proj",
        "k_layernorm",
        "layer_idx",
        "q_layernorm",
        "token_budget",
    ): _pools_by_mean,
}


def set_indexers(model: nn.Module) -> None:
    """Has indexers of these mechanisms call our functions, where a step runs."""
    for module in model.modules():
        for names, ours in _OURS.items():
            kind = type(module)
            alike = all(hasattr(module, name) for name in names) and _taken(kind.forward) == _taken(ours)
            if alike and not hasattr(kind.forward, "_without_step"):
                kind.forward = _in_steps(kind.forward, ours)


def _taken(function: Callable[..., Any]) -> list[str]:
    """What a function takes beside the indexer."""
    return list(inspect.signature(function).parameters)[1:]


def _in_steps(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def forward(
        self: Any,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any,
        past_key_values: Any,
    ) -> Any:
        function = ours if isinstance(past_key_values, IndexCache) else theirs
        return function(self, hidden_states, position_embeddings, attention_mask, past_key_values)

    forward._without_step = theirs  # type: ignore[attr-defined]
    return forward
