# SPDX-License-Identifier: Apache-2.0
"""A rank's part of a model: transformers' own modules, with collectives around them.

The code never knows its rank: it reads the buffer RANK_BUFFER, so all ranks have one graph.
"""

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
from ..operators.sampler import largest
from .plan import RANK_BUFFER, ShardedHeads, ShardPlan
from .rules import PADDING, Section


Forward = Callable[..., Any]
_Add = Callable[[Tensor, int], Tensor]  # a rank's partial sum, and how many there are
# Names under which attention modules and configs keep their numbers of heads.
_QUERY_HEADS = ("num_heads", "num_attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_GROUPS = ("num_key_value_groups",)


def apply_plan(model: PreTrainedModel, plan: ShardPlan, *, float32_reduce: bool = False) -> None:
    """Turn a whole model into a rank's, in place.

    Tensors that are cut get their local shapes and lose their values; `checkpoint.assign` binds those of a rank's file.
    The model gains the buffer RANK_BUFFER. Its logits are a rank's part, of `plan.local_vocab_size`.

    Args:
        float32_reduce: ranks add partial sums in float32, not in the model's type.
    """
    model.register_buffer(RANK_BUFFER, next(model.parameters()).new_zeros(1, dtype=torch.int32))
    _cut_tensors(model, plan)
    ranks = plan.world_size
    add = _add_in_float32 if float32_reduce else all_reduce
    embedding: Any = model.get_submodule(plan.embedding)
    embedding.padding_idx = None  # for gradients only, and not a row of every rank
    embedding.forward = partial(_look_up, model, embedding.forward, embedding.num_embeddings, ranks)
    for name in plan.row_linears:
        linear = model.get_submodule(name)
        linear.forward = partial(_row_linear, linear, add, ranks)
    for name in plan.reduced:
        module = model.get_submodule(name)
        module.forward = partial(_sum_output, module.forward, add, ranks)
    for name, section in plan.whole_inputs.items():
        module = model.get_submodule(name)
        module.forward = partial(_on_whole_inputs, model, module.forward, section, ranks)
    for name, recurrence in plan.recurrences.items():
        for part, attribute, size in recurrence.sizes:
            setattr(model.get_submodule(f"{name}.{part}" if part else name), attribute, size)
    configs: dict[tuple[int, ShardedHeads], Any] = {}
    for name, heads in plan.attention.items():
        _set_heads(model.get_submodule(name), heads, configs)


def _cut_tensors(model: nn.Module, plan: ShardPlan) -> None:
    """Give tensors their local shapes; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # an object's id is its own while it lives
    for prefix, module in model.named_modules(remove_duplicate=False):
        for members in (module._parameters, module._buffers):
            for name, member in members.items():
                full = ".".join(part for part in ("model", prefix, name) if part)
                if member is None or full not in plan.rules:
                    continue
                if id(member) not in made:
                    kept.append(member)
                    part = member.new_empty(plan.local_shape(full))
                    made[id(member)] = (
                        nn.Parameter(part, requires_grad=False) if isinstance(member, nn.Parameter) else part
                    )
                members[name] = made[id(member)]
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


def _look_up(model: nn.Module, forward: Forward, rows: int, ranks: int, input_ids: Tensor) -> Tensor:
    """Sum rows over ranks, where other ranks' rows are zero: the one rank's row to the bit, in any type."""
    local = input_ids - getattr(model, RANK_BUFFER) * rows
    own = (local >= 0) & (local < rows)
    found = forward(torch.where(own, local, 0))
    return all_reduce(torch.where(own[..., None], found, 0.0), ranks)


def _row_linear(linear: nn.Linear | QuantizedLinear, add: _Add, ranks: int, x: Tensor) -> Tensor:
    part = linear.product(x) if isinstance(linear, QuantizedLinear) else nn.functional.linear(x, linear.weight)
    total = add(part, ranks)
    return total if linear.bias is None else total + linear.bias


def _sum_output(forward: Forward, add: _Add, ranks: int, *args: Any, **kwargs: Any) -> Tensor:
    return add(forward(*args, **kwargs), ranks)


def _add_in_float32(x: Tensor, ranks: int) -> Tensor:
    """Add in float32 and round once, whatever the number of ranks, as the SDK's own layers do by default."""
    return all_reduce(x.float(), ranks).to(x.dtype)


def _on_whole_inputs(
    model: nn.Module, forward: Forward, section: Section, ranks: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Gather the last dimension of tensors, run a module that keeps its size, and take the rank's part of the result."""
    slots, blocks = section.order, -(-section.size // section.block)

    def gather_whole(x: Tensor) -> Tensor:
        gathered = all_gather(x, x.dim() - 1, ranks).unflatten(-1, (len(slots), section.block))
        return _select_blocks(gathered, [slots.index(block) for block in range(blocks)]).flatten(-2)[
            ..., : section.size
        ]

    args, kwargs = pytree.tree_map_only(Tensor, gather_whole, (args, kwargs))
    # To whole blocks, and one of zeros for slots of padding.
    result = nn.functional.pad(forward(*args, **kwargs), (0, (blocks + 1) * section.block - section.size))
    held = _select_blocks(
        result.unflatten(-1, (-1, section.block)), [blocks if slot == PADDING else slot for slot in slots]
    )
    return held.flatten(-2).unflatten(-1, (ranks, -1)).index_select(-2, getattr(model, RANK_BUFFER)).squeeze(-2)


def _select_blocks(blocks: Tensor, order: list[int]) -> Tensor:
    """Select blocks `[..., blocks, size]` in an order; where that is their own, without a gather."""
    if order == list(range(len(order))):
        return blocks[..., : len(order), :]
    return blocks.index_select(-2, torch.tensor(order, dtype=torch.int32))


def _set_heads(attention: Any, heads: ShardedHeads, configs: dict[tuple[int, ShardedHeads], Any]) -> None:
    """Give code that names its heads the rank's; layers that share a config still share one, through `configs`."""
    sizes, layout = heads.sizes, heads.layout
    local = dict.fromkeys(_QUERY_HEADS, (sizes.heads, layout.local_query))
    local |= dict.fromkeys(_KV_HEADS, (sizes.kv_heads, layout.local_key_value))
    groups = sizes.heads // sizes.kv_heads, layout.local_query // layout.local_key_value
    local |= dict.fromkeys(_GROUPS, groups)
    owners = [attention]
    if hasattr(attention, "config"):
        whole_config = attention.config  # which other modules read, too, and the model keeps alive
        attention.config = configs.setdefault((id(whole_config), heads), copy.copy(whole_config))
        owners.append(attention.config)
    for owner in owners:
        for name, (whole, part) in local.items():
            if vars(owner).get(name) == whole:  # a config of unlike layers refuses to be asked by getattr
                setattr(owner, name, part)


# Tokens travel as float32, which holds whole numbers up to here.
_LARGEST_TOKEN = 2**24


def sharded_ops(base_ops: StepOps, model: nn.Module, plan: ShardPlan) -> StepOps:
    """Return a step's operators over a rank's logits; every rank chooses the same token, the one of the largest of all logits.

    Args:
        model: as `apply_plan` left it: holds the rank.

    Raises:
        ValueError: the vocabulary is too large.
    """
    if plan.vocab_size > _LARGEST_TOKEN:
        raise plan.make_refusal(f"its vocabulary of {plan.vocab_size} exceeds {_LARGEST_TOKEN}")

    def largest_of_all(logits: Tensor, sampling_params: Tensor, uniforms: Tensor) -> Tensor:
        first: Tensor = getattr(model, RANK_BUFFER) * plan.local_vocab_size
        return largest(logits, first, plan.vocab_size, plan.world_size)

    def full_logits(logits: Tensor) -> Tensor:
        return all_gather(logits, 1, plan.world_size)[:, : plan.vocab_size]

    return replace(base_ops, sample=largest_of_all, full_logits=full_logits)
