# SPDX-License-Identifier: Apache-2.0
"""The cut of each layer in transformers' words: from the model's own plan, or from what its layers are."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from torch import nn
from transformers import PreTrainedModel

from .trace import HeadSizes, ModelTrace


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


def planned_styles(model: PreTrainedModel) -> dict[str, str]:
    """Return the model's own plan by the names of its modules and parameters; empty where it has none."""
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    return {name: model.tp_plan[generic_name(name)] for name in names if generic_name(name) in model.tp_plan}


def generic_name(name: str) -> str:
    """Return a name with stars for the numbers of layers, as plans have them."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer, with torch's own arithmetic."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def derived_styles(model: PreTrainedModel, trace: ModelTrace, others: Collection[str]) -> dict[str, str]:
    """Return the styles of attention in a model without a plan; raise ValueError for a layer outside experts, attention and `others`."""
    styles: dict[str, str] = {}
    called = list(dict.fromkeys(call.name for call in trace.calls))
    modules = {name: model.get_submodule(name) for name in called}
    head = model.get_output_embeddings()  # has a rule of its own
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear) and module is not head]
    for name, sizes in trace.attention.items():
        styles |= _attention_styles(model, name, sizes, [each for each in linears if is_below(each, name)])
    other = next((name for name in linears if name not in styles and name not in others), None)
    if other is not None:
        raise ValueError(
            f"it declares no plan (base_model_tp_plan), and {other} is neither attention nor experts nor part of a block with parts that "
            f"add up to it"
        )
    return styles


def _attention_styles(model: PreTrainedModel, name: str, sizes: HeadSizes, linears: Iterable[str]) -> dict[str, str]:
    """Return styles of projections to queries, keys and values, in this order, and one from the values of all heads."""
    *inputs, output = [*linears] or [""]
    outputs = [model.get_submodule(each).out_features for each in inputs]
    expected = [sizes.heads * sizes.key_dim, sizes.kv_heads * sizes.key_dim, sizes.kv_heads * sizes.value_dim]
    if outputs != expected or model.get_submodule(output).in_features != sizes.heads * sizes.value_dim:
        raise ValueError(
            f"it declares no plan (base_model_tp_plan), and the layers of {name} are not one projection each to "
            f"queries, keys and values and one from them"
        )
    per_head = [
        each
        for each, tensor in model.get_submodule(name).named_parameters(recurse=False)
        if tensor.shape == (sizes.heads,)
    ]
    columns = [*inputs, *(f"{name}.{each}" for each in per_head)]
    return dict.fromkeys(columns, "colwise") | {output: "rowwise"}


def is_below(name: str, parent: str) -> bool:
    return name.startswith(parent + ".")
