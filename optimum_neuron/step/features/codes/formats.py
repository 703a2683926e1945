# SPDX-License-Identifier: Apache-2.0
"""The forms of a model's quantized weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from .modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    is_experts,
    natural_shape,
    plain_weights,
    quantized_weights,
    replace_embedding,
    replace_linear,
    replace_weights,
)
from .weight import CODE_DTYPES, PACKED, QuantizedWeight


@dataclass(frozen=True)
class WeightFormat:
    """The form of a layer's weight, but for its size: its kind, groups of inputs with a scale each, torch's name of the type of scales.

    `has_shift` is true where values are not symmetric. `activations` name what inputs are rounded to, if anything.
    """

    kind: str
    groups: int
    scale: str
    has_shift: bool
    activations: str | None = None

    @classmethod
    def describe(cls, weight: QuantizedWeight) -> WeightFormat:
        scale = str(weight.scale.dtype).removeprefix("torch.")
        return cls(weight.kind, weight.scale.shape[-1], scale, weight.shift is not None, weight.activations)

    def empty(self, *shape: int) -> QuantizedWeight:
        """Return a weight of this form and a shape `[..., outputs, inputs]`, to be filled; raise ValueError where none has it."""
        *others, outputs, inputs = shape
        if self.kind in PACKED and inputs % 2:
            raise ValueError(f"{self.kind} holds two codes in a byte, and an output has {inputs} inputs")
        columns = inputs // 2 if self.kind in PACKED else inputs
        scales = (*others, outputs, self.groups)
        return QuantizedWeight(
            self.kind,
            torch.empty((*others, outputs, columns), dtype=CODE_DTYPES[self.kind]),
            torch.empty(scales, dtype=getattr(torch, self.scale)),
            torch.empty(scales) if self.has_shift else None,
            self.activations,
        )


def weight_formats(model: nn.Module) -> dict[str, WeightFormat]:
    """Return the forms of a model's quantized weights, by the names of linear layers, tables of embeddings, and parameters of experts."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found[name] = WeightFormat.describe(module.quantized_weight)
        for own, weight in quantized_weights(module).items():
            found[f"{name}.{own}"] = WeightFormat.describe(weight)
    return found


def coded_tensors(model: nn.Module) -> set[str]:
    found = set()
    for name, module in model.named_modules():
        prefixes = [f"{name}.{own}_" for own in quantized_weights(module)]
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            prefixes.append(f"{name}.")
        found |= {f"{prefix}{part}" for prefix in prefixes for part in ("codes", "scale", "shift")}
    return found


def make_room(model: nn.Module, formats: Mapping[str, WeightFormat]) -> None:
    """Replace a model's weights by quantized ones, to be filled, on torch's default device; raise ValueError where it has none such."""
    modules = dict(model.named_modules())
    of_experts: dict[str, dict[str, QuantizedWeight]] = defaultdict(dict)
    for name, form in formats.items():
        module, (layer_name, _, own) = modules.get(name), name.rpartition(".")
        layer = modules.get(layer_name)
        if isinstance(module, nn.Linear):
            replace_linear(model, name, form.empty(module.out_features, module.in_features))
        elif isinstance(module, nn.Embedding):
            replace_embedding(model, name, form.empty(module.num_embeddings, module.embedding_dim))
        elif layer is not None and is_experts(layer) and own in plain_weights(layer):
            of_experts[layer_name][own] = form.empty(*natural_shape(layer, plain_weights(layer)[own]))
        else:
            raise ValueError(
                f"{type(model).__name__} has no linear layer, table or experts {name} for a quantized weight"
            )
    for name, weights in of_experts.items():
        replace_weights(modules[name], weights)
