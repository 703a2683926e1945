# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: where transformers' experts interface meets the step, and the reference formulations.

Routing is transformers' own. What an expert computes of a token depends on that token alone, and tokens that are padding
are routed nowhere: to the number that follows the last expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ...masks import UnsupportedModelError
from ..codes.activations import integer_product
from ..codes.expert_weights import expert_weight
from ..codes.modules import reference_product
from ..codes.weight import QuantizedWeight
from .expert_modules import is_experts


EXPERTS_NAME = "optimum_neuron"
ROWS_OF_A_PRODUCT = 12  # as many as the eager target fills products up to


@dataclass(frozen=True)
class ExpertsCall:
    """One layer's experts, and where its router sends the tokens of a step.

    Attributes:
        layer: a module of transformers' experts interface, which tells how its weights are laid out.
        hidden_states: `[tokens, hidden]`.
        index: `[tokens, k]`, integers; from `experts` on: nowhere.
        weights: `[tokens, k]`; what they are does not matter where a token goes nowhere.
    """

    layer: Any
    hidden_states: Tensor
    index: Tensor
    weights: Tensor

    down_name = "down_proj"  # of the parameter of the second projection

    @property
    def experts(self) -> int:
        up = self.up_weight
        return (up.codes if isinstance(up, QuantizedWeight) else up).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the products: the weights', or where they are quantized that of the hidden states."""
        up = self.up_weight
        return self.hidden_states.dtype if isinstance(up, QuantizedWeight) else up.dtype

    @property
    def up_name(self) -> str:
        """Of the parameter of the first projection."""
        return "gate_up_proj" if self.layer.has_gate else "up_proj"

    @property
    def up_weight(self) -> Tensor | QuantizedWeight:
        """`[experts, out, in]`, or `[experts, in, out]` where the layer is transposed, as none with quantized weights is."""
        return expert_weight(self.layer, self.up_name)

    @property
    def down_weight(self) -> Tensor | QuantizedWeight:
        return expert_weight(self.layer, self.down_name)

    @property
    def up(self) -> Tensor:
        """The plain weight, for who computes with no other."""
        return _plain(self.up_weight)

    @property
    def down(self) -> Tensor:
        return _plain(self.down_weight)

    @property
    def up_bias(self) -> Tensor | None:
        """`[experts, out]`."""
        if not self.layer.has_bias:
            return None
        bias: Tensor = self.layer.gate_up_proj_bias if self.layer.has_gate else self.layer.up_proj_bias
        return bias

    @property
    def down_bias(self) -> Tensor | None:
        return self.layer.down_proj_bias if self.layer.has_bias else None

    def activate(self, up: Tensor) -> Tensor:
        """What stands between the two projections; it looks at the last dimension alone."""
        output: Tensor = self.layer._apply_gate(up) if self.layer.has_gate else self.layer.act_fn(up)
        return output

    def normalize(self, outputs: Tensor) -> Tensor:
        """What follows an expert's last projection; it looks at the last dimension alone, and zeros stay zeros."""
        if not getattr(self.layer, "has_post_expert_norm", False):  # not every version of transformers knows it
            return outputs
        normalized: Tensor = self.layer.post_expert_norm(outputs)
        return normalized

    def weighted_sum(self, outputs: Tensor) -> Tensor:
        """From `[tokens, k, hidden]`, zero where a token goes nowhere, to `[tokens, hidden]`.

        Written out: how torch sums over a dimension may depend on the others.
        """
        terms = outputs.float() * self.weights.float()[:, :, None]
        total = terms[:, 0]
        for place in range(1, terms.shape[1]):
            total = total + terms[:, place]
        return total.to(self.hidden_states.dtype)


def _plain(weight: Tensor | QuantizedWeight) -> Tensor:
    assert isinstance(weight, Tensor), "quantized weights, where only plain ones are computed with"
    return weight


# From `[experts, tokens, in]` and a weight of experts to `[experts, tokens, out]` float32.
QuantizedExpertsProduct = Callable[[Tensor, QuantizedWeight], Tensor]


