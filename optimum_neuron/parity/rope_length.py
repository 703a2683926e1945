# SPDX-License-Identifier: Apache-2.0
"""Rotary frequencies that follow the length of a text: a step sees chunks of several texts, and the length of none.

transformers' rotary modules of the types "longrope" and "dynamic" choose them anew in every call, by its largest position.
An artifact has one choice: that of short texts, or of LongRoPE that of long ones, which all texts then get, as in vLLM.
"""

from __future__ import annotations

import bisect
import copy
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .inspect import look_at


_FIXED, _LONGROPE = "default", "longrope"
# Positions of a replayed call: the last one is as far as the text goes, the others are looked at.
_LOOKED_AT = 3
_OR_LONG = ", or give all texts the frequencies of long ones (long_frequencies=True, --long-frequencies)"


def check_text_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Asks each module that gets positions whether what it makes of the first depends on how far the last one is.

    Raises:
        ValueError: it does, for texts of up to `sequence_length` tokens; the length to which it does not is named.
    """
    for name, _, call in _position_calls(model):
        longest = _longest_alike(call, sequence_length)
        if longest < sequence_length:
            remedy = _OR_LONG if any(_LONGROPE in _kinds(each) for each in model.modules()) else ""
            raise ValueError(
                f"{type(model).__name__} cannot be exported with sequence_length={sequence_length}: {name} gives all tokens of a "
                f"text other frequencies once it has more than {longest} tokens, and a step sees a chunk of it; choose a "
                f"sequence_length of at most {longest}{remedy}"
            )


def take_long_frequencies(model: PreTrainedModel, sequence_length: int) -> None:
    """Gives a model's texts of every length the frequencies that LongRoPE has for long ones, of more tokens than it was trained on.

    Raises:
        ValueError: it has no LongRoPE, or texts of up to `sequence_length` tokens are short ones.
    """
    modules = {id(module) for module in model.modules() if _LONGROPE in _kinds(module)}
    calls = [(module, call) for _, module, call in _position_calls(model) if id(module) in modules]
    changing = [(module, call) for module, call in calls if _longest_alike(call, sequence_length) < sequence_length]
    if not changing:
        reason = "other frequencies for longer texts only" if calls else "no frequencies for long texts (LongRoPE)"
        raise ValueError(
            f"{type(model).__name__} cannot be exported with long_frequencies=True: with sequence_length={sequence_length} it "
            f"has {reason}; leave out long_frequencies"
        )
    for module, call in changing:
        long, _ = call(torch.tensor([sequence_length - 1], dtype=torch.int32))
        buffers = dict(long.named_buffers())
        for name in dict(module.named_buffers()):
            if name.endswith("inv_freq"):
                module.register_buffer(name, buffers[name].clone(), persistent=False)
    _fix(model, _LONGROPE)


def keep_frequencies(model: nn.Module) -> None:
    """Makes rotary modules keep the frequencies that they have, so that no graph asks how long a text is."""
    _fix(model, _LONGROPE, "dynamic")


def _fix(model: nn.Module, *changing: str) -> None:
    def fixed(kind: str) -> str:
        return _FIXED if any(each in kind for each in changing) else kind

    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layer: fixed(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = fixed(kinds)


def _kinds(module: nn.Module) -> tuple[str, ...]:
    kinds = getattr(module, "rope_type", None)
    return tuple(kinds.values()) if isinstance(kinds, dict) else (kinds,) if isinstance(kinds, str) else ()


# From positions to the module as the call left it, and what it gave.
_Call = Callable[[Tensor], tuple[nn.Module, Any]]


def _position_calls(model: PreTrainedModel) -> list[tuple[str, nn.Module, _Call]]:
    """The modules without parts that are given positions, with their names, and the call that the model makes, of other positions."""
    calls: list[tuple[str, nn.Module, _Call]] = []

    def note(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        if isinstance(bound.arguments.get("position_ids"), Tensor):
            calls.append((name, module, partial(_replay, module, bound)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not list(module.children()) and "position_ids" in inspect.signature(module.forward).parameters:
                hooks.callback(module.register_forward_pre_hook(partial(note, name), with_kwargs=True).remove)
        look_at(model)
    return calls


def _replay(module: nn.Module, bound: inspect.BoundArguments, positions: Tensor) -> tuple[nn.Module, Any]:
    own = copy.deepcopy(module)  # it may remember the longest text that it was given
    # models with positions of several kinds pass [kinds, 1, tokens]
    positions = positions.expand(*bound.arguments["position_ids"].shape[:-1], len(positions))
    arguments = {**bound.arguments, "position_ids": positions}
    bound = inspect.BoundArguments(bound.signature, arguments)
    with torch.inference_mode():
        return own, own.forward(*bound.args, **bound.kwargs)


def _longest_alike(call: _Call, sequence_length: int) -> int:
    """The largest number of tokens, up to `sequence_length`, with which the first are given what a short text gives them."""
    expected = _first(call, _LOOKED_AT + 1)

    def differs(length: int) -> bool:
        return not all(map(torch.equal, _first(call, length), expected))

    lengths = range(_LOOKED_AT + 1, sequence_length + 1)
    if not lengths or not differs(sequence_length):
        return sequence_length
    return bisect.bisect(lengths, False, key=differs) + _LOOKED_AT


def _first(call: _Call, length: int) -> list[Tensor]:
    positions = torch.tensor([*range(_LOOKED_AT), length - 1], dtype=torch.int32)
    _, outputs = call(positions)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor[..., :_LOOKED_AT, :] for tensor in tensors if isinstance(tensor, Tensor)]
