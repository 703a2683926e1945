# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies that follow the length of a text: a step sees chunks of several texts, and the length of none.

transformers' rotary modules of the types "longrope" and "dynamic" choose them anew in every call, by its largest position.
"""

from __future__ import annotations

import bisect
import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .inspect import look_at


_FIXED = "default"
# Positions of a replayed call: the last one is as far as the text goes, the others are looked at.
_LOOKED_AT = 3


def check_text_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Asks each module that gets positions whether what it makes of the first depends on how far the last one is.

    Raises:
        ValueError: it does, for texts of up to `sequence_length` tokens; the length to which it does not is named.
    """
    for name, call in _position_calls(model):
        longest = _longest_alike(call, sequence_length)
        if longest < sequence_length:
            raise ValueError(
                f"{type(model).__name__} cannot be exported with sequence_length={sequence_length}: {name} gives all tokens of a "
                f"text other frequencies once it has more than {longest} tokens, and a step sees a chunk of it; choose a "
                f"sequence_length of at most {longest}"
            )


def keep_frequencies(model: nn.Module) -> None:
    """Makes rotary modules keep the frequencies of short texts, so that no graph asks how long one is."""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = _fixed(kinds)


def _fixed(kind: str) -> str:
    return _FIXED if kind == "longrope" or "dynamic" in kind else kind


def _position_calls(model: PreTrainedModel) -> list[tuple[str, Callable[[Tensor], Any]]]:
    """The modules without parts that are given positions: a name, and the call that the model makes, of other positions."""
    calls: list[tuple[str, Callable[[Tensor], Any]]] = []

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        calls.append((name, partial(_replay, module, bound)))

    hooks = [
        module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, module in model.named_modules()
        if not list(module.children()) and "position_ids" in inspect.signature(module.forward).parameters
    ]
    try:
        look_at(model)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _replay(module: nn.Module, bound: inspect.BoundArguments, positions: Tensor) -> Any:
    own = copy.deepcopy(module)  # it may remember the longest text that it was given
    # models with positions of several kinds pass [kinds, 1, tokens]
    positions = positions.expand(*bound.arguments["position_ids"].shape[:-1], len(positions))
    arguments = {**bound.arguments, "position_ids": positions}
    bound = inspect.BoundArguments(bound.signature, arguments)
    with torch.inference_mode():
        return own.forward(*bound.args, **bound.kwargs)


def _longest_alike(call: Callable[[Tensor], Any], sequence_length: int) -> int:
    """The largest number of tokens, up to `sequence_length`, with which the first are given what a short text gives them."""
    expected = _first(call, _LOOKED_AT + 1)

    def differs(length: int) -> bool:
        return not all(map(torch.equal, _first(call, length), expected))

    lengths = range(_LOOKED_AT + 1, sequence_length + 1)
    return (
        sequence_length
        if not lengths or not differs(sequence_length)
        else bisect.bisect(lengths, False, key=differs) + _LOOKED_AT
    )


def _first(call: Callable[[Tensor], Any], length: int) -> list[Tensor]:
    positions = torch.tensor([*range(_LOOKED_AT), length - 1], dtype=torch.int32)
    outputs = call(positions)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor[..., :_LOOKED_AT, :] for tensor in tensors if isinstance(tensor, Tensor)]
