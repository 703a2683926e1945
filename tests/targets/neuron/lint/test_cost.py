# SPDX-License-Identifier: Apache-2.0
"""The cost model counts small graphs as one counts them by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from lowered import lower_function, lower_module
from torch import Tensor, nn

from optimum_neuron.targets.neuron.graphs.io import LoweredGraph
from optimum_neuron.targets.neuron.lint.cost import GraphCost, graph_cost
from optimum_neuron.targets.neuron.lowering.ops import write_cache
from optimum_neuron.targets.neuron.sdk.hardware import CHIPS


def cost(graph: LoweredGraph, target: str = "trn2") -> GraphCost:
    return graph_cost(graph.name, graph.hlo, graph.io, target)


def of(function: Callable[..., Tensor], *inputs: Tensor, target: str = "trn2", ranks: int = 1) -> GraphCost:
    return cost(lower_function(function, inputs, ranks), target)


def test_a_product_reads_its_operands_and_writes_its_result() -> None:
    found = of(lambda x, w: torch.relu(x @ w), torch.ones(8, 256), torch.ones(256, 512))
    assert found.flops == {"float32": 2 * 8 * 256 * 512}
    assert found.read == found.needed == 4 * (8 * 256 + 256 * 512)
    assert (found.written, found.transposed, found.collective_bytes) == (4 * 8 * 512, 0, 0)
    # Of a batch in half precision, all of its products.
    found = of(lambda x, y: x @ y, *(torch.ones(3, 4, 4, dtype=torch.bfloat16) for _ in range(2)))
    assert (found.flops, found.read) == ({"bfloat16": 3 * 2 * 4 * 4 * 4}, 2 * 2 * 3 * 16)
    # Of a convolution, one filter per result.
    found = of(lambda x, w: nn.functional.conv1d(x, w, groups=6), torch.ones(1, 6, 10), torch.ones(6, 1, 3))
    assert found.total_flops == 2 * 6 * 8 * 3


def test_what_a_slice_or_a_gather_leaves_out_is_not_read_and_a_row_is_again_where_it_is_taken_again() -> None:
    assert of(lambda x: x[:, :5].sum(1), torch.ones(4, 20)).read == 4 * 4 * 5
    rows, zeros = torch.tensor([1, 5], dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
    assert of(lambda x, i: x.index_select(0, i), torch.ones(100, 8), rows).read == 4 * 2 * 8 + 2 * 4
    assert of(lambda x, i: x.index_select(0, i), torch.ones(2, 8), zeros).read == 4 * 6 * 8 + 6 * 4
    # Unless rows are one row.
    assert of(lambda x, i: x.expand(9, -1).index_select(0, i), torch.ones(1, 8), zeros).read == 4 * 8 + 6 * 4


def test_a_value_in_half_precision_is_read_as_such_and_its_elementwise_uses_are_free() -> None:
    found = of(lambda x: (x.float() * 2 + 1).sum(1), torch.ones(4, 20, dtype=torch.bfloat16))
    assert (found.read, found.written, found.flops) == (2 * 80, 4 * 4, {})


def test_of_a_tensor_with_two_users_as_much_is_read_as_the_one_that_needs_more() -> None:
    def function(x: Tensor) -> Tensor:
        doubled = x * 2
        return torch.cat([doubled, doubled[:, :5]], dim=1).sum(1)

    assert of(function, torch.ones(4, 20)).read == 4 * 80


def test_two_operators_that_need_a_tensor_read_it_twice_and_it_is_needed_once() -> None:
    found = of(lambda x, y: (x @ y).sum() + x.sum(), torch.ones(8, 16), torch.ones(16, 4))
    assert found.needed == 4 * (8 * 16 + 16 * 4)
    assert found.read == found.needed + 4 * 8 * 16
    found = of(lambda x, y: (x[:, :4] @ y).sum() + x[:, :4].sum(), torch.ones(8, 16), torch.ones(4, 4))
    assert found.needed == 4 * (8 * 4 + 4 * 4)


def test_a_result_that_the_core_cannot_hold_goes_through_memory() -> None:
    tensors = torch.ones(1024, 16), torch.ones(16, 8192), torch.ones(8192, 8)  # 32 MiB between the products
    small, large = (of(lambda x, y, z: x @ y @ z, *tensors, target=target) for target in ("inf2", "trn2"))
    assert large.read == large.needed == small.needed == 4 * (1024 * 16 + 16 * 8192 + 8192 * 8)
    assert small.read == large.read + (32 << 20) and small.written == large.written + (32 << 20)
    assert large.written == 4 * 1024 * 8


def test_a_weight_that_changes_its_order_is_named_and_a_dimension_of_one_changes_none() -> None:
    assert of(lambda x, w: x @ w.t(), torch.ones(8, 16), torch.ones(4, 16)).transposed == 4 * 4 * 16
    halves = torch.ones(4, 16, dtype=torch.bfloat16)
    assert of(lambda x, w: x @ w[:, :8].float().t(), torch.ones(8, 8), halves).transposed == 2 * 4 * 8
    assert of(lambda x: torch.relu(x).transpose(0, 1) + 1, torch.ones(1, 16)).transposed == 0


class _Step(nn.Module):
    """Writes two rows into a state and, if asked, attends to what is there afterwards."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.kv_cache = nn.Module()
        self.kv_cache.register_buffer("key_0", torch.zeros(3, 2, 8, 4))
        self.reads = reads

    def forward(self, x: Tensor) -> tuple[Tensor]:
        rows = torch.arange(2, dtype=torch.int32)
        write_cache(self.kv_cache.key_0, x, rows, rows)
        return ((self.kv_cache.key_0[:2] @ x[..., None]) if self.reads else x * 2,)


@pytest.mark.parametrize("reads", [False, True])
def test_a_state_is_written_where_it_lies_and_its_new_value_is_read_from_there(reads: bool) -> None:
    found = cost(lower_module(_Step(reads), {"x": torch.ones(2, 2, 4)}))
    x, y, state = 4 * 16, 4 * (32 if reads else 16), 4 * 2 * 2 * 8 * 4
    assert found.written == x + y
    assert found.read == (2 * x + state if reads else 2 * x)
    assert found.needed == (x + state if reads else x)


def test_the_roofline_is_the_longer_of_memory_and_products() -> None:
    chip = CHIPS["trn2"]
    memory = GraphCost("g", 3 * 10**9, 0, 10**9, 0, {}, {}, 0, {})
    assert memory.seconds("trn2") == pytest.approx(4e9 / (2.9e12 / 4))
    both = GraphCost("g", 0, 0, 0, 0, {"bfloat16": 10**12, "float32": 10**12}, {}, 0, {})
    assert both.seconds("trn2") == pytest.approx(
        1e12 / chip.core_flops("bfloat16") + 1e12 / chip.core_flops("float32")
    )
    assert both.seconds("hlo") == both.seconds("inf2")  # the chip with the least memory inside
