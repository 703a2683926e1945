# SPDX-License-Identifier: Apache-2.0
"""The rewrite that gives each rank its own part of the tokens after sums over ranks, where that takes less time.

It looks at HLO and at dimensions, not at names. Regions follow token by token from sums. Tokens are the last dimension but one of an
all-reduce. An operator keeps them apart if it is elementwise, reduces other dimensions, or changes the shape around them. Another operand of
an elementwise operator must be the same for all tokens and on all ranks, such as the weight of a norm.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
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
# Operators with results of a rank's own.
_OWN = ("reduce-scatter", "all-to-all", "collective-permute", "partition-id", "replica-id")
# Seconds of a collective of any size for each doubling of the group: a layer of the published runs has two.
COLLECTIVE_S = STEP_TIMES.layer_s / 2


@dataclass(frozen=True)
class Exchange:
    """The work of one core for sums over cores, and for what follows from them token by token."""

    collectives: int = 0
    sent: int = 0  # bytes that the core sends at the least
    # Numbers that elementwise operators and reductions take, by the bytes of the widest of their types.
    elements: Counter[int] = field(default_factory=Counter)

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.collectives + other.collectives, self.sent + other.sent, self.elements + other.elements)

    def seconds(self, chip: Chip, ranks: int) -> float:
        """Return the latencies of collectives and the vector engines' work at their peak, without the time of bytes."""
        return self.collectives * COLLECTIVE_S * math.log2(ranks) + chip.vector_seconds(self.elements)


@dataclass(frozen=True)
class Region:
    """Sums that need one form, since what follows from them meets."""

    dims: dict[int, int]  # the dimension of the tokens, by the number of an instruction
    sums: tuple[Any, ...]  # all-reduces
    exits: tuple[Any, ...]  # results that others need of more than one token; a sum may be one
    whole: Exchange
    split: Exchange


class TokenRegions:
    """A module's entry computation; `shared` are numbers of the parameters that are the same on all ranks."""

    def __init__(self, module: Any, ranks: int, shared: Collection[int]) -> None:
        self.ranks = ranks
        self.instructions = hlo.entry(module).instructions
        self.by_id = {each.id: each for each in self.instructions}
        self.users: dict[int, list[Any]] = defaultdict(list)
        self._shared: set[int] = set()
        for each in self.instructions:
            for operand in dict.fromkeys(each.operand_ids):
                self.users[operand].append(each)
            if each.opcode == "parameter":
                is_shared = each.parameter_number in shared
            else:
                follows = each.opcode not in _OWN and all(operand in self._shared for operand in each.operand_ids)
                is_shared = follows or each.opcode in ("all-reduce", "all-gather")
            if is_shared:
                self._shared.add(each.id)

    def find(self) -> list[Region]:
        """Return regions after all-reduces of tokens that ranks can split evenly."""
        dims: dict[int, int] = {}
        for each in self.instructions:
            dim = self._follow_tokens(each, dims)
            if each.opcode == WHOLE:
                shape = each.shape.dimensions
                tokens = shape[-2] if len(shape) > 1 else 0
                # With a single token each, a dimension of 1 would look like others.
                cut = len(each.operand_ids) == 1 and tokens % self.ranks == 0 and tokens >= 2 * self.ranks
                dim = len(shape) - 2 if cut else None
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
        if each.id not in self._shared:
            return False
        if not each.shape.dimensions:
            return True
        if each.opcode not in (*_ELEMENTWISE, "broadcast", "reshape"):
            return False
        inner = self.operand_dim(each, dim)
        if inner is None:
            return bool(each.opcode == "broadcast")
        return all(self.is_uniform(operand, inner) for operand in self.operands(each))

    def operand_dim(self, each: Any, dim: int) -> int | None:
        """Return the place in its operands of a dimension that an operator keeps; None where they lack it."""
        if each.opcode == "broadcast":
            return list(each.dimensions).index(dim) if dim in each.dimensions else None
        if each.opcode == "reshape":
            return moved_dim(each.shape.dimensions, self.operands(each)[0].shape.dimensions, dim)
        return dim

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
        """Remove what saves nothing: sums used whole, numbers that only move, and what follows at once from what is gathered anyway."""
        before = -1
        while len(dims) != before:
            before = len(dims)
            for number in reversed(list(dims)):
                each = self.by_id[number]
                if len(self.outside_users(each, dims)) < len(self.users[number]):
                    continue
                inner = self.inner_operands(each, dims)
                smallest = min((hlo.byte_count(one.shape) for one in inner), default=0)
                known = all(len(self.outside_users(one, dims)) > 0 for one in inner)
                if known or (each.opcode in _MOVES and hlo.byte_count(each.shape) >= smallest):
                    del dims[number]

    def _find_connected(self, dims: dict[int, int]) -> list[dict[int, int]]:
        parts: list[dict[int, int]] = []
        for number, dim in dims.items():
            inner = [each.id for each in self.inner_operands(self.by_id[number], dims)]
            joined = [part for part in parts if any(each in part for each in inner)]
            if not joined:
                joined = [{}]
                parts += joined
            for other in joined[1:]:
                joined[0] |= other
                parts = [each for each in parts if each is not other]
            joined[0][number] = dim
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
        return Region(dims, sums, exits, *compare_forms(summed, gathered, elements, self.ranks))


