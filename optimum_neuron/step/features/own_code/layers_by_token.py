# SPDX-License-Identifier: Apache-2.0
"""Layers that take a state on in code of their own: while a step runs, each of its tokens is a text of its own to them.

They keep states in transformers' cache by `get_linear_cache`, or by `update_recurrent_state` without one of the functions that compute
recurrences; or in attributes that their `_setup_cache` makes. own_states.py reads what they do with `[tokens, 1, size]`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ....errors import UnsupportedModelError
from ...serving import Backends, plain_index, replace_in_steps, set_within
from ..convolution.state import ConvolutionState
from ..recurrence.recurrent_functions import REPLACED
from ..recurrence.state import RecurrentState
from .own_states import RUNS, OwnState, Run, is_kept


_NUMBER = "_number_of_layer"  # an attribute of a module that keeps states in attributes


def names_in_forward(module: nn.Module) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def keeps_own_state(module: nn.Module) -> bool:
    names = names_in_forward(module)
    if "update_recurrent_state" in names:
        return not REPLACED & vars(sys.modules[type(module).__module__]).keys()
    return "get_linear_cache" in names or _sets_up(module)


def _sets_up(module: nn.Module) -> bool:
    """Return whether a module has transformers' method that makes states as attributes of it and of its parts."""
    method = getattr(type(module), "_setup_cache", None)
    return method is not None and list(inspect.signature(method).parameters)[1:] == ["batch", "device", "dtype"]


def set_own_states(model: nn.Module) -> None:
    """Make these layers of a model run token by token where a step runs."""
    for path, module in model.named_modules():
        if not keeps_own_state(module):
            continue
        if _sets_up(module):
            setattr(module, _NUMBER, next((int(part) for part in path.split(".") if part.isdigit()), None))
        replace_in_steps(type(module), "forward", _run_by_token)


def _run_by_token(backends: Backends, theirs: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    leaves, structure = pytree.tree_flatten((args, kwargs))
    hidden = next(each for each in leaves if isinstance(each, Tensor) and each.dim() == 3)
    run = Run(hidden.shape[1], backends[RecurrentState], backends[ConvolutionState])
    args, kwargs = pytree.tree_unflatten(list(_turn_tensors(leaves, 1, run.tokens)), structure)
    with _set_attributes(module, run, hidden.dtype) as options, set_within(RUNS, run), run:
        output = theirs(module, *args, **kwargs | options)
    leaves, structure = pytree.tree_flatten(output)
    return pytree.tree_unflatten(list(_turn_tensors(leaves, run.tokens, 1)), structure)


def _turn_tensors(leaves: list[Any], rows: int, tokens: int) -> Iterator[Any]:
    """Yield tensors `[rows, tokens, ...]` as `[tokens, rows, ...]`, all else as it is."""
    for each in leaves:
        yield each.transpose(0, 1) if isinstance(each, Tensor) and each.shape[:2] == (rows, tokens) else each


@contextmanager
def _set_attributes(module: nn.Module, run: Run, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Set stand-ins where a module keeps states in attributes; yield the options that make it use them."""
    if not _sets_up(module):
        yield {}
        return
    made: Any = module
    number = getattr(module, _NUMBER)
    before = [(part, dict(vars(part))) for part in module.modules()]
    made._setup_cache(run.tokens, torch.device("cpu"), dtype)
    states = [
        (part, name, values.get(name), value.shape)
        for part, values in before
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and values.get(name) is not value
    ]
    run.recurrences.enter_layer(number)
    try:
        for part, name, _, shape in states:
            setattr(part, name, OwnState(run, shape))
        yield {"use_cache": True} if "use_cache" in inspect.signature(made.forward).parameters else {}
        if not all(is_kept(getattr(part, name)) for part, name, *_ in states):
            raise UnsupportedModelError(f"layer {plain_index(number)} keeps the state of a recurrence of its own")
    finally:
        for part, name, value, _ in states:
            setattr(part, name, value)
