# SPDX-License-Identifier: Apache-2.0
"""The inspection of a model: what its layers keep, and whether step graphs compute what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..config import NeuronConfig
from ..errors import UnsupportedModelError, first_line
from ..step.attention.masks import CausalMask
from ..step.attention.state import KeyValueState
from ..step.cache_needs import CacheNeeds
from ..step.features.codes.modules import multiplying
from ..step.features.codes.weight import QuantizedWeight
from ..step.features.experts.experts import no_experts, routing
from ..step.features.own_code.own_scores import BiasMask
from ..step.interface import accepts_keyword
from ..step.layer_state import CheckedModel, LayerState
from ..step.model_spec import KINDS, ModelSpec
from ..step.one_thread import one_thread
from ..step.serving import Backends, serving
from ..step.step import set_stand_ins
from .conditions import check_own_masks
from .parity import check_layers, check_result, is_comparable


def inspect_model(model: PreTrainedModel, *, compare: bool = True) -> ModelSpec:
    """Run the model on a few tokens and return what its graphs need to know; raise ValueError with the reason where none can run it.

    A model with data in its weights also runs as step graphs, and must compute what transformers' own attention does, unless its weights
    are any numbers and nothing is to be compared.
    """
    try:
        with one_thread():
            by_itself = CacheNeeds.read_code(model).by_itself
            if by_itself:
                check_own_masks(model)
            spec = _record_model(model)
            check_layers(model, spec)
            if compare:
                check_result(model, spec, by_itself=by_itself)
        return spec
    except UnsupportedModelError as error:
        types = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()}
        hint = ""
        # transformers keeps some weights in float32, and the model's code may not run in another type.
        if len(types) > 1 and isinstance(error.__cause__, RuntimeError):
            hint = f"; its weights have the types {' and '.join(sorted(types))}: try dtype='float32'"
        raise ValueError(f"{type(model).__name__} cannot be exported: {error}{hint}") from error


def check_states(model: PreTrainedModel, spec: ModelSpec, config: NeuronConfig) -> None:
    """Check that graphs of a config can keep a model's states, or raise ValueError with the remedy; warn of what costs more."""
    checked = CheckedModel(type(model).__name__, CacheNeeds.read_code(model).by_itself)
    for kind in KINDS:
        kind.check_config(spec.states_of(kind), checked, config)
    spec.check_kept_states(checked.name, config)


class _NoProducts(TorchFunctionMode):
    """A mode in which linear layers give zeros: their shapes are enough, and a product with one row reads all weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _make_zeros(*args, **kwargs or {}) if func is nn.functional.linear else func(*args, **kwargs or {})


def _make_zeros(input: Tensor, weight: Tensor | QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    outputs = weight.shape[0] if isinstance(weight, Tensor) else weight.outputs
    return input.new_zeros((*input.shape[:-1], outputs))


def look_at(
    model: PreTrainedModel,
    call: Callable[..., Any] | None = None,
    *,
    token_id: int = 0,
    position: int = 0,
    sequence_length: int = 1,
) -> ModelSpec:
    """Run a token with attention, experts and linear layers that only record; return what each layer keeps.

    `call` runs the model, by default itself. `sequence_length` is that of the longest text.
    """
    needs = CacheNeeds.read_code(model)
    set_stand_ins(model)
    found: dict[type[LayerState], list[LayerState]] = {kind: [] for kind in KINDS}
    make_bias = BiasMask if needs.biased else _hide_nothing if needs.by_itself else None
    recorders = {kind: kind.load_backends()[0](states, kind) for kind, states in found.items()}
    backends = Backends(recorders, make_bias)
    token, positions = (torch.full((1, 1), each, dtype=torch.int32) for each in (token_id, position))
    kwargs: dict[str, Any] = {}
    if accepts_keyword(model, "attention_backend"):
        kwargs["attention_backend"] = backends[KeyValueState]
    kwargs |= needs.arguments(positions[0], backends, sequence_length)
    kwargs |= {"input_ids": token, "use_cache": False}
    with (
        torch.inference_mode(),
        serving(backends, positions[0]),
        routing(no_experts),
        _NoProducts(),
        multiplying(_make_zeros),
    ):
        logits: Tensor = (call or model)(**kwargs).logits
    vocab_size = logits.shape[-1]
    states = tuple(state for kept in found.values() for state in kept)
    return ModelSpec(vocab_size, states, num_embeddings=vocab_size)


def _hide_nothing(mask: CausalMask, dtype: torch.dtype) -> Tensor:
    mask.visible_window()
    return torch.zeros((1, 1, 1, 1), dtype=dtype)


class LookUps(TorchFunctionMode):
    """A mode that notes the `rows` of tables in which a running model looks a token up, which numbers no position and no type of a token."""

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
        if func is nn.functional.embedding and bool((given["input"] == self._token).all()):
            self.rows.append(given["weight"].shape[0])
        return func(*args, **kwargs or {})


def _record_model(model: PreTrainedModel) -> ModelSpec:
    try:
        spec = look_at(model)
        if not is_comparable(model):
            return spec
        token_id = spec.vocab_size // 2
        with LookUps(token_id) as look_ups:
            look_at(model, token_id=token_id)
        return replace(spec, num_embeddings=min(look_ups.rows, default=spec.vocab_size))
    except (UnsupportedModelError, DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"it fails on a token with its position and no cache: {first_line(error)}"
        ) from error


def check_fixed_shapes(model: PreTrainedModel, target: str) -> None:
    """Raise ValueError where a model's shapes, or which code runs, depend on values; no weight is read. The message names the target."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shapes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}

    def call_model(**kwargs: Any) -> Any:
        return torch.func.functional_call(model, shapes, (), kwargs)

    with _track_running(model) as names, mode:
        try:
            look_at(model, call_model)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            kinds = "experts outside of transformers' experts interface, or another choice by value"
            raise ValueError(
                f"{type(model).__name__} cannot be exported for target={target!r}: what {names[-1] or 'it'} computes depends on "
                f"the values of tensors ({kinds}: {error.func}), and graphs have fixed shapes; target='eager' runs it"
            ) from error


@contextmanager
def _track_running(model: nn.Module) -> Iterator[list[str]]:
    """Yield the names of the modules that run, the innermost last; those that failed stay."""
    names: list[str] = []

    def enter_module(name: str, *_: Any) -> None:
        names.append(name)

    def leave_module(*_: Any) -> None:
        names.pop()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(partial(enter_module, name)).remove)
            hooks.callback(module.register_forward_hook(leave_module).remove)
        yield names
