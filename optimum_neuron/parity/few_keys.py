# SPDX-License-Identifier: Apache-2.0
"""Has layers that select keys select few, so that a short prompt shows whether what they select is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..step.model_cache import selects_keys


# More than any layer selects.
ALL = 1 << 30


class _Top(NamedTuple):
    values: Tensor
    indices: Tensor


class _FewKeys(TorchFunctionMode):
    """Each top-k within the code of a layer that selects keys takes at most so many, of equal ones the first.

    torch leaves open which of equal ones it takes; scores through a rectifier are often equal.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.running = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not self.running or func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        return self._top(func, *args, **(kwargs or {}))

    def _top(self, func: Any, scores: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        if not isinstance(scores, Tensor):
            return func(scores, min(k, self.most), dim)
        values, indices = scores.sort(dim=dim, descending=largest, stable=True)
        return _Top(*(each.narrow(dim, 0, min(k, self.most)) for each in (values, indices)))


@contextmanager
def few_keys(model: nn.Module, most: int = ALL) -> Iterator[None]:
    """Within it, layers of a model that select keys select at most so many, in transformers' code and in steps.

    In transformers' code, as in steps, of equal scores the first.
    """
    mode = _FewKeys(most)

    def enter(*_: object) -> None:
        mode.running += 1

    def leave(*_: object) -> None:
        mode.running -= 1

    with ExitStack() as hooks:
        for module in filter(selects_keys, model.modules()):
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        with mode:
            yield
