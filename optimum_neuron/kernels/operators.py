# SPDX-License-Identifier: Apache-2.0
"""The operators that the kernels compute, as torch knows them: their schemas, and the shapes of their results.

In a traced program they are one node each. Called on tensors they compute nothing: a plan alone runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


NAMESPACE = "optimum_neuron_cpu"


def _no_result(*operands: Any) -> None:
    return None


def _like_first(first: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(first)


# Each schema, with a function that gives a result without its numbers.
_OPERATORS: dict[str, Callable[..., Tensor | None]] = {
    "attend(Tensor query, Tensor keys, Tensor values, Tensor? blocks, Tensor positions, float scaling, int window, "
    "float softcap, Tensor? sinks, Tensor? column_bias, Tensor? key_scale, Tensor? value_scale) -> Tensor": lambda query, keys, values, *others: (
        query.new_empty((query.shape[0], query.shape[2], query.shape[1], values.shape[-1]))
    ),
    "write_cache(Tensor(a!) cache, Tensor states, Tensor blocks, Tensor columns) -> ()": _no_result,
    "write_codes(Tensor(a!) codes, Tensor(b!) scale, Tensor states, Tensor blocks, Tensor columns) -> ()": _no_result,
    "expert_linear(Tensor x, Tensor index, Tensor weight, Tensor? bias) -> Tensor": (
        lambda x, index, weight, bias: x.new_empty((*index.shape, weight.shape[1]))
    ),
    "quantized_linear(Tensor x, str kind, Tensor codes, Tensor scale, Tensor? shift, Tensor? bias, str? activations) -> Tensor": (
        lambda x, kind, codes, *others: x.new_empty((*x.shape[:-1], codes.shape[0]))
    ),
    "quantized_expert_linear(Tensor x, Tensor index, str kind, Tensor codes, Tensor scale, Tensor? shift, Tensor? bias, "
    "str? activations) -> Tensor": lambda x, index, kind, codes, *others: x.new_empty((*index.shape, codes.shape[1])),
    "convolve(Tensor inputs, Tensor weight, Tensor? bias, Tensor(a!) state, Tensor slots, Tensor positions) -> Tensor": (
        lambda inputs, *others: inputs.new_empty(inputs.shape, dtype=torch.float32)
    ),
    "walk(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? share, Tensor? rates, Tensor(a!) state, Tensor slots, "
    "Tensor positions) -> Tensor": lambda query, key, value, *others: torch.empty_like(value),
    "output_rows(Tensor rows) -> Tensor": _like_first,
    "rotate_half(Tensor x) -> Tensor": _like_first,
    "sample(Tensor logits, Tensor params, Tensor uniforms) -> Tensor": (
        lambda logits, *others: logits.new_empty(logits.shape[0], dtype=torch.int32)
    ),
}
_library = torch.library.Library(NAMESPACE, "DEF")
for _schema, _result in _OPERATORS.items():
    _library.define(_schema)
    torch.library.register_fake(f"{NAMESPACE}::{_schema.partition('(')[0]}", _result, lib=_library)
