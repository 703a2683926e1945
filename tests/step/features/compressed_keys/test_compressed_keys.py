# SPDX-License-Identifier: Apache-2.0
"""Layers that attend to a window and to compressed keys: transformers' results, whatever the cut, the neighbors and the slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from feature_models import FEATURES
from torch import Tensor

from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.inspect import look_at
from optimum_neuron.step.attention.masks import CausalMask
from optimum_neuron.step.attention.rows import CompressedKeys
from optimum_neuron.step.features.compressed_keys.compression import (
    CompressingLayers,
    GroupKeys,
    GroupWindows,
    split_joined,
)
from optimum_neuron.step.features.compressed_keys.slot_groups import SlotGroupKeys
from optimum_neuron.step.features.selected_keys.index_keys import ScoresOf
from optimum_neuron.targets.neuron.sharding import shard_plan


MODEL = FEATURES["deepseek_v4"].model


def test_what_does_not_go_with_compressed_keys_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="layer 1 keeps something in a layer of its cache"):
        CompressingLayers(_Groups(), {0: 4})[1]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="its layers keep compressed keys, of which ranks do not have parts yet"):
        shard_plan(MODEL(), 2)


class _Groups:
    """Five compressed keys of ones; and who keeps them."""

    columns = 5

    def take_windows(self, layer: Any, index: int, values: Tensor, gates: Tensor) -> GroupWindows:
        return GroupWindows(values, gates, torch.zeros(1, dtype=torch.int32))

    def add_overlap(self, layer: Any, index: int) -> None:
        """Nothing."""

    def keep_keys(self, layer: Any, index: int, keys: Tensor) -> _Groups:
        assert keys.shape == (3, 4)
        return self

    def attended_keys(self) -> CompressedKeys:
        return CompressedKeys(torch.ones(4, 1, 5, 4), 4)


def standing() -> Iterator[tuple[Callable[[Any, Any], object], str]]:
    """What model code might do with its cache's layer and compressed keys, and the reason for which it is refused."""
    own = torch.ones(1, 1, 3, 4)
    yield lambda layer, keys: layer.buffer_kv, "layer 0 reads .buffer_kv of its cache"
    yield lambda layer, keys: layer.update_compressor_states("other", own[0]), "keys of no tokens by the name 'other'"
    yield (
        lambda layer, keys: layer.store_compression_weights("compressor", own[0], own[0]),
        "twice by the name 'compressor'",
    )
    yield lambda layer, keys: layer.store_compression_weights("other", own[0], own), r"values \[1, 3, 4\] and gates"
    yield lambda layer, keys: keys.sum(), "reads .sum of them"
    yield lambda layer, keys: torch.stack([own[0], keys]), "passes them to stack"
    yield lambda layer, keys: torch.cat([keys.unsqueeze(1), own], dim=2), "in another order than after a step's own"
    yield lambda layer, keys: torch.cat([own, keys.unsqueeze(1)], dim=1), "along dimension 1"
    yield lambda layer, keys: torch.cat([own.expand(1, 2, 3, 4), keys.unsqueeze(1)], dim=2), r"to keys \[1, 2, 3, 4\]"
    yield lambda layer, keys: torch.cat([own, keys.unsqueeze(1)], dim=2).sum(), "reads .sum of them"
    yield lambda layer, keys: torch.relu(torch.cat([own, keys.unsqueeze(1)], dim=2)), "passes them to relu"
    yield lambda layer, keys: split_joined(torch.cat([own, keys.unsqueeze(1)], dim=2), own), "and values with others"


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_are_refused(use: Callable[[Any, Any], object], reason: str) -> None:
    layer = CompressingLayers(_Groups(), {0: 4})[0]  # type: ignore[arg-type]
    layer.store_compression_weights("compressor", torch.ones(1, 3, 4), torch.ones(1, 3, 4))
    keys = layer.update_compressor_states("compressor", torch.ones(1, 3, 4))
    assert isinstance(keys, GroupKeys) and keys.shape == (1, 5, 4)
    with pytest.raises(UnsupportedModelError, match=reason):
        use(layer, keys)


def test_a_layer_that_is_looked_at_makes_a_key_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    compressor = type(MODEL().model.layers[2].self_attn.compressor)
    forward = compressor.forward

    def other(self: Any, hidden_states: Tensor, residual: Tensor, positions: Tensor, values: Any, number: int) -> Any:
        layer = values.layers[number]
        keep = layer.update_compressor_states
        layer.update_compressor_states = lambda name, keys: keep(name, keys[:, :1])
        return forward(self, hidden_states, residual, positions, values, number)

    monkeypatch.setattr(compressor, "forward", other)
    with pytest.raises(UnsupportedModelError, match="layer 2 makes 1 keys of 2 groups of 8 tokens"):
        look_at(MODEL())


def test_a_selection_of_compressed_keys_takes_no_mask() -> None:
    layer = CompressingLayers(_Groups(), {0: 4})[0]  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match="selects compressed keys by other scores"):
        SlotGroupKeys(None, layer, None).select_top(torch.ones(3, 1, 5), ScoresOf(CausalMask(None)), 2)  # type: ignore[arg-type]
