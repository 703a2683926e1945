# SPDX-License-Identifier: Apache-2.0
"""Complex numbers as pairs of real ones: devices have no complex type, and rotary positions of some models are written in it.

By the operator, whatever calls it: what makes complex numbers of real ones, multiplies them, changes their shape, and takes
them apart again. That is all that a rotation needs; other operators of complex numbers are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter, tree_map


_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Pair:
    """A complex tensor: both parts have its shape, and the type of its parts."""

    real: Tensor
    imaginary: Tensor


def _multiply(left: Any, right: Any) -> Pair:
    """Of two pairs, or of a pair and real numbers."""
    if not isinstance(right, Pair):
        return Pair(left.real * right, left.imaginary * right)
    if not isinstance(left, Pair):
        return _multiply(right, left)
    return Pair(
        left.real * right.real - left.imaginary * right.imaginary,
        left.real * right.imaginary + left.imaginary * right.real,
    )


_COMPUTED: dict[Any, Callable[..., Any]] = {
    _ATEN.polar.default: lambda size, angle: Pair(size * angle.cos(), size * angle.sin()),
    _ATEN.complex.default: Pair,
    _ATEN.view_as_complex.default: lambda x: Pair(x.select(-1, 0), x.select(-1, 1)),
    _ATEN.view_as_real.default: lambda x: torch.stack([x.real, x.imaginary], -1),
    _ATEN.mul.Tensor: _multiply,
}
# Change the shape or the place of numbers, and so of each part.
_MOVES = frozenset({
    _ATEN.alias.default, _ATEN.clone.default, _ATEN.expand.default, _ATEN.permute.default, _ATEN.select.int,
    _ATEN.slice.Tensor, _ATEN.squeeze.dims, _ATEN.unsqueeze.default, _ATEN.view.default,
})  # fmt: skip


def takes(node: torch.fx.Node) -> bool:
    """Whether complex numbers come into an operator or out of it."""
    return any(_is_complex(each) for each in (node, *node.all_input_nodes))


def computes(node: torch.fx.Node) -> bool:
    """Whether `compute` knows an operator; stored complex numbers it does not."""
    stored = any(each.op == "placeholder" and _is_complex(each) for each in node.all_input_nodes)
    return not stored and (node.target in _COMPUTED or node.target in _MOVES)


def compute(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator makes of pairs, or the pair that it makes."""
    if target in _COMPUTED:
        return _COMPUTED[target](*args, **kwargs)
    return Pair(*(target(*_parts(args, part), **kwargs) for part in ("real", "imaginary")))


def has_pairs(target: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator is for `compute`: it makes a pair, or takes one."""
    makes = target in _COMPUTED and target is not _ATEN.mul.Tensor
    return makes or any(isinstance(each, Pair) for each in tree_iter(args))


def _parts(values: Any, part: str) -> Any:
    return tree_map(lambda each: getattr(each, part) if isinstance(each, Pair) else each, values)


def _is_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()
