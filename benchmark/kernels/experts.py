# SPDX-License-Identifier: Apache-2.0
"""Measures mixtures of experts by the own CPU kernel against transformers' grouped_mm and against computing all experts.

Whole layers, interleaved in one run. Every call routes its tokens anew, at random, so that what the call before has read is
of little use, as in a model of many layers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from optimum_neuron.graphs.experts import ExpertsCall, dense_experts
from optimum_neuron.targets.cpu.experts import grouped_experts, use_natural_layout

from ..output import make_table
from .pairs import Result, compare, run


TOKENS = (1, 8, 128)
ROUTINGS = 64


@dataclass(frozen=True)
class Shape:
    """A layer of experts; a transposed one has biases too."""

    experts: int
    k: int
    hidden: int
    inner: int
    transposed: bool

    def __str__(self) -> str:
        kind = ", transposed" if self.transposed else ""
        return f"{self.k} of {self.experts}, {self.hidden} x {self.inner}{kind}"

    def layer(self, dtype: torch.dtype) -> nn.Module:
        sizes = {
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_local_experts": self.experts,
            "num_experts_per_tok": self.k,
        }
        layer = GptOssExperts(GptOssConfig(**sizes)) if self.transposed else MixtralExperts(MixtralConfig(**sizes))
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=self.hidden**-0.5)
        return layer.to(dtype).requires_grad_(False)


SHAPES = (Shape(8, 2, 1024, 2048, False), Shape(32, 4, 1024, 512, False), Shape(32, 4, 1024, 512, True))


def measure(shape: Shape, dtype: torch.dtype, pairs: int) -> list[Result]:
    theirs = shape.layer(dtype)
    ours = copy.deepcopy(theirs)
    use_natural_layout(ours)
    results = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape.hidden).to(dtype)
        scores = torch.randn(ROUTINGS, tokens, shape.experts).topk(shape.k)
        weights = scores.values.softmax(-1).to(dtype)

        def calls(
            compute: Callable[[Any, Tensor, Tensor, Tensor], Tensor],
            layer: nn.Module,
            first: int,
            x: Tensor = x,
            index: Tensor = scores.indices,
            weights: Tensor = weights,
        ) -> Callable[[int], Tensor]:
            def run(turn: int) -> Tensor:
                routing = (first + turn) % ROUTINGS
                return compute(layer, x, index[routing], weights[routing])

            return run

        own = calls(lambda *call: grouped_experts(ExpertsCall(*call)), ours, ROUTINGS // 2)
        milliseconds, than_grouped = compare(calls(ALL_EXPERTS_FUNCTIONS["grouped_mm"], theirs, 0), own, pairs)
        _, than_dense = compare(calls(lambda *call: dense_experts(ExpertsCall(*call)), ours, 0), own, pairs)
        results.append(
            {
                "layer": str(shape),
                "dtype": str(dtype).removeprefix("torch."),
                "tokens": tokens,
                "ms": milliseconds,
                "than_grouped_mm": than_grouped,
                "than_dense": than_dense,
            }
        )
    return results


def main() -> int:
    """Runs the benchmark; returns the exit code."""
    table = make_table(
        "Layers of experts", ("experts", "dtype"), ("tokens", "ms", "times faster than grouped_mm", "than all experts")
    )
    return run("experts", __doc__, table, measure_all, _cells)


def measure_all(dtype: torch.dtype, pairs: int) -> list[Result]:
    return [each for shape in SHAPES for each in measure(shape, dtype, pairs)]


def _cells(result: Result) -> tuple[str, ...]:
    ratios = (f"{result[name]:.2f}" for name in ("than_grouped_mm", "than_dense"))
    return (result["layer"], result["dtype"], str(result["tokens"]), f"{result['ms']:.3f}", *ratios)


if __name__ == "__main__":
    sys.exit(main())
