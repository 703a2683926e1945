# SPDX-License-Identifier: Apache-2.0
"""The way from a model to its plan. Quantized layers are cut as plain ones would be, and codes, scales and shifts with them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest

import torch
from torch import nn
from transformers import PreTrainedModel

from ....artifact.weights import named_tensors
from ....errors import first_line
from ....step.cache_needs import CacheNeeds, keeps_convolution, keeps_keys, keeps_recurrence
from ....step.features.codes.modules import QuantizedEmbedding, QuantizedLinear, is_experts, quantized_weights
from ....step.features.codes.weight import PACKED
from ..operators.codes import list_quantized
from . import layers
from .modules import apply_plan
from .plan import PADDING, Section, ShardPlan, ShardRule
from .random_layers import find_blocks
from .recurrences import find_recurrences
from .trace import ModelTrace, data_free_copy, is_below, is_linear, no_data, trace_model


_PARTS = ("codes", "scale", "shift")


def shard_plan(model: PreTrainedModel, world_size: int) -> ShardPlan:
    """Decide how ranks, 2 or more, share a causal language model: by its own plan and by what its modules are.

    The plan is tried on a copy without data, so that whatever a rank's code cannot do is known now.

    Args:
        model: with the cached attention; no parameter is read, so all may be on the meta device.

    Raises:
        ValueError: a layer cannot be shared exactly; the message names it and the reason.
    """
    if world_size < 2:
        raise ValueError(f"world_size={world_size} shares nothing; a plan is for 2 ranks or more")
    with no_data():
        twin = data_free_copy(model)
        _make_plain(twin)
    head = twin.get_output_embeddings()
    plan = ShardPlan(model.config.model_type, world_size, getattr(head, "out_features", 0), _read_shapes(twin))
    if not isinstance(twin.get_input_embeddings(), nn.Embedding) or head is None or not is_linear(head):
        raise plan.make_refusal("its vocabulary is not one embedding and one linear output layer")
    needs = CacheNeeds.read_code(model)
    if needs.biased or (needs.by_itself and any(map(keeps_keys, model.modules()))):
        raise plan.make_refusal("it attends in code of its own, and no rule cuts heads there")
    if needs.rates:
        raise plan.make_refusal("its layers keep compressed keys, of which ranks do not have parts yet")
    with no_data():
        whole = _trace_copy(plan, twin, "its code cannot be followed without data")
        _fill_plan(plan, twin, whole)
        apply_plan(twin, plan)
        _check_rank(plan, whole, _trace_copy(plan, twin, "its code does not run on a rank's part of it"))
    _cut_quantized(plan, model, _read_shapes(model))
    return plan


def whole_plan(model: PreTrainedModel) -> ShardPlan:
    logits = getattr(model.get_output_embeddings(), "out_features", 0)
    return ShardPlan(model.config.model_type, 1, logits, _read_shapes(model))


def _read_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()}


def _trace_copy(plan: ShardPlan, model: PreTrainedModel, complaint: str) -> ModelTrace:
    try:
        return trace_model(model)
    except (RuntimeError, TypeError, ValueError) as error:
        raise plan.make_refusal(f"{complaint}: {first_line(error)}") from error


def _fill_plan(plan: ShardPlan, model: PreTrainedModel, trace: ModelTrace) -> None:
    if (heads := trace.selecting_heads) > 1:
        reason = f"its layers select keys for each of {heads} heads, and ranks have no parts of a selection"
        raise plan.make_refusal(reason)
    layers.share_vocabulary(plan, model)
    recurrent = find_recurrences(model, trace, plan.world_size)
    for layer in recurrent:
        layers.share_recurrence(plan, layer)
    styles = {
        name: style
        for name, style in layers.planned_styles(model).items()
        if f"model.{name}.weight" not in plan.rules and not any(is_below(name, each.name) for each in recurrent)
    }
    _check_whole_recurrences(plan, model, styles)
    if not styles:
        blocks = [block for block in find_blocks(model, trace, plan.world_size) if block.name not in plan.recurrences]
        others = {name for block in blocks for name in (*block.inner, block.outer)}
        others |= {name for layer in plan.recurrences for name in trace.inputs if is_below(name, layer)}
        styles = layers.derive_styles(plan, model, trace, others)
        for block in blocks:
            layers.share_block(plan, model, block)
    elif any(keeps_convolution(module) and not keeps_recurrence(module) for module in model.modules()):
        raise plan.make_refusal("its layers convolve, and its own plan (base_model_tp_plan) cuts no convolution")
    for name, module in model.named_modules():
        if is_experts(module):
            layers.share_experts(plan, name, module)
            styles = {each: style for each, style in styles.items() if each != name and not is_below(each, name)}
    reduced = [name for name, style in styles.items() if style in layers.REDUCED]
    styles = {name: style for name, style in styles.items() if _is_to_cut(plan, model, name, style)}
    matrices = [name for name in styles if len(plan.shapes.get(f"model.{name}", ())) > 1]
    for name in trace.attention:
        inside = {each: style for each, style in styles.items() if is_below(each, name)}
        if inside:
            layers.share_attention(plan, trace, name, inside)
        styles = {each: style for each, style in styles.items() if each not in inside}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in styles):
        siblings = {name: style for name, style in styles.items() if name.rpartition(".")[0] == parent}
        layers.share_siblings(plan, trace, siblings)
    layers.share_norms(plan, model, trace)
    _sum_once(plan, reduced, matrices)


def _check_whole_recurrences(plan: ShardPlan, model: PreTrainedModel, styles: Mapping[str, str]) -> None:
    """Refuse a model's own plan that cuts a recurrence which every rank holds whole."""
    recurrent = [name for name, module in model.named_modules() if keeps_recurrence(module)]
    whole = [name for name in recurrent if name not in plan.recurrences]
    if whole and not styles:
        raise plan.make_refusal(
            f"the heads of {whole[0]}, which keeps the state of a recurrence, cannot be cut, and it declares no plan "
            f"(base_model_tp_plan) of what ranks share besides"
        )
    for name, style in styles.items():
        if style in layers.CUT and any(is_below(name, layer) for layer in whole):
            raise plan.make_refusal(f"its plan cuts {name} in a layer with a recurrence, which every rank has whole")


