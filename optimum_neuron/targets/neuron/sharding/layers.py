# SPDX-License-Identifier: Apache-2.0
"""The rules by which layers are cut, each for a part of a plan, and transformers' words for them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ....step.cache_needs import keeps_convolution
from .plan import PADDING, HeadLayout, Section, ShardPlan, by_heads, even, head_layout, packed
from .random_layers import Block
from .recurrences import RecurrentLayer
from .trace import HeadSizes, ModelTrace, is_below


# transformers' styles (transformers.distributed.tensor_parallel), by what they mean for inference.
COLUMN = ("colwise", "packed_colwise")
ROW = ("rowwise", "packed_rowwise")
# Input and output are whole on every rank, so such a layer may as well be kept whole.
WHOLE_COLUMN = ("colwise_gather_output", "colwise_rep")
WHOLE_ROW = ("rowwise_split_input", "rowwise_rep")
PACKED = ("packed_colwise", "packed_rowwise")
REDUCED = ("all_reduce", "moe_tp_experts")
# Differ from whole layers in training alone.
REPLICATED = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
CUT, WHOLE = (*COLUMN, *ROW), (*WHOLE_COLUMN, *WHOLE_ROW)


def share_vocabulary(plan: ShardPlan, model: PreTrainedModel) -> None:
    names = {module: name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    plan.embedding = names[embedding]
    plan.cut_tensor(f"{plan.embedding}.weight", 0, even(embedding.num_embeddings, plan.world_size))
    cut_layer(plan, names[head], True, even(head.out_features, plan.world_size))


def share_experts(plan: ShardPlan, name: str, experts: Any) -> None:
    """Cut each expert's intermediate values, laid out as transformers' experts interface has them; outputs are summed."""
    up_name, count = "gate_up_proj" if experts.has_gate else "up_proj", experts.num_experts
    into, out_of = (-1, -2) if experts.is_transposed else (-2, -1)
    up_size, down_size = experts.get_parameter(up_name).shape[into], experts.get_parameter("down_proj").shape[out_of]
    if experts.has_gate and experts.is_concatenated:
        up = packed(up_size, 2, plan.world_size)
    else:
        up = (even(up_size, plan.world_size, unit=up_size // down_size),)  # gate and up values of one place are a pair
    cuts = {
        up_name: (into, up),
        f"{up_name}_bias": (-1, up),
        "down_proj": (out_of, (even(down_size, plan.world_size),)),
        # Whole on rank 0 and zeros elsewhere: the sum over the ranks counts it once.
        "down_proj_bias": (0, (Section(0, count, count, (0, *[PADDING] * (plan.world_size - 1))),)),
    }
    for parameter, _ in experts.named_parameters():
        if parameter not in cuts:
            raise plan.make_refusal(f"{name} has a parameter {parameter}, which transformers' experts do not have")
        dim, sections = cuts[parameter]
        plan.cut_tensor(f"{name}.{parameter}", dim, *sections)
    plan.reduced.append(name)


def share_attention(plan: ShardPlan, trace: ModelTrace, name: str, styles: Mapping[str, str]) -> None:
    """Cut projections by heads: keys and values by theirs, all else (queries, gates, sinks) by query heads."""
    sizes, values = trace.attention[name], trace.values[name]
    try:
        layout = head_layout(sizes.heads, sizes.kv_heads, plan.world_size)
    except ValueError as error:
        raise plan.make_refusal(f"{name}: {error}") from error
    for layer, style in styles.items():
        size, by_column = _cut_size(plan, layer, style), style in (*COLUMN, *WHOLE_COLUMN)
        if by_column:
            sections = _head_sections(size, style, sizes, layout, values.offset if values.source == layer else 0)
            if not sections:
                raise plan.make_refusal(
                    f"{layer} has {size} outputs, which are not those of {sizes.heads} query or {sizes.kv_heads} "
                    f"key/value heads of {sizes.key_dim} and {sizes.value_dim} values"
                )
        elif size == sizes.heads * sizes.value_dim:
            sections = (by_heads(size, sizes.heads, layout.query),)
        else:
            raise plan.make_refusal(f"{layer} has {size} inputs for {sizes.heads} heads of {sizes.value_dim} values")
        cut_layer(plan, layer, by_column, *sections)
    plan.attention[name] = layout


def _head_sections(
    size: int, style: str, sizes: HeadSizes, layout: HeadLayout, value_offset: int
) -> tuple[Section, ...]:
    """Return the cut of a projection of some size; nothing where its kind is unknown, or one of two."""
    heads, kv_heads = sizes.heads, sizes.kv_heads
    query, key, value = heads * sizes.key_dim, kv_heads * sizes.key_dim, kv_heads * sizes.value_dim
    of_queries = (query, heads * sizes.value_dim, heads)
    if size in (key, value):
        ambiguous = heads != kv_heads and size in of_queries
        return () if ambiguous else (by_heads(size, kv_heads, layout.key_value),)
    if style in WHOLE_COLUMN and size == query + key + value:  # whole, because transformers cannot cut the three apart
        if value_offset != query + key:
            return ()
        keys = by_heads(key, kv_heads, layout.key_value, start=query)
        values = by_heads(value, kv_heads, layout.key_value, start=query + key)
        return by_heads(query, heads, layout.query), keys, values
    # What transformers cuts evenly is a stretch per head; what it keeps whole may be anything of another size.
    known = size % heads == 0 if style == "colwise" else size in of_queries
    return (by_heads(size, heads, layout.query),) if known else ()


def share_block(plan: ShardPlan, model: PreTrainedModel, block: Block) -> None:
    for name, dim, sections in block.rules(plan.world_size):
        if f"model.{name}" in plan.shapes:
            plan.cut_tensor(name, dim, *sections)
    plan.row_linears.append(block.outer)
    if keeps_convolution(model.get_submodule(block.name)):
        if block.places % plan.world_size:
            raise plan.make_refusal(f"{block.name} convolves {block.places} channels, which do not divide")
        plan.convolutions.append(block.name)


def share_recurrence(plan: ShardPlan, layer: RecurrentLayer) -> None:
    for name, rule in layer.rules.items():
        plan.cut_tensor(name, rule.dim, *rule.sections)
    plan.row_linears.append(layer.outer)
    plan.whole_inputs |= layer.norms
    plan.recurrences[layer.name] = layer.shared


def share_siblings(plan: ShardPlan, trace: ModelTrace, styles: Mapping[str, str]) -> None:
    """Cut layers of one module that is no attention, such as gate, up and down of a feed-forward layer."""
    whole = {name: style for name, style in styles.items() if style in (*WHOLE_COLUMN, *WHOLE_ROW)}
    halves = _find_halves(plan, trace, whole)
    for layer, style in styles.items():
        if layer in whole and layer not in halves:
            continue
        parts = 2 if style in (*PACKED, *WHOLE_COLUMN) else 1
        sections = packed(_cut_size(plan, layer, style), parts, plan.world_size)
        cut_layer(plan, layer, style in (*COLUMN, *WHOLE_COLUMN), *sections)


def _find_halves(plan: ShardPlan, trace: ModelTrace, styles: Mapping[str, str]) -> Collection[str]:
    """Return sibling layers that transformers' plan keeps whole, and that can be cut all the same; none where not all can.

    It keeps one projection to gate and up whole. Another layer takes n values of its 2 n, and the activation gets a half in one piece.
    """
    outer = [name for name, style in styles.items() if style in WHOLE_ROW]
    if len(outer) != 1 or any(f"model.{name}.weight" not in plan.shapes for name in styles):
        return ()
    taken = _cut_size(plan, outer[0], styles[outer[0]])
    views = [view for _, view in trace.calls if view and view.shape[-1:] == (taken,)]
    halved = {view.source for view in views if view.step == 1 and view.offset in (0, taken)}
    given = {name: _cut_size(plan, name, style) for name, style in styles.items() if name != outer[0]}
    halves = all(size == 2 * taken and name in halved for name, size in given.items())
    return styles.keys() if given and halves else ()


def cut_layer(plan: ShardPlan, layer: str, by_column: bool, *sections: Section) -> None:
    """Cut a linear layer, or a parameter that is like its weight: its outputs, with the bias, or its inputs.

    By inputs its output is a partial sum, and a linear layer's whole bias is added once.
    """
    if f"model.{layer}" in plan.shapes:
        plan.cut_tensor(layer, max(-2, -len(plan.shapes[f"model.{layer}"])) if by_column else -1, *sections)
        return
    plan.cut_tensor(f"{layer}.weight", 0 if by_column else 1, *sections)
    if not by_column:
        plan.row_linears.append(layer)
    elif f"model.{layer}.bias" in plan.shapes:
        plan.cut_tensor(f"{layer}.bias", 0, *sections)


def _cut_size(plan: ShardPlan, layer: str, style: str) -> int:
    shape = plan.shapes.get(f"model.{layer}") or plan.shapes[f"model.{layer}.weight"]
    return shape[-1] if style in (*ROW, *WHOLE_ROW) else shape[-2:][0]


def share_norms(plan: ShardPlan, model: nn.Module, trace: ModelTrace) -> None:
    """Cut modules with weights that come right after a cut projection, and are no part of the model's plan.

    A weight per head is cut with the heads. A weight of a norm over all heads needs them all: such a module gets its input gathered.
    """
    for called, view in trace.calls:
        rule = plan.rules.get(f"model.{view.source}.weight") if view else None
        if view is None or view.source == plan.embedding or rule is None or rule.dim or len(rule.sections) != 1:
            continue
        (section,), module = rule.sections, model.get_submodule(called)
        if isinstance(module, nn.Linear):
            continue
        heads = (section.size // section.block, section.block)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape == heads == view.shape[-2:]:
                plan.cut_tensor(f"{called}.{name}", 0, Section(0, heads[0], 1, section.order))
            elif parameter.shape[-1:] == view.shape[-1:] == (section.size,) and section.size > section.block:
                plan.whole_inputs[called] = section


def planned_styles(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's own plan by the names of its modules and parameters; empty where it has none."""
    styles = {}
    for name, _ in (*model.named_modules(), *model.named_parameters()):
        general = re.sub(r"\.\d+(?=\.|$)", ".*", name)  # plans have stars for the numbers of layers
        if general in model.tp_plan:
            styles[name] = model.tp_plan[general]
    return styles


