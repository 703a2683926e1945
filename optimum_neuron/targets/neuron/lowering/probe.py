# SPDX-License-Identifier: Apache-2.0
"""A graph that tries every collective of an artifact's graphs, by kind and size, on numbers that are known: devices may compute one wrong
without an error (sdk/gather_widths.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ....step.spec import TensorSpec
from ....step.step import example_inputs
from ..graphs import hlo
from ..graphs.io import PROBE, PROBE_INPUT, PROBED, LoweredGraph
from ..operators.collectives import all_gather, all_reduce, reduce_scatter
from ..sharding import RANK_BUFFER
from .decompositions import decompose
from .lower import lower_program


class Collective(NamedTuple):
    """A collective, by what a rank gives to it; `dim` is cut or joined."""

    opcode: str
    dtype: str
    shape: tuple[int, ...]
    dim: int

    def __str__(self) -> str:
        return f"{self.opcode} of {self.dtype} {list(self.shape)} along {self.dim}"


def find_trials(data: bytes) -> set[Collective]:
    """Return the collectives of a module; raise ValueError for a kind that no graph of ours has."""
    trials = set()
    by_id = {each.id: each for _, each in hlo.instructions(hlo.parse(data))}
    for each in by_id.values():
        if each.opcode in hlo.COLLECTIVES:
            if each.opcode not in _CALLS:
                raise ValueError(f"{each.opcode} is a collective that no self-test tries; use {', '.join(_CALLS)}")
            shape, dtype = hlo.array(by_id[each.operand_ids[0]].shape)
            trials.add(Collective(each.opcode, dtype, shape, each.dimensions[0] if each.dimensions else 0))
    return trials


def lower_probe(trials: Iterable[Collective], ranks: int) -> LoweredGraph:
    """Lower the graph that tries them; each has an output, `[1]` float32: how many numbers are wrong."""
    tried = sorted(trials)
    inputs = (TensorSpec(PROBE_INPUT, (1,), "float32"),)
    outputs = [TensorSpec(f"{PROBED}{each}", (1,), "float32") for each in tried]
    with torch.no_grad():
        module = _Probe(tried, ranks).eval()
        program = decompose(torch.export.export(module, example_inputs(inputs), strict=False))
    return lower_program(program, PROBE, PROBE, inputs, outputs, ranks)


class _Probe(nn.Module):
    def __init__(self, trials: list[Collective], ranks: int) -> None:
        super().__init__()
        self.model = nn.Module()  # the rank's name in its weights begins so
        self.model.register_buffer(RANK_BUFFER, torch.zeros(1, dtype=torch.int32))
        self._trials, self._ranks = trials, ranks

    def forward(self, scale: Tensor) -> tuple[Tensor, ...]:
        """Count wrong numbers. All are whole and at most twice the ranks, times `scale`: a power of two keeps them exact in any type."""
        rank = self.model.get_buffer(RANK_BUFFER).float()
        return tuple(self._count_wrong(each, scale, rank) for each in self._trials)

    def _count_wrong(self, trial: Collective, scale: Tensor, rank: Tensor) -> Tensor:
        # They differ by column: a compiler may make less of what is one number.
        odd = (torch.arange(trial.shape[-1], dtype=torch.int32) & 1).float()
        gathers = trial.opcode == "all-gather"
        given = ((rank + 1 + odd * self._ranks if gathers else 1 + odd) * scale).expand(trial.shape)
        found = _CALLS[trial.opcode](given.to(getattr(torch, trial.dtype)), trial.dim, self._ranks).float()
        if gathers:
            found = found.unflatten(trial.dim, (self._ranks, -1)).movedim(trial.dim, 0)
            first = torch.arange(1, self._ranks + 1, dtype=torch.float32).view(-1, *[1] * len(trial.shape))
            expected = first + odd * self._ranks
        else:
            expected = (1 + odd) * self._ranks
        return (found != expected * scale).float().sum().view(1)


_CALLS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "all-gather": all_gather,
    "all-reduce": lambda x, dim, ranks: all_reduce(x, ranks),
    "reduce-scatter": reduce_scatter,
}
