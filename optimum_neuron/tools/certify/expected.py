# SPDX-License-Identifier: Apache-2.0
"""What executed modules are expected to make, and by how much rounding may move it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


# How many times what moving each module's results by a unit moves the eager step. Tiny models differ by up to 1.0 times as
# much; the rest is for wide layers, whose sums in another order such moves do not cover.
TIMES_ROUNDING = 16.0
# A 16-bit router may choose other experts by rounding, which moves few tokens far: there means are compared.
STATISTICS = {"float32": "largest", "bfloat16": "mean", "float16": "mean"}


@dataclass
class Entry:
    """Numbers that are expected somewhere.

    Attributes:
        rows: of the first dimension, those that are compared; None: all but the last ones, where padding is written.
        heads: of the second dimension; None: all.
        positions: of these numbers, flat, those that are kept; None: all.
        trash: where `rows` is None, how many are left out; they lie behind all `positions`.
    """

    subject: str
    place: str
    values: Tensor
    noise: float
    rows: tuple[int, ...] | None
    heads: list[int] | None = None
    positions: list[int] | None = None
    trash: int = 1

    def pick(self, found: Tensor) -> Tensor:
        """The numbers of a result that are compared with `values`."""
        kept = found[: len(found) - self.trash] if self.rows is None else found[list(self.rows)]
        kept = kept if self.heads is None else _select(kept, 1, self.heads)
        return kept if self.positions is None else _select(kept.flatten(), 0, self.positions)


def _select(values: Tensor, dim: int, places: list[int]) -> Tensor:
    """Select also of fp8, which torch does not index by lists."""
    outside = next((place for place in places if not 0 <= place < values.shape[dim]), None)
    if outside is not None:
        raise IndexError(f"place {outside} of {values.shape[dim]}")
    return values.index_select(dim, torch.tensor(places, dtype=torch.int64))


@dataclass
class Expected:
    """What executed steps are expected to make.

    Attributes:
        outputs: by number of the step and name of the output; states have the number of steps.
        tokens: of each row in use, those that rounding may choose; empty where they are not compared.
    """

    dtype: str
    outputs: dict[tuple[int, str, int], Entry] = field(default_factory=dict)
    tokens: dict[tuple[int, str], dict[int, tuple[int, ...]]] = field(default_factory=dict)
