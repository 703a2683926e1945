# SPDX-License-Identifier: Apache-2.0
"""The state tensors that requests keep: their names, shapes and types, in their order. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from ..config import NeuronConfig
from .model_spec import Compression, ConvolutionState, KeySelection, LayerCache, ModelSpec, RecurrentState
from .spec import TensorSpec


# Types of codes, by what `NeuronConfig.kv_cache_dtype` calls them.
_CODES = {"int8": "int8", "fp8": "float8_e4m3fn"}


def group_windows(tokens: int, rate: int) -> int:
    """How many groups of `rate` consecutive tokens a row of so many may end, wherever it begins."""
    return -(-tokens // rate)


def state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """All that requests keep, as state tensors.

    Per attention layer, keys and values `[kv_blocks + trash_blocks, kv_heads, block_length, head_dim]`, which are
    `[batch_size + 1, kv_heads, sequence_length, head_dim]` without blocks, and of codes of `kv_cache_dtype` their scales,
    `[..., block_length, 1]` float32; per layer that selects keys, its index keys, as those of
    one head; per convolution `[batch_size + 1, past, channels]`;
    per recurrence, in float32, `[batch_size + 1, heads, key_dim, value_dim]`; where the target computes in blocks, once more, with a
    tail `[batch_size + 1, scan_block, width]`, and for all of them `[batch_size + 1]` int32 (ScanState, ScanRows); per compression
    the last tokens of each slot, `[batch_size + rows, 1, spans * rate, width]`, and its keys, `[batch_size + rows, 1,
    sequence_length // rate, key_dim]`, with as many more rows as take what is nobody's.
    """
    return (
        *_layer_states(config, model.layers),
        *_index_states(config, model.selections),
        *slot_state_specs(config, model),
    )


def slot_state_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Those of all states that are of all tokens of a slot together: a row for each slot, and behind them those that padding is written to."""
    return (
        *_convolution_states(config, model.convolutions),
        *_recurrent_states(config, model.recurrences),
        *_compression_states(config, model.compressions),
    )


def snapshot_specs(config: NeuronConfig, model: ModelSpec) -> tuple[TensorSpec, ...]:
    """Where copies of slots' states are kept, in the order of `slot_state_specs`: `[snapshot_places, ...]`. No step graph has them."""
    places = config.snapshot_places
    return tuple(
        TensorSpec(f"snapshots.{state.name}", (places, *state.shape[1:]), state.dtype)
        for state in slot_state_specs(config, model)
    )


def _layer_states(config: NeuronConfig, layers: Iterable[LayerCache]) -> Iterable[TensorSpec]:
    for layer in layers:
        for role, dim in (("key", layer.key_dim), ("value", layer.value_dim)):
            places = (config.kv_blocks + config.trash_blocks, layer.kv_heads, config.block_length)
            codes = _CODES.get(config.kv_cache_dtype or "")
            yield TensorSpec(f"kv_cache.{role}_{layer.layer_idx}", (*places, dim), codes or config.dtype)
            if codes is not None:
                yield TensorSpec(f"kv_cache.{role}scale_{layer.layer_idx}", (*places, 1), "float32")


def _index_states(config: NeuronConfig, selections: Iterable[KeySelection]) -> Iterable[TensorSpec]:
    for each in selections:
        if each.selects(config):
            shape = (config.kv_blocks + config.trash_blocks, 1, config.block_length, each.key_dim)
            yield TensorSpec(f"kv_cache.index_{each.layer_idx}", shape, config.dtype)


def _convolution_states(config: NeuronConfig, convolutions: Iterable[ConvolutionState]) -> Iterable[TensorSpec]:
    for state in convolutions:
        shape = (config.batch_size + 1, state.past, state.channels)
        yield TensorSpec(f"kv_cache.conv_{state.layer_idx}_{state.index}", shape, config.dtype)


def _recurrent_states(config: NeuronConfig, recurrences: tuple[RecurrentState, ...]) -> Iterable[TensorSpec]:
    slots, block = config.batch_size + 1, config.scan_block
    for state in recurrences:
        number = f"{state.layer_idx}_{state.index}"
        shape = (slots, state.heads, state.key_dim, state.value_dim)
        yield TensorSpec(f"kv_cache.state_{number}", shape, "float32")
        if block is not None:
            yield TensorSpec(f"kv_cache.anchor_{number}", shape, "float32")
            yield TensorSpec(f"kv_cache.tail_{number}", (slots, block, state.width), "float32")
    if recurrences and block is not None:
        yield TensorSpec("kv_cache.scanned", (slots,), "int32")


def _compression_states(config: NeuronConfig, compressions: Iterable[Compression]) -> Iterable[TensorSpec]:
    slots, rows = config.batch_size, config.ctx_batch_size
    for each in compressions:
        if each.has_groups(config):
            length, groups = each.spans * each.rate, config.sequence_length // each.rate
            tokens = slots + rows * config.prefill_chunk_size
            windows = slots + rows * group_windows(config.prefill_chunk_size, each.rate)
            for role, taken, columns, dim in (
                ("buffer", tokens, length, each.width),
                ("group", windows, groups, each.key_dim),
            ):
                shape = (slots + -(-taken // columns), 1, columns, dim)
                yield TensorSpec(f"kv_cache.{role}_{each.layer_idx}_{each.index}", shape, config.dtype)
