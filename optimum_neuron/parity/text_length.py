# SPDX-License-Identifier: Apache-2.0
"""Limits of the length of texts: frequencies that follow it, and tables of positions.

transformers' rotary modules of the types "longrope" and "dynamic" choose frequencies in every call, by its largest position. An artifact has
one choice: that of short texts, or of LongRoPE that of long ones, which all texts then get, as in vLLM.
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

from ..errors import UnsupportedModelError
from .inspect import look_at


_FIXED, _LONGROPE = "default", "longrope"
# Positions of a replayed call: the last one is as far as the text goes, the others are looked at.
_LOOKED_AT = 3
_OR_LONG = ", or give all texts the frequencies of long ones (long_frequencies=True, --long-frequencies)"


def check_text_length(model: PreTrainedModel, sequence_length: int) -> None:
    """Raise ValueError where a module treats the first positions otherwise for longer texts, up to `sequence_length`; it names the limit."""
    for name, _, call in _position_calls(model):
        longest = _longest_alike(call, sequence_length)
        if longest < sequence_length:
            remedy = _OR_LONG if any(_LONGROPE in _rope_kinds(each) for each in model.modules()) else ""
            raise ValueError(
                f"{type(model).__name__} cannot be exported with sequence_length={sequence_length}: {name} gives all tokens of a "
                f"text other frequencies once it has more than {longest} tokens, and a step sees a chunk of it; choose a "
                f"sequence_length of at most {longest}{remedy}"
            )


def take_long_frequencies(model: PreTrainedModel, sequence_length: int) -> None:
    """Give a model's texts of every length LongRoPE's frequencies for long ones; ValueError where it has none, or only short texts."""
    modules = {id(module) for module in model.modules() if _LONGROPE in _rope_kinds(module)}
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
    _fix_kinds(model, _LONGROPE)


def keep_frequencies(model: nn.Module) -> None:
    """Make rotary modules keep their frequencies, so that no graph asks how long a text is."""
    _fix_kinds(model, _LONGROPE, "dynamic")


def _fix_kinds(model: nn.Module, *changing: str) -> None:
    def fix_kind(kind: str) -> str:
        return _FIXED if any(each in kind for each in changing) else kind

    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, dict):
            module.rope_type = {layer: fix_kind(kind) for layer, kind in kinds.items()}
        elif isinstance(kinds, str):
            module.rope_type = fix_kind(kinds)


def _rope_kinds(module: nn.Module) -> tuple[str, ...]:
    kinds = getattr(module, "rope_type", None)
    return tuple(kinds.values()) if isinstance(kinds, dict) else (kinds,) if isinstance(kinds, str) else ()


# From positions to the module as the call left it, and what it gave.
_Call = Callable[[Tensor], tuple[nn.Module, Any]]


def _position_calls(model: PreTrainedModel) -> list[tuple[str, nn.Module, _Call]]:
    """Return the modules without parts that are given positions, with their names, and the model's call of them by positions."""
    calls: list[tuple[str, nn.Module, _Call]] = []

    def note_call(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        if isinstance(bound.arguments.get("position_ids"), Tensor):
            calls.append((name, module, partial(_replay_call, module, bound)))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not list(module.children()) and "position_ids" in inspect.signature(module.forward).parameters:
                hooks.callback(module.register_forward_pre_hook(partial(note_call, name), with_kwargs=True).remove)
        look_at(model)
    return calls


def _replay_call(module: nn.Module, bound: inspect.BoundArguments, positions: Tensor) -> tuple[nn.Module, Any]:
    own = copy.deepcopy(module)  # it may remember the longest text that it was given
    # models with positions of several kinds pass [kinds, 1, tokens]
    positions = positions.expand(*bound.arguments["position_ids"].shape[:-1], len(positions))
    arguments = {**bound.arguments, "position_ids": positions}
    bound = inspect.BoundArguments(bound.signature, arguments)
    with torch.inference_mode():
        return own, own.forward(*bound.args, **bound.kwargs)


def _longest_alike(call: _Call, sequence_length: int) -> int:
    """Return the most tokens, up to `sequence_length`, with which the first get what a short text gives them."""
    expected = _first_outputs(call, _LOOKED_AT + 1)

    def is_different(length: int) -> bool:
        return not all(map(torch.equal, _first_outputs(call, length), expected))

    lengths = range(_LOOKED_AT + 1, sequence_length + 1)
    if not lengths or not is_different(sequence_length):
        return sequence_length
    return bisect.bisect(lengths, False, key=is_different) + _LOOKED_AT


def _first_outputs(call: _Call, length: int) -> list[Tensor]:
    positions = torch.tensor([*range(_LOOKED_AT), length - 1], dtype=torch.int32)
    _, outputs = call(positions)
    tensors = outputs if isinstance(outputs, tuple) else (outputs,)
    return [tensor[..., :_LOOKED_AT, :] for tensor in tensors if isinstance(tensor, Tensor)]


def check_tables(model: PreTrainedModel, sequence_length: int) -> None:
    """Raise ValueError where a table of positions or biases is shorter than a text; it names the longest text that fits."""
    if not _lacks_position(model, sequence_length):
        return
    longest = bisect.bisect(range(1, sequence_length + 1), False, key=lambda length: _lacks_position(model, length))
    raise ValueError(
        f"{type(model).__name__} cannot be exported with sequence_length={sequence_length}: its table of positions ends at "
        f"{longest} tokens; choose a sequence_length of at most {longest}"
    )


def _lacks_position(model: PreTrainedModel, length: int) -> bool:
    """Return whether a text of that length has no place for its last token."""
    try:
        look_at(model, position=length - 1, sequence_length=length)
    except (IndexError, RuntimeError, UnsupportedModelError):  # a look-up, torch's gather, and a table of biases
        return True
    return False
