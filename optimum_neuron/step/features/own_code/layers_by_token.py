# SPDX-License-Identifier: Apache-2.0
"""Layers that take a state on in code of their own: while a step runs, each of its tokens is a text of its own to them.

They are known by where they keep states, whatever model they are of: in transformers' cache by `get_linear_cache`, or by
`update_recurrent_state` without one of the functions that compute recurrences; or in attributes that their `_setup_cache` makes.
What they then do with `[tokens, 1, size]`, as where they generate, own_states.py reads.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...masks import UnsupportedModelError
from ...tracing.layer_index import plain_index
from ..recurrence.recurrence import running_backend, running_convolutions
from ..recurrence.recurrent_functions import REPLACED
from .own_run import Run, reading
from .own_states import KeptState, is_kept


# Given to a module that keeps states in attributes: the number of its layer.
_NUMBER = "_number_of_layer"


def keeps_own_state(module: nn.Module) -> bool:
    """Whether a module's own code takes a state on."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    names = () if code is None else code.co_names
    if "update_recurrent_state" in names:
        return not REPLACED & vars(sys.modules[type(module).__module__]).keys()
    return "get_linear_cache" in names or _sets_up(module)


def _sets_up(module: nn.Module) -> bool:
    """Whether a module has transformers' method that makes states as attributes of it and of its parts."""
    method = getattr(type(module), "_setup_cache", None)
    return method is not None and list(inspect.signature(method).parameters)[1:] == ["batch", "device", "dtype"]


def set_own_states(model: nn.Module) -> None:
    """Has these layers of a model run so where a step runs; elsewhere they run as they are."""
    for path, module in model.named_modules():
        if not keeps_own_state(module):
            continue
        if _sets_up(module):
            setattr(module, _NUMBER, next((int(part) for part in path.split(".") if part.isdigit()), None))
        kind: Any = type(module)
        if not hasattr(kind.forward, "_without_step"):
            kind.forward = _in_steps(kind.forward)


def _in_steps(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        recurrences, convolutions = running_backend(), running_convolutions()
        if recurrences is None or convolutions is None:
            return theirs(self, *args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        hidden = next(each for each in leaves if isinstance(each, Tensor) and each.dim() == 3)
        run = Run(hidden.shape[1], recurrences, convolutions)
        args, kwargs = pytree.tree_unflatten(list(_turned(leaves, 1, run.tokens)), structure)
        with _attributes(self, run, hidden.dtype) as options, reading(run):
            output = theirs(self, *args, **kwargs | options)
        leaves, structure = pytree.tree_flatten(output)
        return pytree.tree_unflatten(list(_turned(leaves, run.tokens, 1)), structure)

    forward._without_step = theirs  # type: ignore[attr-defined]
    return forward


def _turned(leaves: list[Any], rows: int, tokens: int) -> Iterator[Any]:
    """Tensors `[rows, tokens, ...]` as `[tokens, rows, ...]`, all else as it is."""
    for each in leaves:
        yield each.transpose(0, 1) if isinstance(each, Tensor) and each.shape[:2] == (rows, tokens) else each


@contextmanager
def _attributes(module: nn.Module, run: Run, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Has stand-ins where a module keeps states in attributes; yields how it is asked to use them."""
    if not _sets_up(module):
        yield {}
        return
    made: Any = module
    recurrences, number = running_backend(), getattr(module, _NUMBER)
    assert recurrences is not None
    before = [(part, dict(vars(part))) for part in module.modules()]
    made._setup_cache(run.tokens, torch.device("cpu"), dtype)
    states = [
        (part, name, values.get(name), value.shape)
        for part, values in before
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and values.get(name) is not value
    ]
    recurrences.enter(number)
    try:
        for part, name, _, shape in states:
            setattr(part, name, KeptState(run, shape))
        yield {"use_cache": True} if "use_cache" in inspect.signature(made.forward).parameters else {}
        if not all(is_kept(getattr(part, name)) for part, name, *_ in states):
            raise UnsupportedModelError(f"layer {plain_index(number)} keeps the state of a recurrence of its own")
    finally:
        for part, name, value, _ in states:
            setattr(part, name, value)
