# SPDX-License-Identifier: Apache-2.0
"""What of a module follows token by token from sums over ranks, so that each rank may compute it of its own tokens alone.

It looks at HLO alone, at dimensions and not at names: of an all-reduce the tokens are the last dimension but one, and an operator
keeps them apart if it is elementwise, reduces other dimensions, or changes the shape around them. Whatever else meets the tokens
in an elementwise operator must be the same for all of them and on all ranks, such as the weight of a norm.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from ..sequence_parallel import ExchangeForms, forms
from . import hlo


WHOLE, SPLIT = "all-reduce", "reduce-scatter"
# Change no number but its type or its place.
_MOVES = frozenset({"broadcast", "convert", "copy", "reshape"})
_ELEMENTWISE = frozenset({
    "abs", "add", "and", "cbrt", "ceil", "clamp", "compare", "convert", "copy", "cosine", "divide", "erf", "exponential",
    "exponential-minus-one", "floor", "is-finite", "log", "log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate",
    "not", "or", "power", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "sign", "sine", "sqrt",
    "subtract", "tan", "tanh", "xor",
})  # fmt: skip


@dataclass(frozen=True)
class Region:
    """Sums that have to have one form, since what follows from them meets.

    Attributes:
        dims: by the number of an instruction the dimension that tokens are.
        sums: all-reduces or reduce-scatters.
        exits: what others need, who look at more than one token; a sum may be one.
        forms: what this costs in either form.
    """

    dims: dict[int, int]
    sums: tuple[Any, ...]
    exits: tuple[Any, ...]
    forms: ExchangeForms


class TokenRegions:
    """A module's entry computation.

    Args:
        shared: numbers of the parameters that are the same on all ranks.
    """

    def __init__(self, module: Any, ranks: int, shared: Collection[int]) -> None:
        self.ranks = ranks
        self.instructions = hlo.entry(module).instructions
        self.by_id = {each.id: each for each in self.instructions}
        self.users: dict[int, list[Any]] = defaultdict(list)
        self._shared: set[int] = set()
        for each in self.instructions:
            for operand in dict.fromkeys(each.operand_ids):
                self.users[operand].append(each)
            if self._is_shared(each, shared):
                self._shared.add(each.id)

    def find(self, form: str = WHOLE) -> list[Region]:
        """Those whose sums are all-reduces of tokens that ranks can split evenly, or those whose sums are reduce-scatters."""
        dims: dict[int, int] = {}
        for each in self.instructions:
            dim = self._tokens_of_sum(each) if each.opcode == form else self._followed(each, dims)
            if dim is not None:
                dims[each.id] = dim
        if form == WHOLE:
            self._trim(dims)
        return [self._region(part, form) for part in self._connected(dims)]

    def operands(self, each: Any) -> list[Any]:
        return [self.by_id[operand] for operand in each.operand_ids]

    def outside_users(self, each: Any, dims: Collection[int]) -> list[Any]:
        """Those who need all tokens."""
        return [user for user in self.users[each.id] if user.id not in dims or user.opcode in (WHOLE, SPLIT)]

    def inner(self, each: Any, dims: Collection[int]) -> list[Any]:
        """Operands of which a member of a region takes its tokens; a sum takes all of them."""
        operands = [] if each.opcode in (WHOLE, SPLIT) else self.operands(each)
        return [operand for operand in operands if operand.id in dims]

    def is_uniform(self, each: Any, dim: int) -> bool:
        """Whether a tensor is the same along a dimension, and on all ranks."""
        if each.id not in self._shared:
            return False
        if not each.shape.dimensions:
            return True
        operands = self.operands(each)
        if each.opcode == "broadcast":
            return dim not in each.dimensions or self.is_uniform(operands[0], list(each.dimensions).index(dim))
        if each.opcode == "reshape":
            before = moved_dim(each.shape.dimensions, operands[0].shape.dimensions, dim)
            return before is not None and self.is_uniform(operands[0], before)
        return each.opcode in _ELEMENTWISE and all(self.is_uniform(operand, dim) for operand in operands)

    def _is_shared(self, each: Any, parameters: Collection[int]) -> bool:
        if each.opcode == "parameter":
            return each.parameter_number in parameters
        if each.opcode in ("all-reduce", "all-gather"):
            return True
        ranks_own = ("reduce-scatter", "all-to-all", "collective-permute", "partition-id", "replica-id")
        return each.opcode not in ranks_own and all(operand in self._shared for operand in each.operand_ids)

    def _tokens_of_sum(self, each: Any) -> int | None:
        shape = each.shape.dimensions
        if each.opcode == SPLIT:
            return int(each.dimensions[0])
        if len(each.operand_ids) != 1 or len(shape) < 2:
            return None
        # With a single token each, a dimension of 1 could not be told from others.
        tokens = shape[len(shape) - 2]
        return len(shape) - 2 if tokens % self.ranks == 0 and tokens >= 2 * self.ranks else None

    def _followed(self, each: Any, dims: dict[int, int]) -> int | None:
        """The dimension of the tokens in what an operator makes of them; None where it does not keep them apart."""
        operands = self.operands(each)
        known = {dims[operand.id] for operand in operands if operand.id in dims}
        if len(known) != 1:
            return None
        (dim,) = known
        if each.opcode in _ELEMENTWISE:
            others = (operand for operand in operands if operand.id not in dims)
            return dim if all(self.is_uniform(other, dim) for other in others) else None
        if each.opcode == "broadcast":
            return int(each.dimensions[dim])
        if each.opcode == "reshape":
            return moved_dim(operands[0].shape.dimensions, each.shape.dimensions, dim)
        if each.opcode == "reduce" and len(operands) == 2 and dim not in each.dimensions:
            return dim - sum(other < dim for other in each.dimensions)
        return None

    def _trim(self, dims: dict[int, int]) -> None:
        """Leaves out what is at the edge of a region and saves nothing there: a sum that is used whole, numbers that only move
        before they are gathered, and what follows at once from others that are gathered anyway."""
        before = -1
        while len(dims) != before:
            before = len(dims)
            for number in reversed(list(dims)):
                each = self.by_id[number]
                if len(self.outside_users(each, dims)) < len(self.users[number]):
                    continue
                inner = self.inner(each, dims)
                size, smallest = (
                    hlo.byte_count(each.shape),
                    min((hlo.byte_count(one.shape) for one in inner), default=0),
                )
                known = all(len(self.outside_users(one, dims)) > 0 for one in inner)
                if known or (each.opcode in _MOVES and size >= smallest):
                    del dims[number]

    def _connected(self, dims: dict[int, int]) -> list[dict[int, int]]:
        parts: list[dict[int, int]] = []
        of: dict[int, dict[int, int]] = {}
        for number, dim in dims.items():
            inner = self.inner(self.by_id[number], of)
            joined = list({id(of[one.id]): of[one.id] for one in inner}.values())
            part = joined[0] if joined else {}
            for other in joined[1:]:
                part |= other
                of |= dict.fromkeys(other, part)
                parts = [each for each in parts if each is not other]
            if not joined:
                parts.append(part)
            part[number], of[number] = dim, part
        return parts

    def _region(self, dims: dict[int, int], form: str) -> Region:
        times = 1 if form == WHOLE else self.ranks
        members = [self.by_id[number] for number in sorted(dims)]
        sums = tuple(each for each in members if each.opcode == form)
        exits = tuple(each for each in members if self.outside_users(each, dims))
        elements: Counter[int] = Counter()
        for each in members:
            if each.opcode not in (form, *_MOVES):
                shapes = [each.shape, *(operand.shape for operand in self.operands(each))]
                count = max(math.prod(shape.dimensions) for shape in shapes)
                size = max(hlo.byte_count(shape) // max(math.prod(shape.dimensions), 1) for shape in shapes)
                elements[size] += count * times
        summed, gathered = ([hlo.byte_count(each.shape) * times for each in some] for some in (sums, exits))
        return Region(dims, sums, exits, forms(summed, gathered, elements, self.ranks))


def moved_dim(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Where a dimension is after a reshape; None where it is cut, or joined with others."""
    outer = math.prod(before[:dim])
    places = (index for index, size in enumerate(after) if size == before[dim])
    return next((index for index in places if math.prod(after[:index]) == outer), None)
