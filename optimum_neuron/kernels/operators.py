# SPDX-License-Identifier: Apache-2.0
"""The operators that the kernels compute, as torch knows them: their schemas, and the shapes of their results.

In a traced program they are one node each. Called on tensors they compute nothing: a plan alone runs them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


NAMESPACE = "optimum_neuron_cpu"

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "attend(Tensor query, Tensor keys, Tensor values, Tensor? blocks, Tensor position_ids, float scaling, "
    "int sliding_window, float softcap, Tensor? sinks, Tensor? column_bias, Tensor? key_scale, Tensor? value_scale) -> Tensor"
)
_library.define("write_cache(Tensor(a!) cache, Tensor states, Tensor blocks, Tensor columns) -> ()")
_library.define("write_codes(Tensor(a!) codes, Tensor(b!) scale, Tensor states, Tensor blocks, Tensor columns) -> ()")
_library.define("expert_linear(Tensor x, Tensor index, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "quantized_linear(Tensor x, str kind, Tensor codes, Tensor scale, Tensor? shift, Tensor? bias, str? activations) -> Tensor"
)
_library.define(
    "quantized_expert_linear(Tensor x, Tensor index, str kind, Tensor codes, Tensor scale, Tensor? shift, Tensor? bias, "
    "str? activations) -> Tensor"
)
_library.define(
    "convolve(Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor slots, Tensor positions) -> Tensor"
)
_library.define(
    "walk(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? share, Tensor? rates, Tensor(a!) state, "
    "Tensor slots, Tensor positions) -> Tensor"
)
_library.define("output_rows(Tensor rows) -> Tensor")
_library.define("rotate_half(Tensor x) -> Tensor")
_library.define("sample(Tensor logits, Tensor sampling_params, Tensor uniforms) -> Tensor")


def _attended(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: Tensor | None,
    position_ids: Tensor,
    scaling: float,
    sliding_window: int,
    softcap: float,
    sinks: Tensor | None,
    column_bias: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Tensor:
    rows, heads, tokens, dim = query.shape
    return query.new_empty((rows, tokens, heads, dim))


def _written(cache: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    return None


def _written_as_codes(codes: Tensor, scale: Tensor, states: Tensor, blocks: Tensor, columns: Tensor) -> None:
    return None


def _projected(x: Tensor, index: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*index.shape, weight.shape[1]))


def _multiplied(
    x: Tensor,
    kind: str,
    codes: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    bias: Tensor | None,
    activations: str | None,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


def _projected_by_codes(
    x: Tensor,
    index: Tensor,
    kind: str,
    codes: Tensor,
    scale: Tensor,
    shift: Tensor | None,
    bias: Tensor | None,
    activations: str | None,
) -> Tensor:
    return x.new_empty((*index.shape, codes.shape[1]))


def _convolved(
    inputs: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    return inputs.new_empty(inputs.shape, dtype=torch.float32)


def _walked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    share: Tensor | None,
    rates: Tensor | None,
    state: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    return torch.empty_like(value)


def _marked(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


def _chosen(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int32)


_SHAPES: dict[str, Any] = {
    "attend": _attended,
    "write_cache": _written,
    "write_codes": _written_as_codes,
    "expert_linear": _projected,
    "quantized_linear": _multiplied,
    "quantized_expert_linear": _projected_by_codes,
    "convolve": _convolved,
    "walk": _walked,
    "output_rows": _marked,
    "rotate_half": _marked,
    "sample": _chosen,
}
for _name, _shapes in _SHAPES.items():
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _shapes, lib=_library)
