# SPDX-License-Identifier: Apache-2.0
"""Convolutions over the tokens of a slot: no chunking, neighbor or earlier request of the slot changes a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LENGTH, Opener, decode_tokens, export_tiny, prefill_pieces, random_tokens, reuse_prefix
from torch import Tensor, nn

from optimum_neuron.artifact.artifact import Artifact
from optimum_neuron.errors import UnsupportedModelError
from optimum_neuron.parity.inspect import inspect_model
from optimum_neuron.runtime.runner import GraphRunner
from optimum_neuron.step.attention.kv_cache import KVCache
from optimum_neuron.step.cache_needs import CacheNeeds
from optimum_neuron.step.features.convolution.convolution import ConvolutionInput, SlotConvolutions
from optimum_neuron.step.spec import TensorSpec
from optimum_neuron.targets.neuron.sharding import shard_plan


PROMPT = 17


def continue_by_hand(runner: GraphRunner, slot: int, tokens: np.ndarray) -> Tensor:
    return torch.stack([decode_tokens(runner, {slot: int(token)})[1][slot] for token in tokens])


def test_a_prefix_of_a_slot_is_reused_with_a_snapshot_of_it_alone(open_runner: Opener) -> None:
    runner, prompt = open_runner("lfm2"), random_tokens(PROMPT)
    prefill_pieces(runner, 2, prompt, [8, 9])
    expected = continue_by_hand(runner, 2, prompt[:3])
    prefill_pieces(runner, 0, prompt[:5], [5])
    runner.keep_state(0, 0)
    runner.reset_slot(0)
    prefill_pieces(runner, 0, prompt[:8], [8])
    runner.keep_state(0, 1)
    prefill_pieces(runner, 0, prompt[8:15], [7])
    for action, words in (
        (lambda: reuse_prefix(runner, 0, 0, 5), "slot 0 keeps state of all its tokens together: its first 5 cannot"),
        (lambda: reuse_prefix(runner, 1, 0, 5), "slot 1 keeps state of all its tokens together: its first 5 cannot"),
        (lambda: reuse_prefix(runner, 1, 0, 7, 1), "snapshot 1 holds 8 tokens, and 7 are to be reused"),
        (lambda: reuse_prefix(runner, 1, 0, 8, 0), "snapshot 0 holds 5 tokens, and 8 are to be reused"),
        (lambda: reuse_prefix(runner, 1, 0, 8, 6), "snapshot 6 does not exist: there are 6"),
        (lambda: runner.keep_state(0, -1), "snapshot -1 does not exist: there are 6"),
        (lambda: runner.keep_state(1, 0), "slot 1 holds no tokens"),
    ):
        with pytest.raises(ValueError, match=words):
            action()
    assert runner.lengths.tolist() == [15, 0, 17 + 3]
    for slot in (1, 0):  # a copy, and in place
        reuse_prefix(runner, slot, 0, 8, 1)
        prefill_pieces(runner, slot, prompt[8:], [9])
        assert torch.equal(continue_by_hand(runner, slot, prompt[:3]), expected)


def test_a_model_without_such_state_has_no_snapshots(open_runner: Opener) -> None:
    runner = open_runner("llama")
    prefill_pieces(runner, 0, random_tokens(8), [8])
    with pytest.raises(ValueError, match="this model has no such state"):
        reuse_prefix(runner, 1, 0, 8, 0)
    with pytest.raises(ValueError, match="snapshot 0 does not exist: there are 0"):
        runner.keep_state(0, 0)


def test_older_programs_refuse_an_artifact_whose_state_they_would_overlook(
    sharp_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    for name, version in (("lfm2", 2), ("llama", 1)):
        artifact = Artifact.open(export_tiny(sharp_checkpoints[name], tmp_path / name))
        assert artifact.manifest["format_version"] == version


def test_ranks_keep_as_many_channels_of_a_convolution_each(tiny_models: dict[str, Any]) -> None:
    plan = shard_plan(tiny_models["lfm2"], 4)
    assert plan.convolutions == [f"model.layers.{layer}.conv" for layer in (0, 1, 3)]
    assert plan.local_shape("model.model.layers.0.conv.conv.weight") == (16, 1, 4)
    with pytest.raises(
        ValueError, match=r"lfm2 .* tensor_parallel_size=3 ranks: .* convolves 64 channels, which do not"
    ):
        shard_plan(tiny_models["lfm2"], 3)


def test_a_model_without_such_layers_gets_no_cache(tiny_models: dict[str, nn.Module]) -> None:
    assert {name for name, model in tiny_models.items() if CacheNeeds.read_code(model).convolves} == {"lfm2"}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_slot_in_one_step_is_torchs_causal_convolution(dtype: torch.dtype, bias: bool) -> None:
    layer = nn.Conv1d(6, 6, 4, padding=3, groups=6, bias=bias).to(dtype)
    inputs = torch.randn(1, 6, 9).to(dtype)
    cache = KVCache([TensorSpec("kv_cache.conv_0_0", (3, 3, 6), str(dtype).removeprefix("torch."))])
    convolutions = SlotConvolutions(cache, torch.ones(9, dtype=torch.int32), torch.arange(9, dtype=torch.int32))
    with torch.no_grad():
        standing = ConvolutionInput(inputs, lambda *args: convolutions.convolve(0, 0, *args))
        found, expected = layer._conv_forward(standing, layer.weight, layer.bias), layer(inputs)[:, :, :9]
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found - expected).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()
    assert (
        torch.equal(cache.get_state("conv", 0, 0)[1], inputs[0, :, -3:].T)
        and not cache.get_state("conv", 0, 0)[[0, 2]].any()
    )


def standing() -> Iterator[tuple[Callable[[Any], object], str]]:
    """What model code might do with inputs of a convolution, and the reason for which it is refused."""
    weight = torch.randn(6, 1, 4)
    convolve = nn.functional.conv1d
    yield lambda x: convolve(x, weight, padding=3, groups=6, dilation=2), r"stride, padding and dilation \[1, 3, 2\]"
    yield lambda x: convolve(x, weight, groups=6), r"\[1, 0, 1\]"
    yield lambda x: convolve(x, torch.randn(6, 6, 4), padding=3), "1 groups of 6 channels"
    yield lambda x: torch.cat([x, x]), "to cat"
    yield lambda x: x.transpose(1, 2), r"reads \.transpose"


@pytest.mark.parametrize(("use", "reason"), list(standing()))
def test_other_uses_of_the_inputs_are_refused(use: Callable[[Any], object], reason: str) -> None:
    inputs = ConvolutionInput(torch.randn(1, 6, 9), lambda *_: torch.zeros(()))
    with pytest.raises(UnsupportedModelError, match=reason):
        use(inputs)


def test_two_convolutions_of_one_place_are_refused(tiny_models: dict[str, Any]) -> None:
    layers = tiny_models["lfm2"].model.layers
    layers[1].conv.layer_idx = 0
    try:
        with pytest.raises(ValueError, match="layer 0 keeps inputs of several convolutions in one place"):
            inspect_model(tiny_models["lfm2"])
    finally:
        layers[1].conv.layer_idx = 1


def test_all_of_a_slot_is_read_where_its_length_is_the_longest(open_runner: Opener) -> None:
    runner = open_runner("lfm2")
    text = random_tokens(LENGTH)
    expected = prefill_pieces(runner, 2, text, [8] * 8)
    runner.reset_slots()
    prefill_pieces(runner, 2, text[:-1], [7] * 9)
    assert torch.allclose(decode_tokens(runner, {2: int(text[-1])})[1][2], expected, atol=1e-5)
