# SPDX-License-Identifier: Apache-2.0
"""The weights and layers of a model, from its config alone: no weight exists, not even in memory."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...errors import first_line
from ...parity.inspect import inspect_model
from ...parity.text_length import keep_frequencies
from ...step.attention.rows import AttentionBackend, AttentionCall
from ...step.attention.state import KeyValueState
from ...step.features.codes.modules import (
    QuantizedEmbedding,
    QuantizedLinear,
    WeightFormat,
    make_room,
    plain_weights,
    quantized_weights,
)
from ...step.features.codes.weight import PACKED
from ...step.interface import ATTENTION_NAME, with_attention
from ...step.model_spec import ModelSpec
from ...step.tracing.alike import kinds_of_layers
from ...targets.neuron.sharding.trace import data_free_copy, no_data


# A table is read by rows, a head computes logits, a linear weight sees every token, experts see some.
Kind = Literal["table", "head", "linear", "experts", "other"]


@dataclass(frozen=True)
class WeightSize:
    """One stored tensor of a model; tied names count once."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    kind: Kind
    block: str  # module of the weights that work on the same tokens one after the other
    experts: int = 1  # of a weight of routed experts, their number
    per_token: int = 1  # the number of them that see a token
    also_table: bool = False  # a head that is also read by rows, as a tied one: graphs take both forms
    values: int = 1  # numbers of the model in one of the tensor: two in a byte of 4-bit codes, none in a scale

    @property
    def count(self) -> int:
        """Numbers of the model in this tensor."""
        return math.prod(self.shape) * self.values


@dataclass(frozen=True)
class ModelSizes:
    """A whole model, as its config decides it."""

    dtype: str
    weights: tuple[WeightSize, ...]
    spec: ModelSpec  # spec of an export
    heads: tuple[int, ...]  # query heads by attention layer, in the order of the states with keys
    hidden_size: int
    keeps_logits: bool  # whether logits are computed for the chosen tokens only
    longest: int | None  # `max_position_embeddings`, if the model has such a limit
    parameters: int  # parameters of the plain model
    model: PreTrainedModel  # the model without data, with quantized weights where graphs take such
    kinds: LayerKinds  # the model with one layer of each kind

    @property
    def has_experts(self) -> bool:
        return any(weight.per_token < weight.experts for weight in self.weights)

    @property
    def active_parameters(self) -> int:
        """Parameters that see a token, with those of the experts that it is routed to."""
        unused = sum(w.count * (w.experts - w.per_token) // w.experts for w in self.weights)
        return self.parameters - unused


def measure_model(
    model_config: PreTrainedConfig,
    name: str,
    dtype: str,
    *,
    trust_remote_code: bool,
    formats: Callable[[PreTrainedModel], Mapping[str, WeightFormat]] = lambda model: {},
) -> ModelSizes:
    """Build the model without memory and run one token through it; raise ValueError with the reason where it cannot be exported.

    transformers changes the config. `dtype` is torch's name of the type of weights and cache, and `formats` returns those of the
    quantized weights of the plain model.
    """
    wanted = getattr(torch, dtype)
    with FakeTensorMode(), torch.device("cpu"):
        try:
            options: dict[str, Any] = {"dtype": wanted, "trust_remote_code": trust_remote_code}
            model = with_attention(
                lambda name: AutoModelForCausalLM.from_config(model_config, attn_implementation=name, **options),
                ATTENTION_NAME,
            ).eval()
        except Exception as error:  # whatever a model's code comes to by wrong numbers
            raise ValueError(
                f"{name}: no {model_config.model_type} model can be built by its config ({first_line(error)}); correct it"
            ) from error
        keep_frequencies(model)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        hidden_size = model.get_input_embeddings().weight.shape[1]
        make_room(model, formats(model))
        probe, spec = _probe_model(model)
    text_config = model_config.get_text_config(decoder=True)
    return ModelSizes(
        dtype=dtype,
        weights=tuple(_list_weights(model, wanted, probe.per_token)),
        spec=spec,
        heads=tuple(probe.heads) or tuple(text_config.num_attention_heads for _ in spec.states_of(KeyValueState)),
        hidden_size=hidden_size,
        keeps_logits="logits_to_keep" in inspect.signature(model.forward).parameters,
        longest=getattr(text_config, "max_position_embeddings", None),
        parameters=parameters,
        model=model,
        kinds=one_of_each_kind(model),
    )


def _probe_model(model: PreTrainedModel) -> tuple[_CallProbe, ModelSpec]:
    probe = _CallProbe()
    hooks = [model.register_forward_pre_hook(probe.wrap_backend, with_kwargs=True)]
    routed = [module for module in model.modules() if _count_experts(module)]
    hooks += [module.register_forward_pre_hook(probe.note_routes, with_kwargs=True) for module in routed]
    try:
        spec = inspect_model(model)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"{type(model).__name__} decides by the values of tensors what it computes, and so cannot be a graph of fixed "
            f"shapes: {first_line(error)}"
        ) from error
    for hook in hooks:  # which copies of the model would keep
        hook.remove()
    return probe, spec


