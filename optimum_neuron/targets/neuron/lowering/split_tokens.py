# SPDX-License-Identifier: Apache-2.0
"""The rewrite that gives each rank its own part of the tokens after sums over ranks, where that takes less time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from ..graphs import hlo
from ..sdk.hardware import Chip
from .token_regions import SPLIT, WHOLE, ExchangeForms, Region, TokenRegions, moved_dim, splits


@dataclass(frozen=True)
class SumsRule:
    """The rule that decides on the form of a graph's sums.

    Attributes:
        chip: a chip of known times.
        shared: names of the weights that all ranks hold whole.
        split: whether tokens are split; None: where it takes less time.
    """

    chip: Chip
    shared: Collection[str]
    split: bool | None = None


def split_tokens(module: Any, ranks: int, shared: Collection[int], rule: SumsRule) -> None:
    """Replace all-reduces of a module, in place: all that may be split, or none.

    Every token's numbers stay as they are: its sum is taken in the order of the ranks, and nothing else meets it.

    Args:
        shared: numbers of the parameters that are the same on all ranks.
    """
    tokens = TokenRegions(module, ranks, shared)
    regions = [each for each in tokens.find() if each.forms.sends_no_more]
    both = sum((each.forms for each in regions), ExchangeForms())
    if splits(both, rule.chip, ranks) if rule.split is None else rule.split:
        _Rewriter(module, tokens).rewrite_regions(regions)


def is_split(data: bytes) -> bool:
    """Return whether a module's ranks have parts of the tokens."""
    return any(each.opcode == SPLIT for _, each in hlo.instructions(hlo.parse(data)))


class _Rewriter:
    def __init__(self, module: Any, tokens: TokenRegions) -> None:
        self._entry = hlo.entry(module)
        self._tokens = tokens
        names = [each.id for _, each in hlo.instructions(module)] + [each.id for each in module.computations]
        self._last_id = max(names)
        self._parts: dict[tuple[int, int], Any] = {}
        self._added: dict[int, list[Any]] = defaultdict(list)  # by the instruction before it

    def rewrite_regions(self, regions: list[Region]) -> None:
        for region in regions:
            for number, dim in region.dims.items():
                each = self._tokens.by_id[number]
                if each.opcode != WHOLE:
                    self._take_parts(each, dim, region.dims)
            for each in region.exits:
                self._gather_tokens(each, region)
        for region in regions:
            for number, dim in region.dims.items():
                self._shrink_shape(self._tokens.by_id[number], dim)
            for each in region.sums:
                each.opcode = SPLIT
                each.dimensions[:] = [region.dims[each.id]]
        listed = []
        for each in self._entry.instructions:
            listed += [each, *self._added[each.id]]
        copies = [type(each).FromString(each.SerializeToString()) for each in listed]
        del self._entry.instructions[:]
        self._entry.instructions.extend(copies)

    def _take_parts(self, each: Any, dim: int, dims: dict[int, int]) -> None:
        """Give an operator the rows of its own of whatever is the same for all tokens."""
        for index, operand in enumerate(each.operand_ids):
            if operand not in dims:
                each.operand_ids[index] = self._make_part(self._tokens.by_id[operand], dim).id

    def _make_part(self, each: Any, dim: int) -> Any:
        if not each.shape.dimensions:
            return each
        known = self._parts.get((each.id, dim))
        if known is not None:
            return known
        part = self._copy_instruction(each)
        if each.opcode == "broadcast":
            inner = list(each.dimensions).index(dim) if dim in each.dimensions else None
        elif each.opcode == "reshape":
            operand = self._tokens.by_id[each.operand_ids[0]]
            inner = moved_dim(each.shape.dimensions, operand.shape.dimensions, dim)
        else:
            inner = dim
        if inner is not None:
            operands = self._tokens.operands(each)
            part.operand_ids[:] = [self._make_part(operand, inner).id for operand in operands]
        self._shrink_shape(part, dim)
        self._added[each.id].append(part)
        self._parts[each.id, dim] = part
        return part

    def _gather_tokens(self, each: Any, region: Region) -> None:
        """Add one all-gather for all who need all tokens."""
        gather = type(each)(id=self._new_id(), opcode="all-gather", operand_ids=[each.id])
        gather.name = f"all-gather.{gather.id}"
        gather.shape.CopyFrom(each.shape)
        gather.metadata.CopyFrom(each.metadata)
        gather.dimensions.append(region.dims[each.id])
        gather.replica_groups.extend(region.sums[0].replica_groups)
        self._added[each.id].append(gather)
        for user in self._tokens.outside_users(each, region.dims):
            user.operand_ids[:] = [gather.id if one == each.id else one for one in user.operand_ids]

    def _shrink_shape(self, each: Any, dim: int) -> None:
        each.shape.dimensions[dim] //= self._tokens.ranks

    def _copy_instruction(self, each: Any) -> Any:
        copied = type(each).FromString(each.SerializeToString())
        copied.id = self._new_id()
        copied.name = f"{each.opcode}.{copied.id}"
        return copied

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id
