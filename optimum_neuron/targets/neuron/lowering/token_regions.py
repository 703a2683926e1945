# SPDX-License-Identifier: Apache-2.0
"""Regions of a module that follow token by token from sums over ranks, so that each rank may compute its own tokens alone.

The search looks at HLO and at dimensions, not at names. Tokens are the last dimension but one of an all-reduce. An operator keeps them
apart if it is elementwise, reduces other dimensions, or changes the shape around them. Another operand of an elementwise operator must
be the same for all tokens and on all ranks, such as the weight of a norm.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..graphs import hlo
from ..sdk.hardware import Chip
from ..sdk.step_times import STEP_TIMES


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
    """Sums that need one form, since what follows from them meets.

    Attributes:
        dims: the dimension of the tokens, by the number of an instruction.
        sums: all-reduces.
        exits: results that others need of more than one token; a sum may be one.
        forms: the cost of either form.
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

    def find(self) -> list[Region]:
        """Return regions after all-reduces of tokens that ranks can split evenly."""
        dims: dict[int, int] = {}
        for each in self.instructions:
            dim = self._tokens_of_sum(each) if each.opcode == WHOLE else self._follow_tokens(each, dims)
            if dim is not None:
                dims[each.id] = dim
        self._trim_edges(dims)
        return [self._make_region(part) for part in self._find_connected(dims)]

    def operands(self, each: Any) -> list[Any]:
        return [self.by_id[operand] for operand in each.operand_ids]

    def outside_users(self, each: Any, dims: Collection[int]) -> list[Any]:
        """Return users that need all tokens."""
        return [user for user in self.users[each.id] if user.id not in dims or user.opcode == WHOLE]

    def inner_operands(self, each: Any, dims: Collection[int]) -> list[Any]:
        """Return operands of which a member of a region takes its tokens; a sum takes all of them."""
        operands = [] if each.opcode == WHOLE else self.operands(each)
        return [operand for operand in operands if operand.id in dims]

    def is_uniform(self, each: Any, dim: int) -> bool:
        """Return whether a tensor is the same along a dimension, and on all ranks."""
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
        if len(each.operand_ids) != 1 or len(shape) < 2:
            return None
        # With a single token each, a dimension of 1 would look like others.
        tokens = shape[len(shape) - 2]
        return len(shape) - 2 if tokens % self.ranks == 0 and tokens >= 2 * self.ranks else None

    def _follow_tokens(self, each: Any, dims: dict[int, int]) -> int | None:
        """Return the dimension of the tokens in an operator's result; None where it does not keep them apart."""
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

    def _trim_edges(self, dims: dict[int, int]) -> None:
        """Remove what saves nothing at the edge of a region: sums that are used whole, numbers that only move before they are
        gathered, and what follows at once from others that are gathered anyway.
        """
        before = -1
        while len(dims) != before:
            before = len(dims)
            for number in reversed(list(dims)):
                each = self.by_id[number]
                if len(self.outside_users(each, dims)) < len(self.users[number]):
                    continue
                inner = self.inner_operands(each, dims)
                size, smallest = (
                    hlo.byte_count(each.shape),
                    min((hlo.byte_count(one.shape) for one in inner), default=0),
                )
                known = all(len(self.outside_users(one, dims)) > 0 for one in inner)
                if known or (each.opcode in _MOVES and size >= smallest):
                    del dims[number]

    def _find_connected(self, dims: dict[int, int]) -> list[dict[int, int]]:
        parts: list[dict[int, int]] = []
        of: dict[int, dict[int, int]] = {}
        for number, dim in dims.items():
            inner = self.inner_operands(self.by_id[number], of)
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

    def _make_region(self, dims: dict[int, int]) -> Region:
        members = [self.by_id[number] for number in sorted(dims)]
        sums = tuple(each for each in members if each.opcode == WHOLE)
        exits = tuple(each for each in members if self.outside_users(each, dims))
        elements: Counter[int] = Counter()
        for each in members:
            if each.opcode not in (WHOLE, *_MOVES):
                shapes = [each.shape, *(operand.shape for operand in self.operands(each))]
                size = max(hlo.byte_count(shape) // max(math.prod(shape.dimensions), 1) for shape in shapes)
                elements[size] += max(math.prod(shape.dimensions) for shape in shapes)
        summed, gathered = ([hlo.byte_count(each.shape) for each in some] for some in (sums, exits))
        return Region(dims, sums, exits, compare_forms(summed, gathered, elements, self.ranks))


def moved_dim(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return the place of a dimension after a reshape; None where it is cut, or joined with others."""
    outer = math.prod(before[:dim])
    places = (index for index, size in enumerate(after) if size == before[dim])
    return next((index for index in places if math.prod(after[:index]) == outer), None)


# Seconds of a collective of any size for each doubling of the group: a layer of the published runs, with a latency that
# grows with the doublings, has two.
COLLECTIVE_S = STEP_TIMES.layer_s / 2


@dataclass(frozen=True)
class Exchange:
    """The work of one core for sums over cores, and for what follows from them token by token.

    Attributes:
        sent: bytes that the core sends at the least.
        elements: numbers that elementwise operators and reductions take, by the bytes of the widest of their types.
    """

    collectives: int = 0
    sent: int = 0
    elements: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.collectives + other.collectives, self.sent + other.sent, self.elements + other.elements)

    def seconds(self, chip: Chip, ranks: int) -> float:
        """Return the latencies of collectives and the vector engines' work at their peak, without the time of bytes."""
        return self.collectives * COLLECTIVE_S * math.log2(ranks) + chip.vector_seconds(self.elements)


@dataclass(frozen=True)
class ExchangeForms:
    """The same sums in both forms."""

    whole: Exchange = Exchange()
    split: Exchange = Exchange()

    def __add__(self, other: ExchangeForms) -> ExchangeForms:
        return ExchangeForms(self.whole + other.whole, self.split + other.split)

    @property
    def sends_no_more(self) -> bool:
        """Return whether split tokens send no more bytes: no bandwidth between cores is known well enough to weigh them."""
        return self.split.sent <= self.whole.sent


def bytes_sent(opcode: str, size: int, ranks: int) -> int:
    """Return the bytes that each core sends at the least in a collective; `size` is the larger of operand and result."""
    if opcode == "collective-permute":
        return size
    return size * (ranks - 1) * (2 if opcode == "all-reduce" else 1) // ranks


def compare_forms(sums: Iterable[int], gathered: Iterable[int], elements: Counter[int], ranks: int) -> ExchangeForms:
    """Return both forms of some sums.

    Args:
        sums: bytes of each, of all tokens.
        gathered: bytes of each result that is needed of all tokens.
        elements: as in `Exchange`, of all tokens.
    """
    sums, gathered = list(sums), list(gathered)
    whole = Exchange(len(sums), sum(bytes_sent("all-reduce", each, ranks) for each in sums), elements)
    sent = sum(bytes_sent("reduce-scatter", each, ranks) for each in sums)
    sent += sum(bytes_sent("all-gather", each, ranks) for each in gathered)
    parts = Counter({size: count // ranks for size, count in elements.items()})
    return ExchangeForms(whole, Exchange(len(sums) + len(gathered), sent, parts))


def splits(found: ExchangeForms, chip: Chip, ranks: int) -> bool:
    """Return whether it takes less time to split the tokens."""
    return found.split.seconds(chip, ranks) < found.whole.seconds(chip, ranks)
