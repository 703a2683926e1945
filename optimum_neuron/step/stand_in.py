# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for tensors, by which a step reads what a model's own code computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from torch.utils import _pytree as pytree


def name_of(func: Callable) -> str:
    """Return the name of one of torch's functions, without underscores around it."""
    return getattr(func, "__name__", str(func)).strip("_")


class StandIn:
    """A stand-in for a tensor: model code can hand it on. Each use is read as what it means, or refused by name.

    Attributes:
        pronoun: stands for it in messages.
    """

    pronoun: ClassVar[str] = "them"

    def refuse_use(self, use: str) -> NoReturn:
        """Raise UnsupportedModelError for a use that has no meaning in a step."""
        raise NotImplementedError

    def call_torch(self, func: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of torch's function; raises UnsupportedModelError where it has no meaning."""
        self.refuse_use(f"passes {self.pronoun} to {getattr(func, '__name__', func)}")

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = next(each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, cls))
        return own.call_torch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse_use(f"reads .{name} of {self.pronoun}")