def dequantized_experts(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The reference."""
    if weight.activations is not None:
        return torch.stack([integer_product(own, weight.part(number)) for number, own in enumerate(x)])
    return x.float() @ weight.dequantize().transpose(1, 2)


# From a call to `[tokens, hidden]`.
Experts = Callable[[ExpertsCall], Tensor]


def dense_experts(call: ExpertsCall, product: QuantizedExpertsProduct = dequantized_experts) -> Tensor:
    """Every expert computes every token, and a token takes those that it was routed to.

    No shape depends on the routing and no weight is gathered, so every target can lower it; what it costs is the other
    experts' arithmetic.

    Args:
        product: with quantized weights.
    """
    chosen = call.index[:, :, None] == torch.arange(call.experts, dtype=torch.int32)  # [tokens, k, experts]
    routing = torch.where(chosen, call.weights[:, :, None], 0.0).sum(1).t()[:, :, None]
    inputs = call.hidden_states.to(call.dtype).expand(call.experts, *call.hidden_states.shape)
    up = call.activate(_every(call, inputs, call.up_weight, call.up_bias, product))
    outputs = call.normalize(_every(call, up, call.down_weight, call.down_bias, product))
    # Not only times 0: an expert may overflow on a token that is not its own.
    outputs = torch.where(chosen.any(1).t()[:, :, None], outputs * routing, 0.0)
    return outputs.sum(0).to(call.hidden_states.dtype)


def _every(
    call: ExpertsCall,
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    product: QuantizedExpertsProduct,
) -> Tensor:
    """`[experts, tokens, in]` to `[experts, tokens, out]`."""
    if isinstance(weight, QuantizedWeight):
        wide = product(x, weight)
        return (wide if bias is None else wide + bias[:, None].float()).to(x.dtype)
    output = x @ (weight if call.layer.is_transposed else weight.transpose(1, 2))
    return output if bias is None else output + bias[:, None]


def active_experts(call: ExpertsCall) -> Tensor:
    """Each expert in use computes the tokens that are routed to it: for modules that run as they are.

    Products are of so many rows each, zeros after the last token: libraries sum in another order for other numbers of rows,
    which follow the routing. So does the number of products, and no graph can contain it.
    """
    hidden_states = call.hidden_states.to(call.dtype)
    outputs = hidden_states.new_zeros((*call.index.shape, hidden_states.shape[-1]))
    rows = min(ROWS_OF_A_PRODUCT, len(hidden_states))
    for expert in call.index.unique().tolist():
        if expert < call.experts:
            tokens, places = (call.index == expert).nonzero(as_tuple=True)
            padding = (0, 0, 0, -len(tokens) % rows)
            blocks = nn.functional.pad(hidden_states[tokens], padding).split(rows)
            outputs[tokens, places] = torch.cat([_expert(call, expert, block) for block in blocks])[: len(tokens)]
    return call.weighted_sum(outputs)


# Told of the name of a weight, an expert, and what that one's product with it takes, `[tokens, inputs]`.
Watcher = Callable[[str, int, Tensor], None]


def watched_experts(call: ExpertsCall, watch: Watcher) -> Tensor:
    """As `active_experts`, with all tokens of an expert in one product, and its inputs told."""
    hidden_states = call.hidden_states.to(call.dtype)
    outputs = hidden_states.new_zeros((*call.index.shape, hidden_states.shape[-1]))
    for expert in call.index.unique().tolist():
        if expert < call.experts:
            tokens, places = (call.index == expert).nonzero(as_tuple=True)
            inputs = hidden_states[tokens]
            watch(call.up_name, expert, inputs)
            up = call.activate(_one(call, expert, inputs, call.up_weight, call.up_bias))
            watch(call.down_name, expert, up)
            outputs[tokens, places] = call.normalize(_one(call, expert, up, call.down_weight, call.down_bias))
    return call.weighted_sum(outputs)


def _expert(call: ExpertsCall, expert: int, x: Tensor) -> Tensor:
    """`[tokens, hidden]`, both."""
    up = call.activate(_one(call, expert, x, call.up_weight, call.up_bias))
    return call.normalize(_one(call, expert, up, call.down_weight, call.down_bias))


def _one(call: ExpertsCall, expert: int, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None) -> Tensor:
    """`[tokens, in]` to `[tokens, out]`."""
    if isinstance(weight, QuantizedWeight):
        return reference_product(x, weight.part(expert), None if bias is None else bias[expert])
    own = weight[expert].t() if call.layer.is_transposed else weight[expert]
    return nn.functional.linear(x, own, None if bias is None else bias[expert])


def no_experts(call: ExpertsCall) -> Tensor:
    """Zeros, where a model runs only to be looked at."""
    return torch.zeros_like(call.hidden_states)


@dataclass(frozen=True)
class _Routing:
    experts: Experts
    actual: Tensor | None


_ALONE = _Routing(active_experts, None)  # a model that runs outside of a step
_routing: ContextVar[_Routing] = ContextVar("how the running forward pass computes experts")


@contextmanager
def routing(experts: Experts, actual: Tensor | None = None) -> Iterator[None]:
    """How the forward passes within compute experts.

    Args:
        actual: `[tokens]`, whether a token of the step is no padding; None: all are.
    """
    token = _routing.set(_Routing(experts, actual))
    try:
        yield
    finally:
        _routing.reset(token)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    routing = _routing.get(_ALONE)
    call = ExpertsCall(module, hidden_states, top_k_index, top_k_weights)
    if routing.actual is not None:
        if len(routing.actual) != len(hidden_states):
            raise UnsupportedModelError(
                f"its experts get {len(hidden_states)} rows of hidden states in a step of {len(routing.actual)} tokens"
            )
        index = torch.where(routing.actual[:, None], top_k_index, call.experts)
        call = ExpertsCall(module, hidden_states, index, top_k_weights)
    return routing.experts(call)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _experts)


def set_experts(model: nn.Module, name: str = EXPERTS_NAME) -> None:
    """Changes by whose function a model computes experts that use transformers' interface; "eager" is their own code."""
    for module in model.modules():
        if is_experts(module):
            module.config._experts_implementation = name  # type: ignore[union-attr]
