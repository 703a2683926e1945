# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a model: transformers' own modules, with collectives around them. All ranks have one graph: it reads RANK_BUFFER."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from ....step.features.codes.modules import QuantizedEmbedding, QuantizedLinear
from ....step.ops import StepOps
from ..operators.collectives import all_gather, all_reduce
from ..operators.sampler import gather_columns, largest_of_ranks, largest_of_whole
from .plan import PADDING, RANK_BUFFER, HeadLayout, Section, ShardPlan


Forward = Callable[..., Any]


def apply_plan(model: PreTrainedModel, plan: ShardPlan, *, float32_reduce: bool = False) -> None:
    """Turn a whole model into a rank's, in place; with `float32_reduce` ranks add partial sums in float32, not in the model's type.

    Tensors that are cut get their local shapes and lose their values; `checkpoint.assign` binds those of a rank's file.
    The model gains the buffer RANK_BUFFER. Its logits are a rank's part, of `plan.local_vocab_size`.
    """
    model.register_buffer(RANK_BUFFER, next(model.parameters()).new_zeros(1, dtype=torch.int32))
    _cut_tensors(model, plan)
    ranks = plan.world_size

    def add(part: Tensor) -> Tensor:
        # In float32 it is rounded once, whatever the number of ranks, as by the SDK's own layers.
        return all_reduce(part.float(), ranks).to(part.dtype) if float32_reduce else all_reduce(part, ranks)

    def sum_linear(linear: nn.Linear | QuantizedLinear, x: Tensor) -> Tensor:
        part = linear.product(x) if isinstance(linear, QuantizedLinear) else nn.functional.linear(x, linear.weight)
        total = add(part)
        return total if linear.bias is None else total + linear.bias

    def sum_output(forward: Forward, *args: Any, **kwargs: Any) -> Tensor:
        return add(forward(*args, **kwargs))

    def look_up(forward: Forward, rows: int, input_ids: Tensor) -> Tensor:
        # Other ranks' rows are zero: the sum is the one rank's row to the bit, in any type.
        local = input_ids - getattr(model, RANK_BUFFER) * rows
        own = (local >= 0) & (local < rows)
        found = forward(torch.where(own, local, 0))
        return all_reduce(torch.where(own[..., None], found, 0.0), ranks)

    embedding: Any = model.get_submodule(plan.embedding)
    embedding.padding_idx = None  # for gradients only, and not a row of every rank
    embedding.forward = partial(look_up, embedding.forward, embedding.num_embeddings)
    for name in plan.row_linears:
        linear = model.get_submodule(name)
        linear.forward = partial(sum_linear, linear)
    for name in plan.reduced:
        module = model.get_submodule(name)
        module.forward = partial(sum_output, module.forward)
    for name, section in plan.whole_inputs.items():
        module = model.get_submodule(name)
        module.forward = partial(_on_whole_inputs, model, module.forward, section, ranks)
    for name, recurrence in plan.recurrences.items():
        for part, attribute, size in recurrence.sizes:
            setattr(model.get_submodule(f"{name}.{part}" if part else name), attribute, size)
    configs: dict[tuple[int, HeadLayout], Any] = {}
    for name, layout in plan.attention.items():
        _set_heads(model.get_submodule(name), layout, configs)


def _cut_tensors(model: nn.Module, plan: ShardPlan) -> None:
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # an object's id is its own while it lives
    for full, member in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if f"model.{full}" not in plan.rules:
            continue
        if id(member) not in made:
            kept.append(member)
            part = member.new_empty(plan.local_shape(f"model.{full}"))
            is_parameter = isinstance(member, nn.Parameter)
            made[id(member)] = nn.Parameter(part, requires_grad=False) if is_parameter else part
        prefix, _, name = full.rpartition(".")
        setattr(model.get_submodule(prefix), name, made[id(member)])
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Embedding):
            module.num_embeddings, module.embedding_dim = module.weight.shape
        elif isinstance(module, QuantizedLinear):
            module.out_features, module.in_features = module.quantized_weight.outputs, module.quantized_weight.inputs
        elif isinstance(module, QuantizedEmbedding):
            module.num_embeddings = module.quantized_weight.outputs
        elif isinstance(module, nn.Conv1d) and module.groups == module.in_channels:
            module.in_channels = module.out_channels = module.groups = module.weight.shape[0]