def _is_to_cut(plan: ShardPlan, model: PreTrainedModel, name: str, style: str) -> bool:
    """Return whether a style cuts a parameter or a plain linear layer; other layers stay whole where their style is."""
    if style in (*layers.REDUCED, *layers.REPLICATED):
        return False
    if style not in (*layers.CUT, *layers.WHOLE):
        raise plan.make_refusal(f"{name} has the style {style}, for which there is no rule")
    if f"model.{name}" in plan.shapes or is_linear(model.get_submodule(name)):
        return True
    if style in layers.WHOLE:
        return False
    kind = type(model.get_submodule(name)).__name__
    raise plan.make_refusal(f"{name} has the style {style}, and is a {kind} instead of a plain linear layer")


def _sum_once(plan: ShardPlan, modules: list[str], matrices: list[str]) -> None:
    """Sum the outputs of `modules` that hold cut matrices other than those of linear layers, which sum their own."""
    plan.reduced += [name for name in modules if any(is_below(each, name) for each in matrices)]
    for matrix in matrices:
        sums = sum(is_below(matrix, name) for name in plan.reduced)
        if sums != 1:
            raise plan.make_refusal(f"{matrix} is cut, and {sums} modules of its plan sum its results instead of one")
    for linear in plan.row_linears:
        around = next((name for name in plan.reduced if is_below(linear, name)), None)
        if around is not None:
            raise plan.make_refusal(f"{linear} sums its own outputs, and its plan sums those of {around} again")