class _CallProbe:
    """Notes on the calls of a running model's layers: query heads, and the number of experts that see a token."""

    def __init__(self) -> None:
        self.heads: list[int] = []
        self.per_token: dict[nn.Module, int] = {}
        self.recorder: AttentionBackend | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        assert self.recorder is not None
        self.heads.append(call.query.shape[1])
        return self.recorder.attend(call)

    def wrap_backend(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.recorder = kwargs.get("attention_backend")  # None: the model takes none, and its config has the heads
        return args, kwargs if self.recorder is None else kwargs | {"attention_backend": self}

    def note_routes(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note the indices of each token's experts; experts that get none run for every token."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not value.is_floating_point():
                self.per_token[module] = value.shape[-1]


def _count_experts(module: nn.Module) -> int:
    """Count the routed experts that a module stacks along the first dimension of its weights; 0 for other modules."""
    stacked = [*plain_weights(module).values(), *(each.codes for each in quantized_weights(module).values())]
    return stacked[0].shape[0] if stacked and not isinstance(module, nn.modules.conv._ConvNd) else 0


def _list_weights(
    model: PreTrainedModel, dtype: torch.dtype, per_token: Mapping[nn.Module, int]
) -> Iterator[WeightSize]:
    kept = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    stored = model.state_dict(keep_vars=True).keys()
    output = model.get_output_embeddings()
    head = getattr(output, "codes" if isinstance(output, QuantizedLinear) else "weight", None)
    seen: set[int] = set()
    for path, module in model.named_modules():
        count = _count_experts(module)
        parameters, buffers = (own(path, recurse=False) for own in (module.named_parameters, module.named_buffers))
        for name, tensor in (*parameters, *buffers):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            # transformers loads some weights of half-precision checkpoints in float32.
            in_full = name in stored and any(pattern.search(name) for pattern in kept)
            kind = _weight_kind(module, tensor, head, count)
            routed = kind == "experts"
            yield WeightSize(
                name=f"model.{name}",
                shape=tuple(tensor.shape),
                itemsize=4 if in_full else tensor.dtype.itemsize,
                kind=kind,
                block=path if count else path.rpartition(".")[0],
                experts=count if routed else 1,
                per_token=per_token.get(module, count) if routed else 1,
                also_table=kind == "head" and isinstance(module, nn.Embedding),
                values=_count_values(module, tensor),
            )


def _count_values(module: nn.Module, tensor: Tensor) -> int:
    weights = list(quantized_weights(module).values())
    if isinstance(module, QuantizedLinear | QuantizedEmbedding):
        weights.append(module.quantized_weight)
    for weight in weights:
        if tensor is weight.codes:
            return 2 if weight.kind in PACKED else 1
        if tensor is weight.scale or tensor is weight.shift:
            return 0
    return 1


def _weight_kind(module: nn.Module, tensor: Tensor, head: Tensor | None, experts: int) -> Kind:
    if tensor is head:
        return "head"
    if isinstance(module, QuantizedEmbedding) or (isinstance(module, nn.Embedding) and tensor is module.weight):
        return "table"
    if isinstance(module, QuantizedLinear) and tensor is module.codes:
        return "linear"
    if experts and tensor.dim() > 0 and tensor.shape[0] == experts:
        return "experts"
    return "linear" if isinstance(tensor, nn.Parameter) and tensor.dim() > 1 else "other"


@dataclass(frozen=True)
class LayerKinds:
    """A model's short copy without data, or itself; the path of its layers; and by layer of the model, the copy's of its kind."""

    model: PreTrainedModel
    path: str
    places: tuple[int, ...]

    def short_name(self, name: str) -> str:
        """Return the copy's name for a module or tensor of the model; `name` may begin outside of it."""
        before, separator, inside = name.partition(f"{self.path}.")
        place, dot, rest = inside.partition(".")
        return f"{before}{self.path}.{self.places[int(place)]}{dot}{rest}" if self.places and separator else name


def one_of_each_kind(model: PreTrainedModel) -> LayerKinds:
    """Shorten a model with one list of layers to those that are not the same."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    with no_data():
        short = data_free_copy(model)
        kinds = kinds_of_layers(short)
    if len({kind.path for kind in kinds}) != 1 or sum(len(kind.members) for kind in kinds) != count:
        return LayerKinds(model, "", ())
    path, layers, kept = kinds[0].path, kinds[0].layers, [kind.members[0] for kind in kinds]
    config = short.config.get_text_config(decoder=True)
    parent, _, attribute = path.rpartition(".")
    setattr(short.get_submodule(parent), attribute, nn.ModuleList([layers[place] for place in kept]))
    config.num_hidden_layers = len(kept)
    types = getattr(config, "layer_types", None)
    if types and not isinstance(getattr(type(config), "layer_types", None), property):
        config.layer_types = [types[place] for place in kept]
    places = {member: number for number, kind in enumerate(kinds) for member in kind.members}
    return LayerKinds(short, path, tuple(places[layer] for layer in range(count)))
