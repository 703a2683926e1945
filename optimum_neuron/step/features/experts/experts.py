# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: transformers' experts interface, and the reference formulations.

Routing is transformers' own. What an expert computes for a token depends on that token alone. Padding is routed nowhere: to the number
after the last expert's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ....errors import UnsupportedModelError
from ...serving import set_within
from ..codes.modules import expert_weight, is_experts, reference_product
from ..codes.weight import QuantizedWeight, integer_product


EXPERTS_NAME = "optimum_neuron"
ROWS_OF_A_PRODUCT = 12  # as many as the eager target fills products up to


@dataclass(frozen=True)
class ExpertsCall:
    """One layer's experts, and the router's choice for the tokens of a step.

    `layer` is a module of transformers' experts interface, which says how its weights are laid out. `hidden_states` are `[tokens, hidden]`,
    `index` and `weights` `[tokens, k]`; an index from `experts` on is nowhere.
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
    def compute_dtype(self) -> torch.dtype:
        """Return the type of products: the weights', or with quantized weights the hidden states'."""
        up = self.up_weight
        return self.hidden_states.dtype if isinstance(up, QuantizedWeight) else up.dtype

    @property
    def up_name(self) -> str:
        return "gate_up_proj" if self.layer.has_gate else "up_proj"

    @property
    def up_weight(self) -> Tensor | QuantizedWeight:
        """Return `[experts, out, in]`, or `[experts, in, out]` where the layer is transposed, as none with quantized weights is."""
        return expert_weight(self.layer, self.up_name)

    @property
    def down_weight(self) -> Tensor | QuantizedWeight:
        return expert_weight(self.layer, self.down_name)

    @property
    def up(self) -> Tensor:
        assert isinstance(self.up_weight, Tensor)  # only plain weights are computed with
        return self.up_weight

    @property
    def down(self) -> Tensor:
        assert isinstance(self.down_weight, Tensor)
        return self.down_weight

    @property
    def up_bias(self) -> Tensor | None:
        return getattr(self.layer, f"{self.up_name}_bias") if self.layer.has_bias else None

    @property
    def down_bias(self) -> Tensor | None:
        return self.layer.down_proj_bias if self.layer.has_bias else None

    def activate(self, up: Tensor) -> Tensor:
        """Compute what is between the two projections; it looks at the last dimension alone."""
        return cast(Tensor, self.layer._apply_gate(up) if self.layer.has_gate else self.layer.act_fn(up))

    def normalize(self, outputs: Tensor) -> Tensor:
        """Compute what follows an expert's last projection; it looks at the last dimension alone, and zeros stay zeros."""
        has_norm = getattr(self.layer, "has_post_expert_norm", False)  # not every version of transformers knows it
        return cast(Tensor, self.layer.post_expert_norm(outputs)) if has_norm else outputs

    def weighted_sum(self, outputs: Tensor) -> Tensor:
        """Sum `[tokens, k, hidden]` to `[tokens, hidden]`, written out: torch's order of summation may depend on the other dimensions."""
        terms = outputs.float() * self.weights.float()[:, :, None]
        total = terms[:, 0]
        for place in range(1, terms.shape[1]):
            total = total + terms[:, place]
        return total.to(self.hidden_states.dtype)


# From `[experts, tokens, in]` and a weight of experts to `[experts, tokens, out]` float32.
QuantizedExpertsProduct = Callable[[Tensor, QuantizedWeight], Tensor]


def dequantized_experts(x: Tensor, weight: QuantizedWeight) -> Tensor:
    if weight.activations is not None:
        return torch.stack([integer_product(own, weight.select_part(number)) for number, own in enumerate(x)])
    return x.float() @ weight.dequantize().transpose(1, 2)


# From a call to `[tokens, hidden]`.
Experts = Callable[[ExpertsCall], Tensor]


def dense_experts(call: ExpertsCall, product: QuantizedExpertsProduct = dequantized_experts) -> Tensor:
    """Compute every token by every expert, and take those that it was routed to: no shape depends on the routing."""
    chosen = call.index[:, :, None] == torch.arange(call.experts, dtype=torch.int32)  # [tokens, k, experts]
    routing = torch.where(chosen, call.weights[:, :, None], 0.0).sum(1).t()[:, :, None]
    inputs = call.hidden_states.to(call.compute_dtype).expand(call.experts, *call.hidden_states.shape)
    up = call.activate(_multiply_every(call, inputs, call.up_weight, call.up_bias, product))
    outputs = call.normalize(_multiply_every(call, up, call.down_weight, call.down_bias, product))
    # Not only times 0: an expert may overflow on a token that is not its own.
    outputs = torch.where(chosen.any(1).t()[:, :, None], outputs * routing, 0.0)
    return outputs.sum(0).to(call.hidden_states.dtype)