def _check_rank(plan: ShardPlan, whole: ModelTrace, part: ModelTrace) -> None:
    """Check that a rank runs the same modules as often, over the same sizes, on the heads and to the logits of the plan."""
    runs, rank_runs = (Counter(trace.called) for trace in (whole, part))
    for name in [*runs, *rank_runs]:
        if runs[name] != rank_runs[name]:
            raise plan.make_refusal(f"on a rank's heads, {name} runs {rank_runs[name]} times instead of {runs[name]}")
    for before, after in zip_longest(whole.reductions, part.reductions):
        if before != after:
            raise plan.make_refusal(f"its code mixes values of several ranks: {before} becomes {after}")
    for name, layout in plan.attention.items():
        seen = part.attention[name]
        if (seen.heads, seen.kv_heads) != (layout.local_query, layout.local_key_value):
            raise plan.make_refusal(
                f"{name} computes {seen.heads} query and {seen.kv_heads} key/value heads instead of "
                f"{layout.local_query} and {layout.local_key_value}"
            )
    if part.logits_size != plan.local_vocab_size:
        raise plan.make_refusal(f"its output layer gives {part.logits_size} logits instead of {plan.local_vocab_size}")


def _make_plain(model: PreTrainedModel) -> None:
    """Replace a model's quantized layers by plain ones of the same sizes, without values, where tensors have no data."""
    dtype = model.dtype
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False, dtype=dtype)
            plain.register_parameter("bias", module.bias)
            model.set_submodule(name, plain)
        elif isinstance(module, QuantizedEmbedding):
            model.set_submodule(name, nn.Embedding(module.num_embeddings, module.embedding_dim, dtype=dtype))
        for own, weight in quantized_weights(module).items():
            empty = torch.empty((*weight.codes.shape[:-1], weight.inputs), dtype=dtype)
            module.register_parameter(own, nn.Parameter(empty, requires_grad=False))
            for part in _PARTS:
                delattr(module, f"{own}_{part}")


def _cut_quantized(plan: ShardPlan, model: PreTrainedModel, shapes: dict[str, tuple[int, ...]]) -> None:
    """Turn rules of plain weights into those of codes, scales and shifts; refuse to cut a group that shares a scale.

    `shapes` of the model's own tensors become the plan's.
    """
    for plain, own, weight in list_quantized(model):
        name = f"model.{plain}"
        rule = plan.rules.pop(name, None)
        if rule is None:
            continue
        codes: ShardRule | None = rule
        others: ShardRule | None = rule
        if rule.dim == weight.codes.dim() - 1:
            codes = _divide_rule(plan, name, rule, 2) if weight.kind in PACKED else rule
            others = _divide_rule(plan, name, rule, weight.group_size) if weight.group_size < weight.inputs else None
            filled = any(PADDING in each.order or each.size % each.block for each in rule.sections)
            if others is None and filled and (weight.kind in PACKED or weight.shift is not None):
                raise plan.make_refusal(f"{name} has places that are filled up, and {weight.kind} has no code of zero")
        for part, cut in zip(_PARTS, (codes, others, others), strict=True):
            if cut is not None and getattr(weight, part) is not None:
                plan.rules[f"model.{own}{part}"] = cut
    plan.shapes = shapes


def _divide_rule(plan: ShardPlan, name: str, rule: ShardRule, together: int) -> ShardRule:
    sections = []
    for each in rule.sections:
        # Several blocks, such as heads, may share a group: they have to stay side by side, on one rank.
        count = together // math.gcd(each.block, together)
        order = [block // count if block != PADDING else PADDING for block in each.order[::count]]
        whole = [PADDING if first == PADDING else first * count + place for first in order for place in range(count)]
        parted = len(each.order) // plan.world_size % count or whole != list(each.order)
        if parted or each.start % together or each.size % together:
            raise plan.make_refusal(
                f"{name.removeprefix('model.')} is quantized in groups of {together} inputs, and a rank's "
                f"{rule.local_size(plan.world_size)} are no whole groups"
            )
        block = each.block * count // together
        sections.append(Section(each.start // together, each.size // together, block, tuple(order)))
    return replace(rule, sections=tuple(sections))
