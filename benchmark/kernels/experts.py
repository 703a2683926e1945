# SPDX-License-Identifier: Apache-2.0
"""Measures mixtures of experts by the own CPU kernels against transformers' grouped_mm and against computing all experts.

Whole layers, interleaved in one run, ours by the plan that the cpu target makes of such a layer. Every call routes its tokens
anew, at random, so that what the call before has read is of little use, as in a model of many layers.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from optimum_neuron.step.features.experts.experts import ExpertsCall, dense_experts
from optimum_neuron.targets.cpu.layout import use_natural_layout
from optimum_neuron.targets.cpu.ops import OPS

from ..output import Table
from .pairs import Result, compare, run
from .plans import bind_module


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


class _OwnExperts(nn.Module):
    """A layer as a step's graph has it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor]:
        return (OPS.experts(ExpertsCall(self.layer, x, index, weights)),)


def measure(shape: Shape, dtype: torch.dtype, pairs: int) -> list[Result]:
    theirs = shape.layer(dtype)
    ours = copy.deepcopy(theirs)
    use_natural_layout(ours)
    results = []
    for tokens in TOKENS:
        x = torch.randn(tokens, shape.hidden).to(dtype)
        scores = torch.randn(ROUTINGS, tokens, shape.experts).topk(shape.k)
        weights = scores.values.softmax(-1).to(dtype)
        plan = bind_module(_OwnExperts(ours), (x, scores.indices[0], weights[0]))

        def calls(
            compute: Callable[[Tensor, Tensor, Tensor], Any],
            x: Tensor = x,
            index: Tensor = scores.indices,
            weights: Tensor = weights,
        ) -> Callable[[int], Any]:
            def run(turn: int) -> Any:
                return compute(x, index[turn % ROUTINGS], weights[turn % ROUTINGS])

            return run

        grouped = calls(partial(ALL_EXPERTS_FUNCTIONS["grouped_mm"], theirs))
        dense = calls(lambda *call: dense_experts(ExpertsCall(ours, *call)))
        own = calls(lambda *call, plan=plan: plan(call))
        milliseconds, than_grouped = compare(grouped, own, pairs)
        _, than_dense = compare(dense, own, pairs)
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
    table = Table(
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