def _multiply_every(
    call: ExpertsCall,
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    bias: Tensor | None,
    product: QuantizedExpertsProduct,
) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        wide = product(x, weight)
        return (wide if bias is None else wide + bias[:, None].float()).to(x.dtype)
    output = x @ (weight if call.layer.is_transposed else weight.transpose(1, 2))
    return output if bias is None else output + bias[:, None]


def active_experts(call: ExpertsCall) -> Tensor:
    """Compute each expert in use for the tokens that are routed to it: for modules that run as they are.

    Products have a fixed number of rows, zeros after the last token: libraries sum in another order for other numbers of rows, which follow
    the routing. So no graph can contain it.
    """
    rows = min(ROWS_OF_A_PRODUCT, len(call.hidden_states))

    def compute_expert(expert: int, inputs: Tensor) -> Tensor:
        blocks = nn.functional.pad(inputs, (0, 0, 0, -len(inputs) % rows)).split(rows)
        return torch.cat([_compute_expert(call, expert, block) for block in blocks])[: len(inputs)]

    return _sum_experts(call, compute_expert)


def _sum_experts(call: ExpertsCall, compute: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Sum `[tokens, hidden]` of the experts in use, each computed for its own tokens `[tokens, hidden]`."""
    hidden_states = call.hidden_states.to(call.compute_dtype)
    outputs = hidden_states.new_zeros((*call.index.shape, hidden_states.shape[-1]))
    for expert in call.index.unique().tolist():
        if expert < call.experts:
            tokens, places = (call.index == expert).nonzero(as_tuple=True)
            outputs[tokens, places] = compute(expert, hidden_states[tokens])
    return call.weighted_sum(outputs)


# Gets the name of a weight, an expert, and the inputs of its product, `[tokens, inputs]`.
Watcher = Callable[[str, int, Tensor], None]


def watched_experts(call: ExpertsCall, watch: Watcher) -> Tensor:
    """Compute as `active_experts`, with all tokens of an expert in one product, and show its inputs to `watch`."""
    return _sum_experts(call, lambda expert, inputs: _compute_expert(call, expert, inputs, watch))


def _compute_expert(call: ExpertsCall, expert: int, x: Tensor, watch: Watcher = lambda *_: None) -> Tensor:
    watch(call.up_name, expert, x)
    up = call.activate(_multiply_one(call, expert, x, call.up_weight, call.up_bias))
    watch(call.down_name, expert, up)
    return call.normalize(_multiply_one(call, expert, up, call.down_weight, call.down_bias))


def _multiply_one(
    call: ExpertsCall, expert: int, x: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None
) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return reference_product(x, weight.select_part(expert), None if bias is None else bias[expert])
    own = weight[expert].t() if call.layer.is_transposed else weight[expert]
    return nn.functional.linear(x, own, None if bias is None else bias[expert])


def no_experts(call: ExpertsCall) -> Tensor:
    """Return zeros, for a model that runs only to be recorded."""
    return torch.zeros_like(call.hidden_states)


# Outside of a step: all tokens, by `active_experts`.
_routing: ContextVar[tuple[Experts, Tensor | None]] = ContextVar(
    "how the running forward pass computes experts, and its actual tokens", default=(active_experts, None)
)


def routing(experts: Experts, actual: Tensor | None = None) -> AbstractContextManager[None]:
    """Set how the forward passes within compute experts for the tokens that are no padding, `actual [tokens]`; None: for all."""
    return set_within(_routing, (experts, actual))


def _run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    experts, actual = _routing.get()
    call = ExpertsCall(module, hidden_states, top_k_index, top_k_weights)
    if actual is not None:
        if len(actual) != len(hidden_states):
            raise UnsupportedModelError(
                f"its experts get {len(hidden_states)} rows of hidden states in a step of {len(actual)} tokens"
            )
        call = replace(call, index=torch.where(actual[:, None], top_k_index, call.experts))
    return experts(call)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _run_experts)


def set_experts(model: nn.Module, name: str = EXPERTS_NAME) -> None:
    """Change the function by which a model computes experts of transformers' interface; "eager" is their own code."""
    for module in model.modules():
        if is_experts(module):
            module.config._experts_implementation = name  # type: ignore[union-attr]
