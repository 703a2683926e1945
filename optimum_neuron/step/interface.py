# SPDX-License-Identifier: Apache-2.0
"""The interfaces of transformers' modelling code that a step serves: attention, masks, tables of positions."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from ..errors import UnsupportedModelError
from .attention.masks import CausalMask, Window, causal_mask
from .attention.rows import AttentionBackend, AttentionCall
from .attention.state import KeyValueState
from .features.compressed_keys.compression import split_joined
from .features.recurrence.state import RecurrentState
from .features.selected_keys.index_keys import selection_of
from .serving import Backends, plain_index, replace_in_steps, running_backends


ATTENTION_NAME = "optimum_neuron"
# Parameters of transformers' own attention functions that change nothing here.
_WITHOUT_MEANING = ("dropout", "training", "output_attentions", "use_cache")


def _attend_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: CausalMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    attention_backend: AttentionBackend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    _refuse_meaningful(module, others)
    selection, backends = selection_of(attention_mask, others.values()), running_backends()
    key, value, compressed = split_joined(key, value)
    number: int | None = plain_index(module.layer_idx)
    if backends is not None and (number is None or number < 0):  # attention that several layers share
        number = backends[RecurrentState].layer_idx
    if number is None or number < 0:
        raise UnsupportedModelError("it attends in a layer that has no number, and stores no keys by one")
    selected, kv_heads = None if selection is None else selection.selected, key.shape[1]
    if selected is not None and selected.shape[1] not in (1, kv_heads):
        if kv_heads % selected.shape[1]:
            raise UnsupportedModelError(
                f"it selects keys by {selected.shape[1]} heads, of which {kv_heads} with keys have no equal shares"
            )
        selected = selected.repeat_interleave(kv_heads // selected.shape[1], dim=1)
    call = AttentionCall(
        layer_idx=number,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=_find_window(module, attention_mask, sliding_window),
        softcap=softcap,
        sinks=s_aux,
        selected=selected,
        compressed=compressed,
    )
    backend = attention_backend or (None if backends is None else backends[KeyValueState])
    if backend is None:
        raise UnsupportedModelError("it does not pass keyword arguments on to its attention layers")
    return backend.attend(call).contiguous(), None  # some models view it


def _find_window(module: Any, attention_mask: CausalMask | Tensor | None, sliding_window: int | None) -> Window:
    """Return what the layer sees. Its mask alone decides where it has one: transformers' own attention obeys nothing else."""
    if isinstance(attention_mask, CausalMask):
        return attention_mask.visible_window()
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"it passes a mask or bias of its own to attention, {list(attention_mask.shape)} (ALiBi, relative positions, "
            f"sparse selection)"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            "it attends without a mask where it is not causal (cross-attention, or an encoder)"
        )
    return sliding_window


def _refuse_meaningful(module: Any, others: dict[str, Any]) -> None:
    """Refuse keywords that the cached attention does not compute: parameters of the function that the model's own code falls back to."""
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    code = getattr(own, "__code__", None)
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ():
        if others.get(name) is not None and name not in _WITHOUT_MEANING:
            raise UnsupportedModelError(
                f"it calls attention with {name}=, which the cached attention does not compute"
            )


def _make_mask(*args: Any, **kwargs: Any) -> CausalMask | Tensor:
    """Return a rule in place of transformers' masks, or a tensor for a model that attends by itself."""
    mask = causal_mask(*args, **kwargs)
    backends = running_backends()
    if backends is None or backends.make_bias is None:
        return mask
    return cast(CausalMask | Tensor, backends.make_bias(mask, kwargs.get("dtype", torch.float32)))


AttentionInterface.register(ATTENTION_NAME, _attend_call)
AttentionMaskInterface.register(ATTENTION_NAME, _make_mask)


def set_implementation(model: nn.Module, name: str) -> None:
    """Change the attention that a model calls, also where the model does not declare that it can."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name


def with_attention(make: Callable[[str], PreTrainedModel], name: str) -> PreTrainedModel:
    """Make a model by a function of the attention's name, also where its code knows only transformers' own names."""
    try:
        return make(name)
    except KeyError as error:
        if error.args != (name,):
            raise
    model = make("eager")
    set_implementation(model, name)
    return model


def accepts_keyword(model: nn.Module, keyword: str, *, by_name: bool = False) -> bool:
    """Return whether a model's forward takes a keyword; `by_name`: whether it has a parameter of that name."""
    parameters = inspect.signature(model.forward).parameters
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return keyword in parameters or (others and not by_name)


def set_position_tables(model: nn.Module) -> None:
    """Make a model's tables look up the positions of a running step where their callers pass no others."""
    for kind in {type(module) for module in model.modules() if isinstance(module, nn.Embedding)}:
        if {"past_key_values_length", "position_ids"} <= inspect.signature(kind.forward).parameters.keys():
            replace_in_steps(kind, "forward", _look_up)


def _look_up(backends: Backends, theirs: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    given = inspect.signature(theirs).bind(*args, **kwargs)
    if given.arguments.get("position_ids") is None:
        given.arguments["position_ids"] = backends.positions
    return theirs(*given.args, **given.kwargs)
