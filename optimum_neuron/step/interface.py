# SPDX-License-Identifier: Apache-2.0
"""Where transformers' modelling code meets the step: its attention interface, and its interface for masks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .features.compressed_keys.compression import CompressedKeys, split_joined
from .features.recurrence.recurrence import running_backend
from .features.selected_keys.top_keys import selection_of
from .masks import CausalMask, UnsupportedModelError, Window, causal_mask
from .tracing.layer_index import plain_index


ATTENTION_NAME = "optimum_neuron"
# Parameters of transformers' own attention functions that change nothing here.
_WITHOUT_MEANING = ("dropout", "training", "output_attentions", "use_cache")


class AttentionBackend(Protocol):
    """Receives every attention call of a model's forward pass as the keyword argument `attention_backend`."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Returns `[1, tokens, heads, value_dim]`."""


class StepBackend(AttentionBackend, Protocol):
    """One that also serves models that attend by themselves."""

    def bias(self, mask: CausalMask, dtype: torch.dtype) -> CausalMask | Tensor | None:
        """A mask as a model gets it that attends by itself, in general a tensor to add to scores; None for others."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention: `query [1, heads, tokens, key_dim]`, `key` and `value` with the layer's kv heads.

    `sliding_window` is what a token sees of the past: all of it, a window, or its own chunk. Of that `selected` leaves some, in
    the call of a layer `[tokens, 1 or kv_heads, columns]`, in that of a group of rows `[rows, 1 or kv_heads, tokens, columns]`; None
    leaves all.
    `column_bias [heads, columns]` is added to the scores of a key by its column, which is its position; a number that all keys of a
    query have more changes nothing. `compressed` are keys that stand for several tokens each, which are attended to beside the others.
    """

    layer_idx: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    sliding_window: Window
    softcap: float | None
    sinks: Tensor | None
    column_bias: Tensor | None = None
    selected: Tensor | None = None
    compressed: CompressedKeys | None = None

    @property
    def attends_to_all(self) -> bool:
        """Whether each token attends to all keys that it sees and to no others, which kernels take for granted."""
        return self.selected is None and self.compressed is None


_backends: ContextVar[StepBackend] = ContextVar("attention backend of the running forward pass")


@contextmanager
def attending(backend: StepBackend) -> Iterator[None]:
    """For the forward passes within: some models do not pass keyword arguments on to their attention layers."""
    token = _backends.set(backend)
    try:
        yield
    finally:
        _backends.reset(token)


def _attention(
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
    selection = selection_of(attention_mask, others.values())
    key, value, compressed = split_joined(key, value)
    call = AttentionCall(
        layer_idx=_layer_idx(module),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=_window(module, attention_mask, sliding_window),
        softcap=softcap,
        sinks=s_aux,
        selected=None if selection is None else _by_kv_head(selection.selected, key.shape[1]),
        compressed=compressed,
    )
    backend = attention_backend or _backends.get(None)
    if backend is None:
        raise UnsupportedModelError("it does not pass keyword arguments on to its attention layers")
    return backend.attend(call).contiguous(), None  # some models view it


def _by_kv_head(selected: Tensor | None, kv_heads: int) -> Tensor | None:
    """What a selection left, `[tokens, heads, columns]`, with one head for all or one for each that has keys."""
    if selected is None or selected.shape[1] in (1, kv_heads):
        return selected
    if kv_heads % selected.shape[1]:
        raise UnsupportedModelError(
            f"it selects keys by {selected.shape[1]} heads, of which {kv_heads} with keys have no equal shares"
        )
    return selected.repeat_interleave(kv_heads // selected.shape[1], dim=1)


def _layer_idx(module: Any) -> int:
    """A layer's own number; of attention that several layers share, the one that it was given for its cache."""
    number: int | None = plain_index(module.layer_idx)
    if number is not None and number >= 0:
        return number
    backend = running_backend()
    if backend is None or backend.layer_idx is None:
        raise UnsupportedModelError("it attends in a layer that has no number, and stores no keys by one")
    return backend.layer_idx


def _window(module: Any, attention_mask: CausalMask | Tensor | None, sliding_window: int | None) -> Window:
    """What the layer sees, by its mask alone where it has one: transformers' own attention obeys nothing else."""
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
    """transformers passes every keyword of the model call to every attention function.

    Those that matter are parameters of the attention function that the model's own code falls back to.
    """
    own = getattr(sys.modules.get(type(module).__module__), "eager_attention_forward", None)
    names = own.__code__.co_varnames[: own.__code__.co_argcount + own.__code__.co_kwonlyargcount] if own else ()
    for name in names:
        if others.get(name) is not None and name not in _WITHOUT_MEANING:
            raise UnsupportedModelError(
                f"it calls attention with {name}=, which the cached attention does not compute"
            )


def _mask(*args: Any, **kwargs: Any) -> CausalMask | Tensor:
    """As transformers' functions that make masks: a rule, or a tensor for a model that attends by itself."""
    mask = causal_mask(*args, **kwargs)
    backend = _backends.get(None)
    bias = None if backend is None else backend.bias(mask, kwargs.get("dtype", torch.float32))
    return mask if bias is None else bias


def register() -> None:
    """Makes `attn_implementation="optimum_neuron"` known to transformers; masks come from positions, not from it."""
    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _mask)


register()


def set_implementation(model: nn.Module, name: str) -> None:
    """Changes whose attention a model calls, also where a model does not declare that it can."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = name


def with_attention(make: Callable[[str], PreTrainedModel], name: str) -> PreTrainedModel:
    """Makes a model by a function of the attention's name, also where its code knows only transformers' own names.

    Raises:
        KeyError: it fails for another reason.
    """
    try:
        return make(name)
    except KeyError as error:
        if error.args != (name,):
            raise
    model = make("eager")
    set_implementation(model, name)
    return model
