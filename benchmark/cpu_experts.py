# SPDX-License-Identifier: Apache-2.0
"""Measures mixtures of experts by the own CPU kernel against transformers' grouped_mm and against computing all experts.

Whole layers, interleaved in one run. Every call routes its tokens anew, at random, so that what the call before has read is
of little use, as in a model of many layers.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_kernels import ratio
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import GptOssConfig, MixtralConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from optimum_neuron.graphs.experts import ExpertsCall, dense_experts
from optimum_neuron.targets.cpu import kernels
from optimum_neuron.targets.cpu.experts import grouped_experts, use_natural_layout


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


def measure(shape: Shape, dtype: torch.dtype) -> list[dict[str, Any]]:
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
        milliseconds, than_grouped = ratio(calls(ALL_EXPERTS_FUNCTIONS["grouped_mm"], theirs, 0), own)
        _, than_dense = ratio(calls(lambda *call: dense_experts(ExpertsCall(*call)), ours, 0), own)
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


@torch.no_grad()
def main() -> None:
    """Prints a table and, as the last line, one JSON object."""
    if not kernels.are_fast_here():
        raise SystemExit("error: this CPU lacks AVX512-BF16, so the cpu target computes all experts here")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        kernels.build(library)
        kernels.load(library, kernels.namespace())
    table = Table("experts", "dtype", "tokens", "ms", "times faster than grouped_mm", "than all experts")
    results = [each for dtype in (torch.bfloat16, torch.float32) for shape in SHAPES for each in measure(shape, dtype)]
    for each in results:
        ratios = (f"{each[name]:.2f}" for name in ("than_grouped_mm", "than_dense"))
        table.add_row(each["layer"], each["dtype"], str(each["tokens"]), f"{each['ms']:.3f}", *ratios)
    Console().print(table)
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, "results": results}))


if __name__ == "__main__":
    main()
