# SPDX-License-Identifier: Apache-2.0
"""The inspection of a model: what its layers keep, and whether step graphs compute what it does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ..config import NeuronConfig
from ..errors import UnsupportedModelError, first_line
from ..step.attention.masks import CausalMask
from ..step.attention.state import KeyValueState
from ..step.cache_needs import CacheNeeds
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


def inspect_model(model: PreTrainedModel) -> ModelSpec:
    """Run the model on a few tokens and return what its graphs need to know.

    A model with data in its weights also runs as step graphs, and must compute what transformers' own attention does.

    Raises:
        ValueError: the model cannot run as step graphs; the reason is named.
    """
    with _explain_refusal(model), one_thread():
        spec = _see_layers(model)
        check_result(model, spec, by_itself=CacheNeeds.read_code(model).by_itself)
    return spec


def inspect_layers(model: PreTrainedModel) -> ModelSpec:
    """Return what `inspect_model` does, for a model with weights of any numbers: nothing is compared.

    Raises:
        ValueError: the model cannot run as step graphs, as far as its layers show.
    """
    with _explain_refusal(model), one_thread():
        return _see_layers(model)


@contextmanager
def _explain_refusal(model: PreTrainedModel) -> Iterator[None]:
    try:
        yield
    except UnsupportedModelError as error:
        raise ValueError(f"{type(model).__name__} cannot be exported: {error}{_find_remedy(model, error)}") from error


def _see_layers(model: PreTrainedModel) -> ModelSpec:
    if CacheNeeds.read_code(model).by_itself:
        check_own_masks(model)
    spec = _record_model(model)
    check_layers(model, spec)
    return spec


def check_states(model: PreTrainedModel, spec: ModelSpec, config: NeuronConfig) -> None:
    """Check that graphs of a config can keep what a model's layers keep; warn of what costs more.

    Raises:
        ValueError: they cannot; the message names the option and the remedy.
    """
    checked = CheckedModel(type(model).__name__, CacheNeeds.read_code(model).by_itself)
    for kind in KINDS:
        kind.check_config(spec.states_of(kind), checked, config)
    spec.check_snapshots(checked.name, config)


class _NoProducts(TorchFunctionMode):
    """A mode in which linear layers give zeros: their shapes are enough, and a product with one row reads all weights."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _make_zeros(*args, **kwargs or {}) if func is nn.functional.linear else func(*args, **kwargs or {})


def _make_zeros(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return input.new_zeros((*input.shape[:-1], weight.shape[0]))


def look_at(
    model: PreTrainedModel,
    call: Callable[..., Any] | None = None,
    *,
    token_id: int = 0,
    position: int = 0,
    sequence_length: int = 1,
) -> ModelSpec:
    """Run a token with attention, experts and linear layers that only record; return what each layer keeps.

    Args:
        call: runs the model; by default the model itself.
        token_id, position: the token, and its position.
        sequence_length: tokens of the longest text.
    """
    needs = CacheNeeds.read_code(model)
    set_stand_ins(model)
    found: dict[type[LayerState], list[LayerState]] = {kind: [] for kind in KINDS}
    make_bias = BiasMask if needs.biased else _hide_nothing if needs.by_itself else None
    backends = Backends({kind: kind.make_recorder(states) for kind, states in found.items()}, make_bias)
    token, positions = (torch.full((1, 1), each, dtype=torch.int32) for each in (token_id, position))
    kwargs: dict[str, Any] = {}
    if accepts_keyword(model, "attention_backend"):
        kwargs["attention_backend"] = backends[KeyValueState]
    kwargs |= needs.arguments(positions[0], backends, sequence_length)
    kwargs |= {"input_ids": token, "use_cache": False}
    with torch.inference_mode(), serving(backends, positions[0]), routing(no_experts), _NoProducts():
        logits: Tensor = (call or model)(**kwargs).logits
    vocab_size = logits.shape[-1]
    states = tuple(state for kept in found.values() for state in kept)
    return ModelSpec(vocab_size, states, num_embeddings=vocab_size)


def _hide_nothing(mask: CausalMask, dtype: torch.dtype) -> Tensor:
    mask.visible_window()
    return torch.zeros((1, 1, 1, 1), dtype=dtype)


class LookUps(TorchFunctionMode):
    """A mode that notes the tables in which a running model looks a token up.

    Args:
        token: numbers no position and no type of a token.

    Attributes:
        rows: of each table.
    """

    def __init__(self, token: int) -> None:
        super().__init__()
        self._token = token
        self.rows: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is nn.functional.embedding:
            self._note_table(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    def _note_table(self, input: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        if torch.equal(input, torch.full_like(input, self._token)):
            self.rows.append(weight.shape[0])


def _num_embeddings(model: PreTrainedModel, vocab_size: int) -> int:
    token_id = vocab_size // 2
    with LookUps(token_id) as look_ups:
        look_at(model, token_id=token_id)
    return min(look_ups.rows, default=vocab_size)


def _record_model(model: PreTrainedModel) -> ModelSpec:
    try:
        spec = look_at(model)
        return replace(spec, num_embeddings=_num_embeddings(model, spec.vocab_size)) if is_comparable(model) else spec
    except (UnsupportedModelError, DataDependentOutputException, DynamicOutputShapeException):
        raise
    except (TypeError, AttributeError, IndexError, KeyError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"it fails on a token with its position and no cache: {first_line(error)}"
        ) from error


def _find_remedy(model: PreTrainedModel, error: UnsupportedModelError) -> str:
    """Return a hint where transformers keeps some weights in float32: the model's code may not run in another type."""
    types = {str(each.dtype).removeprefix("torch.") for each in model.parameters() if each.is_floating_point()}
    if len(types) < 2 or not isinstance(error.__cause__, RuntimeError):
        return ""
    return f"; its weights have the types {' and '.join(sorted(types))}: try dtype='float32'"