def _on_whole_inputs(
    model: nn.Module, forward: Forward, section: Section, ranks: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Gather the last dimension of tensors, run a module that keeps its size, and take the rank's part of the result."""
    slots, blocks = section.order, -(-section.size // section.block)

    def gather_whole(x: Tensor) -> Tensor:
        gathered = all_gather(x, x.dim() - 1, ranks).unflatten(-1, (len(slots), section.block))
        whole = _select_blocks(gathered, [slots.index(block) for block in range(blocks)])
        return whole.flatten(-2)[..., : section.size]

    args, kwargs = pytree.tree_map_only(Tensor, gather_whole, (args, kwargs))
    # To whole blocks, and one of zeros for slots of padding.
    result = nn.functional.pad(forward(*args, **kwargs), (0, (blocks + 1) * section.block - section.size))
    held = [blocks if slot == PADDING else slot for slot in slots]
    parts = _select_blocks(result.unflatten(-1, (-1, section.block)), held)
    return parts.flatten(-2).unflatten(-1, (ranks, -1)).index_select(-2, getattr(model, RANK_BUFFER)).squeeze(-2)


def _select_blocks(blocks: Tensor, order: list[int]) -> Tensor:
    """Select blocks `[..., blocks, size]` in an order; where that is their own, without a gather."""
    if order == list(range(len(order))):
        return blocks[..., : len(order), :]
    return blocks.index_select(-2, torch.tensor(order, dtype=torch.int32))


def _set_heads(attention: Any, layout: HeadLayout, configs: dict[tuple[int, HeadLayout], Any]) -> None:
    """Give code that names its heads the rank's; layers that share a config still share one, through `configs`."""
    # Attention modules and configs have these names.
    local = dict.fromkeys(("num_heads", "num_attention_heads"), (layout.heads, layout.local_query))
    local |= dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (layout.kv_heads, layout.local_key_value))
    groups = layout.heads // layout.kv_heads, layout.local_query // layout.local_key_value
    local["num_key_value_groups"] = groups
    owners = [attention]
    if hasattr(attention, "config"):
        whole_config = attention.config  # which other modules read, too, and the model keeps alive
        attention.config = configs.setdefault((id(whole_config), layout), copy.copy(whole_config))
        owners.append(attention.config)
    for owner in owners:
        for name, (whole, part) in local.items():
            if vars(owner).get(name) == whole:  # a config of unlike layers refuses to be asked by getattr
                setattr(owner, name, part)


# Tokens travel as float32, which holds whole numbers up to here.
_LARGEST_TOKEN = 2**24


def sharded_ops(base_ops: StepOps, plan: ShardPlan) -> StepOps:
    """Return operators of a step of `apply_plan`'s model: every rank chooses the token of the largest of all logits."""
    if plan.vocab_size > _LARGEST_TOKEN:
        raise plan.make_refusal(f"its vocabulary of {plan.vocab_size} exceeds {_LARGEST_TOKEN}")

    # What was gathered last, and the whole of it: a group's token and its logits take one gather.
    gathered: list[Tensor] = []

    def full_logits(logits: Tensor) -> Tensor:
        if not gathered or gathered[0] is not logits:
            gathered[:] = logits, gather_columns(logits, plan.vocab_size, plan.world_size)
        return gathered[1]

    def largest_of_all(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
        if logits.shape[1] * plan.world_size == plan.vocab_size:
            return largest_of_ranks(logits, plan.world_size)
        # The last rank has columns of no token.
        return largest_of_whole(full_logits(logits), sampling_params, uniforms)

    return replace(base_ops, sample=largest_of_all, full_logits=full_logits)
