# SPDX-License-Identifier: Apache-2.0
"""The StepOps of the cpu target, by the operators of the kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.operators import NAMESPACE
from ...kernels.steps.access import COLUMN_BLOCK, HEAD_DIM_LIMIT
from ...step.attention.cached_attention import attend_cache
from ...step.attention.coded_states import Stored
from ...step.attention.kv_cache import write_tokens
from ...step.attention.masks import AttentionChunk
from ...step.attention.rows import AttentionCall, AttentionRows
from ...step.features.codes.weight import PACKED, QuantizedWeight
from ...step.features.experts.experts import ExpertsCall, dense_experts
from ...step.features.recurrence.recurrence import ScanCall, ScanRows, ScanState
from ...step.ops import StepOps


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OWN: Any = getattr(torch.ops, NAMESPACE)


def is_taken(call: AttentionCall, keys: Stored, values: Stored) -> bool:
    """Return whether the attention kernel takes a call. It reads what its tokens see, and no further."""
    plain = not isinstance(call.sliding_window, AttentionChunk) and call.attends_to_all
    return plain and call.query.dtype in DTYPES and max(keys.shape[-1], values.shape[-1]) <= HEAD_DIM_LIMIT


def _attend_in_place(call: AttentionCall, group: AttentionRows, query: Tensor, keys: Stored, values: Stored) -> Tensor:
    """Attend as `attend_cache`, but read slots and blocks in place, and stop at each token's own position."""
    window = call.sliding_window
    if isinstance(window, AttentionChunk) or not is_taken(call, keys, values):
        return attend_cache(call, group, query, keys, values)
    sinks = None if call.sinks is None else call.sinks.float()
    (codes, key_scale), (value_codes, value_scale) = _split_parts(keys), _split_parts(values)
    bias = None if call.column_bias is None else _in_blocks(call.column_bias, group, codes)
    numbers = call.scaling, window or 0, call.softcap or 0.0
    rows = query, codes, value_codes, group.blocks, group.position_ids
    output: Tensor = _OWN.attend(*rows, *numbers, sinks, bias, key_scale, value_scale)
    return output


def _split_parts(states: Stored) -> tuple[Tensor, Tensor | None]:
    return (states, None) if isinstance(states, Tensor) else (states.codes, states.scale)


def _in_blocks(column_bias: Tensor, group: AttentionRows, keys: Tensor) -> Tensor:
    """Return a table for all columns that a row may have, to the end of the kernel's last block: it reads whole vectors."""
    per_row = group.blocks.shape[1] if group.blocks is not None and group.blocks.dim() == 2 else 1
    width = -(-keys.shape[2] * per_row // COLUMN_BLOCK) * COLUMN_BLOCK
    table = column_bias[:, :width].float()
    return nn.functional.pad(table, (0, width - table.shape[1])).contiguous()


def _write_cache(cache: Stored, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    """Write as `kv_cache.write_tokens`."""
    if isinstance(cache, Tensor):
        _OWN.write_cache(cache, states, blocks, columns)
    elif states.dtype in DTYPES:
        _OWN.write_codes(cache.codes, cache.scale, states, blocks, columns)
    else:
        write_tokens(cache, states, blocks, columns, _OWN.write_cache)


def _grouped_experts(call: ExpertsCall) -> Tensor:
    """Compute as `dense_experts`, but the experts in use alone: a token's result depends on it and its experts only, to the bit."""
    if call.layer.is_transposed or call.compute_dtype not in DTYPES:
        return dense_experts(call)
    index = call.index.to(torch.int32)
    up = expert_linear(call.hidden_states.to(call.compute_dtype), index, call.up_weight, call.up_bias)
    return call.weighted_sum(call.normalize(expert_linear(call.activate(up), index, call.down_weight, call.down_bias)))


def expert_linear(x: Tensor, index: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Return the results `[tokens, k, outputs]` of experts' linear layers, zero where a token goes nowhere; raise as `check_quantized`.

    Args:
        x: `[tokens, inputs]`, or `[tokens, k, inputs]`.
        index: `[tokens, k]` int32; from `experts` on: nowhere.
        weight, bias: `[experts, outputs, inputs]` and `[experts, outputs]`.
    """
    output: Tensor
    if isinstance(weight, Tensor):
        output = _OWN.expert_linear(x, index, weight, bias)
    else:
        check_quantized(weight, x.dtype)
        parts = weight.kind, weight.codes, weight.scale, weight.shift
        output = _OWN.quantized_expert_linear(x, index, *parts, bias, weight.activations)
    return output


def _quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Multiply as `reference_product`, but read codes, and keep no dequantized weight; raise ValueError as `check_quantized`."""
    check_quantized(weight, x.dtype)
    parts = weight.kind, weight.codes, weight.scale, weight.shift
    output: Tensor = _OWN.quantized_linear(x, *parts, bias, weight.activations)
    return output


def check_quantized(weight: QuantizedWeight, dtype: torch.dtype) -> None:
    """Raise ValueError where the kernels take no such weight, or no input of this type."""
    if weight.kind in PACKED and weight.group_size % 2:
        raise ValueError(
            f"a quantized weight of {weight.kind} has {weight.group_size} inputs to a scale, and target='cpu' takes two codes of a "
            f"byte with one scale; quantize it with groups of an even size, or export with target='eager'"
        )
    if dtype not in DTYPES:
        taken = ", ".join(map(str, DTYPES))
        raise ValueError(f"a quantized weight meets {dtype}, and target='cpu' multiplies {taken}")


def _convolve_slots(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Convolve as `SlotConvolutions`, but read a slot's own inputs, and no other slot's."""
    own_bias = None if bias is None else bias.float()
    outputs: Tensor = _OWN.convolve(inputs, weight.float().t().contiguous(), own_bias, state, slots, positions)
    return outputs


def _walk_tokens(call: ScanCall, rows: ScanRows, state: ScanState) -> Tensor:
    """Scan as StepOps, but token by token, with each slot's state in place."""
    decay = call.decay if call.rates is not None else call.decay.exp()
    decay = decay if decay.dim() == 3 else decay[..., None]
    given = call.query, call.key, call.value, decay, call.beta, call.rates
    outputs: Tensor = _OWN.walk(*given, state.current, rows.slots, rows.positions)
    return outputs


OPS = StepOps(
    attend_cache=_attend_in_place,
    write_cache=_write_cache,
    reads_visible=is_taken,
    quantized_linear=_quantized_linear,
    convolve=_convolve_slots,
    experts=_grouped_experts,
    delta_rule=_walk_tokens,
    state_space_scan=_walk_tokens,
    selective_scan=_walk_tokens,
    sample=_OWN.sample,  # the tokens of `sample`, but a greedy row's logits are read once
    output_rows=_OWN.output_rows,  # marks the tokens that reach the model's head: a plan leaves out what they do not need
)
