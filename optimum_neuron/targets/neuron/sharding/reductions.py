# SPDX-License-Identifier: Apache-2.0
"""Which operators of a model mix the values of a dimension, so that a part of that dimension gives another result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


# Names of aten operators, and of the argument that names their dimensions. Products of matrices are none of them: in a
# model they belong to linear layers, experts and attention, which have rules.
_REDUCTIONS = {
    "sum": "dim",
    "mean": "dim",
    "prod": "dim",
    "amax": "dim",
    "amin": "dim",
    "max": "dim",
    "min": "dim",
    "argmax": "dim",
    "argmin": "dim",
    "var": "dim",
    "std": "dim",
    "norm": "dim",
    "linalg_vector_norm": "dim",
    "logsumexp": "dim",
    "_softmax": "dim",
    "_log_softmax": "dim",
    "cumsum": "dim",
    "topk": "dim",
    "sort": "dim",
    "native_layer_norm": "normalized_shape",
    "_fused_rms_norm": "normalized_shape",
}


@dataclass(frozen=True)
class Reduction:
    """One operator's run in a module, with the sizes of the dimensions that it goes over."""

    module: str
    name: str
    sizes: tuple[int, ...]


class Reductions(TorchDispatchMode):
    """Tells `note` the name and the sizes of each reduction that runs in this mode."""

    def __init__(self, note: Callable[[str, tuple[int, ...]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name in _REDUCTIONS:
            self._note(name, _sizes(func, args, kwargs))
        return func(*args, **kwargs)


def _sizes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Of the dimensions that an operator goes over: all of them where it names none."""
    parameters = func._schema.arguments
    values = {each.name: each.default_value for each in parameters if each.has_default_value()}
    values |= dict(zip((each.name for each in parameters), args, strict=False)) | kwargs
    argument = _REDUCTIONS[_name(func)]
    given, shape = values.get(argument), args[0].shape
    if argument == "normalized_shape":
        return tuple(given or ())
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    return tuple(shape[dim] for dim in dims) if shape else ()


def _name(func: Any) -> str:
    name: str = func._schema.name
    return name.partition("::")[2]