def derive_styles(
    plan: ShardPlan, model: PreTrainedModel, trace: ModelTrace, others: Collection[str]
) -> dict[str, str]:
    """Return the styles of attention in a model without a plan; refuse a layer outside experts, attention and `others`."""
    undeclared = "it declares no plan (base_model_tp_plan), and"
    styles: dict[str, str] = {}
    modules = {name: model.get_submodule(name) for name in trace.called}
    head = model.get_output_embeddings()  # has a rule of its own
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head]
    for name, sizes in trace.attention.items():
        # Projections to queries, keys and values, in this order, and one from the values of all heads.
        *inputs, output = [each for each in linears if is_below(each, name)] or [""]
        outputs = [model.get_submodule(each).out_features for each in inputs]
        expected = [sizes.heads * sizes.key_dim, sizes.kv_heads * sizes.key_dim, sizes.kv_heads * sizes.value_dim]
        if outputs != expected or model.get_submodule(output).in_features != sizes.heads * sizes.value_dim:
            raise plan.make_refusal(
                f"{undeclared} the layers of {name} are not one projection each to queries, keys and values and one from them"
            )
        own = model.get_submodule(name).named_parameters(recurse=False)
        per_head = [f"{name}.{each}" for each, tensor in own if tensor.shape == (sizes.heads,)]
        styles |= dict.fromkeys([*inputs, *per_head], "colwise") | {output: "rowwise"}
    other = next((name for name in linears if name not in styles and name not in others), None)
    if other is not None:
        raise plan.make_refusal(
            f"{undeclared} {other} is neither attention nor experts nor part of a block with parts that add up to it"
        )
    return styles