def moved_dim(before: Sequence[int], after: Sequence[int], dim: int) -> int | None:
    """Return the place of a dimension after a reshape; None where it is cut, or joined with others."""
    sizes = math.prod(before[:dim]), before[dim]
    return next((index for index, size in enumerate(after) if (math.prod(after[:index]), size) == sizes), None)


def bytes_sent(opcode: str, size: int, ranks: int) -> int:
    """Return the bytes that each core sends at the least in a collective; `size` is the larger of operand and result."""
    if opcode == "collective-permute":
        return size
    return size * (ranks - 1) * (2 if opcode == "all-reduce" else 1) // ranks


def compare_forms(
    sums: Sequence[int], gathered: Sequence[int], elements: Counter[int], ranks: int
) -> tuple[Exchange, Exchange]:
    """Return sums with whole and with split tokens, from the bytes of each, and of each result that is needed of all tokens."""
    whole = Exchange(len(sums), sum(bytes_sent("all-reduce", each, ranks) for each in sums), elements)
    sent = sum(bytes_sent("reduce-scatter", each, ranks) for each in sums)
    sent += sum(bytes_sent("all-gather", each, ranks) for each in gathered)
    parts = Counter({size: count // ranks for size, count in elements.items()})
    return whole, Exchange(len(sums) + len(gathered), sent, parts)


@dataclass(frozen=True)
class SumsRule:
    """The rule that decides on the form of a graph's sums."""

    chip: Chip  # a chip of known times
    shared: Collection[str]  # names of the weights that all ranks hold whole
    split: bool | None = None  # whether tokens are split; None: where it takes less time


def split_tokens(module: Any, ranks: int, shared: Collection[int], rule: SumsRule) -> None:
    """Replace all-reduces of a module, in place: all that may be split, or none; `shared` are numbers of parameters that ranks have alike.

    Every token's numbers stay as they are: its sum is taken in the order of the ranks, and nothing else meets it.
    """
    tokens = TokenRegions(module, ranks, shared)
    # No bandwidth between cores is known well enough to weigh more bytes.
    regions = [each for each in tokens.find() if each.split.sent <= each.whole.sent]
    whole = sum((each.whole for each in regions), Exchange()).seconds(rule.chip, ranks)
    split = sum((each.split for each in regions), Exchange()).seconds(rule.chip, ranks)
    if split < whole if rule.split is None else rule.split:
        _Rewriter(module, tokens).rewrite_regions(regions)


def is_split(data: bytes) -> bool:
    return any(each.opcode == SPLIT for _, each in hlo.instructions(hlo.parse(data)))


class _Rewriter:
    def __init__(self, module: Any, tokens: TokenRegions) -> None:
        self._entry = hlo.entry(module)
        self._tokens = tokens
        self._ids = itertools.count(max(hlo.all_ids(module)) + 1)
        self._parts: dict[tuple[int, int], Any] = {}
        self._added: dict[int, list[Any]] = defaultdict(list)  # by the instruction before it

    def rewrite_regions(self, regions: list[Region]) -> None:
        for region in regions:
            for number, dim in region.dims.items():
                each = self._tokens.by_id[number]
                for index, operand in enumerate([] if each.opcode == WHOLE else each.operand_ids):
                    if operand not in region.dims:
                        each.operand_ids[index] = self._make_part(self._tokens.by_id[operand], dim).id
            for each in region.exits:  # one all-gather for all that need all tokens
                gather = type(each)(
                    id=next(self._ids), opcode="all-gather", operand_ids=[each.id], dimensions=[region.dims[each.id]],
                    shape=each.shape, metadata=each.metadata, replica_groups=region.sums[0].replica_groups,
                )  # fmt: skip
                gather.name = f"all-gather.{gather.id}"
                self._added[each.id].append(gather)
                for user in self._tokens.outside_users(each, region.dims):
                    user.operand_ids[:] = [gather.id if one == each.id else one for one in user.operand_ids]
        for region in regions:
            for number, dim in region.dims.items():
                self._tokens.by_id[number].shape.dimensions[dim] //= self._tokens.ranks
            for each in region.sums:
                each.opcode = SPLIT
                each.dimensions[:] = [region.dims[each.id]]
        listed = []
        for each in self._entry.instructions:
            listed += [each, *self._added[each.id]]
        hlo.replace_items(self._entry.instructions, listed)

    def _make_part(self, each: Any, dim: int) -> Any:
        """Return a rank's own rows of what is the same for all tokens."""
        if not each.shape.dimensions:
            return each
        if (each.id, dim) in self._parts:
            return self._parts[each.id, dim]
        part = copy.deepcopy(each)
        part.id = next(self._ids)
        part.name = f"{each.opcode}.{part.id}"
        inner = self._tokens.operand_dim(each, dim)
        if inner is not None:
            operands = self._tokens.operands(each)
            part.operand_ids[:] = [self._make_part(operand, inner).id for operand in operands]
        part.shape.dimensions[dim] //= self._tokens.ranks
        self._added[each.id].append(part)
        self._parts[each.id, dim] = part
        return part
