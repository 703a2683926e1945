# SPDX-License-Identifier: Apache-2.0
"""Quantized weights in a plan: layers are cut as plain ones would be, and codes, scales and shifts with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from transformers import PreTrainedModel

from ....step.features.codes.modules import QuantizedEmbedding, QuantizedLinear, quantized_weights
from ....step.features.codes.weight import PACKED, QuantizedWeight
from .plan import ShardPlan
from .rules import PADDING, Section, ShardRule


_PARTS = ("codes", "scale", "shift")


def make_plain(model: PreTrainedModel) -> None:
    """Replace a model's quantized layers by plain ones of the same sizes, without values, where tensors have no data."""
    dtype = model.dtype
    for name, module in list(model.named_modules()):
        plain: nn.Module | None = None
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, dtype=dtype)
            plain.register_parameter("bias", module.bias)
        elif isinstance(module, QuantizedEmbedding):
            plain = nn.Embedding(module.num_embeddings, module.embedding_dim, dtype=dtype)
        if plain is not None:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)
        for own, weight in quantized_weights(module).items():
            empty = torch.empty((*weight.codes.shape[:-1], weight.inputs), dtype=dtype)
            module.register_parameter(own, nn.Parameter(empty, requires_grad=False))
            for part in _PARTS:
                delattr(module, f"{own}_{part}")


def cut_quantized(plan: ShardPlan, model: PreTrainedModel, shapes: dict[str, tuple[int, ...]]) -> None:
    """Turn rules of plain weights into those of codes, scales and shifts.

    Args:
        shapes: of the model's own tensors, which become the plan's.

    Raises:
        ValueError: a rank's inputs would begin or end within a group that shares a scale.
    """
    for plain, own, weight in _list_quantized(model):
        rule = plan.rules.pop(plain, None)
        if rule is None:
            continue
        last = weight.codes.dim() - 1
        for part in _PARTS:
            if getattr(weight, part) is None:
                continue
            cut: ShardRule | None = rule
            if rule.dim == last:
                cut = (
                    _codes_of_inputs(plan, plain, rule, weight)
                    if part == "codes"
                    else _of_groups(plan, plain, rule, weight)
                )
            if cut is not None:
                plan.rules[own + part] = cut
    plan.shapes = shapes


def _list_quantized(model: nn.Module) -> Iterator[tuple[str, str, QuantizedWeight]]:
    """Yield quantized weights, each after the name of its plain tensor and the beginning of its own names."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            yield f"model.{name}.weight", f"model.{name}.", module.quantized_weight
        for own, weight in quantized_weights(module).items():
            yield f"model.{name}.{own}", f"model.{name}.{own}_", weight


def _codes_of_inputs(plan: ShardPlan, name: str, rule: ShardRule, weight: QuantizedWeight) -> ShardRule:
    return _divide_rule(plan, name, rule, 2) if weight.kind in PACKED else rule


def _of_groups(plan: ShardPlan, name: str, rule: ShardRule, weight: QuantizedWeight) -> ShardRule | None:
    if weight.group_size < weight.inputs:
        return _divide_rule(plan, name, rule, weight.group_size)
    filled = any(PADDING in each.order or each.size % each.block for each in rule.sections)
    if filled and (weight.kind in PACKED or weight.shift is not None):
        raise plan.make_refusal(f"{name} has places that are filled up, which no code of {weight.kind} is zero for")
    return None


def _divide_rule(plan: ShardPlan, name: str, rule: ShardRule, together: int) -> ShardRule:
    """Return a rule of inputs as one of groups of `together` inputs."""
    sections = [_of_shared(each, together, plan.world_size) for each in rule.sections]
    if None in sections:
        raise plan.make_refusal(
            f"{name.removeprefix('model.')} is quantized in groups of {together} inputs, and a rank's "
            f"{rule.local_size(plan.world_size)} are no whole groups"
        )
    return replace(rule, sections=tuple(each for each in sections if each is not None))


def _of_shared(section: Section, together: int, world_size: int) -> Section | None:
    """Return a section of inputs as one of groups; None where it would part a group."""
    block, order = section.block, section.order
    if block % together:
        # Several blocks, such as heads, share one: they have to stay side by side, on one rank.
        count = together // math.gcd(block, together)
        if len(order) // world_size % count:
            return None
        runs = [order[place : place + count] for place in range(0, len(order), count)]
        firsts = [run[0] // count if run[0] != PADDING else PADDING for run in runs]
        expected = [
            (PADDING,) * count if first == PADDING else tuple(range(first * count, (first + 1) * count))
            for first in firsts
        ]
        if runs != expected:
            return None
        block, order = block * count, tuple(firsts)
    if section.start % together or section.size % together:
        return None
    return Section(section.start // together, section.size // together, block // together, order)
