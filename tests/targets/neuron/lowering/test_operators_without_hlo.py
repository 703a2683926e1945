# SPDX-License-Identifier: Apache-2.0
"""What torch-xla cannot lower is written otherwise or refused in a sentence: by itself it would end the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import python_process
from lowered import lower_function, run_lowered
from torch import Tensor

from optimum_neuron.targets.neuron.graphs import hlo
from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.lowering.decompositions import gelu


X = torch.linspace(-1, 1, 12).view(4, 3)
put = torch.ops.aten.index_put.default


WRITES = (
    # What models write as `x[mask] = value`: one for all places, or a row for all rows; and to every other place.
    lambda x: put(x, [x > 0], torch.tensor(7.0)),
    lambda x: put(x, [x[:, 0] > 0], torch.tensor([5.0, 6.0, 7.0])),
    lambda x: put(x, [x[:, 0] > 0], torch.tensor([[5.0, 6.0, 7.0]])),
    lambda x: put(x, [x[:, 0] > 0], torch.tensor(7.0)),
    lambda x: torch.ops.aten.slice_scatter(x, torch.full((4, 1), 7.0), 1, 1, 3, 2),
    lambda x: torch.ops.aten.slice_scatter(x, 7 + torch.arange(6.0).view(2, 3), 0, 0, 4, 3),
    lambda x: torch.ops.aten.slice_scatter(x, 7 + torch.arange(6.0).view(2, 3), 0, 1, None, 2),
    # int64 is bounded without the ends of int64.
    lambda x: (x * 6).to(torch.int64).clamp(min=2).float(),
    lambda x: (x * 6).to(torch.int64).clamp(max=3).float(),
    lambda x: (x * 6).to(torch.int64).clamp(1, 4).float(),
    # What is written over a parameter leaves it: a state that is written twice in a graph is read in between.
    lambda x: torch.ops.aten.copy(x, x * 2) + x,
    lambda x: torch.ops.aten.copy(x, torch.arange(3)) * x,
)


@pytest.mark.parametrize("function", WRITES)
def test_places_are_selected_and_bounds_and_copies_are_those_of_torch(function: Callable[[Tensor], Tensor]) -> None:
    graph = lower_function(function, [X])
    assert not {"pad", "scatter", "remainder"} & {each.opcode for _, each in hlo.instructions(hlo.parse(graph.hlo))}
    (found,) = run_lowered(graph, [X])
    assert torch.equal(found, function(X)) and not torch.equal(found, X)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_constants_of_an_activation_are_not_rounded_to_16_bits(dtype: torch.dtype, approximate: str) -> None:
    graph = lower_function(lambda x: torch.nn.functional.gelu(x, approximate=approximate), [X.to(dtype)])
    constants = [each for _, each in hlo.instructions(hlo.parse(graph.hlo)) if each.opcode == "constant"]
    assert constants and {hlo.dtype_name(each.shape) for each in constants} == {"float32"}
    wide = torch.linspace(-8, 8, 4001)
    expected = torch.nn.functional.gelu(wide, approximate=approximate)
    found = gelu(wide.to(dtype), approximate=approximate)
    rounded = torch.nn.functional.gelu(wide.to(dtype), approximate=approximate)
    assert (found.float() - rounded.float()).abs().max() <= torch.finfo(dtype).eps * expected.abs().max()


PAIRS, ANGLES = torch.linspace(-2, 3, 48).view(1, 3, 2, 8), torch.linspace(0, 40, 12).view(3, 1, 4)


def as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    positions = torch.polar(1 + angles / 50, angles) * 0.5
    return torch.view_as_real(as_complex(x) * positions[None]).flatten(3)


def rotated_by_parts(x: Tensor, angles: Tensor) -> Tensor:
    positions = torch.complex(angles.cos(), 2 * angles.sin()).transpose(0, 1).transpose(0, 1)
    return torch.view_as_real(positions.expand(3, 2, 4) * as_complex(x)[0]).flatten(2)


def scaled(x: Tensor, angles: Tensor) -> Tensor:
    return torch.view_as_real(angles[:, 0] * as_complex(x)[0, :, 1])


@pytest.mark.parametrize("function", [rotated, rotated_by_parts, scaled])
def test_a_rotation_by_complex_numbers_is_that_of_torch(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    graph = lower_function(function, [PAIRS, ANGLES])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")
    (found,) = run_lowered(graph, [PAIRS, ANGLES])
    torch.testing.assert_close(found, function(PAIRS, ANGLES), rtol=1e-6, atol=1e-6)


# In a process of its own, which must not end early.
REFUSED = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from lowered import lower_function
X = torch.linspace(-1, 1, 12).view(4, 3)
put = torch.ops.aten.index_put.default
as_complex = lambda x: torch.view_as_complex(x.view(2, 3, 2))
functions = [
    lambda x: as_complex(x).abs(),
    lambda x: torch.view_as_real(as_complex(x) + as_complex(x)),
    lambda x: torch.view_as_real(as_complex(x) * torch.tensor([1j])),
    lambda x: put(x, [x[:, 0] > 0, torch.tensor([1])], torch.tensor(1.0)),
    lambda x: put(x, [x > 0], torch.tensor(1.0), True),
    lambda x: put(x, [None, torch.tensor([True, False, True])], torch.tensor(1.0)),
    lambda x: put(x, [(x > 0).to(torch.uint8)], torch.tensor(1.0)),
    lambda x: x.median(0).values,
    lambda x: x.nanmedian(0).values,
    lambda x: x.cummin(0).values,
    lambda x: x.logcumsumexp(0),
    torch.exp2,
    torch.lgamma,
    lambda x: torch.hypot(x, x),
    lambda x: torch.fmax(x, x),
    lambda x: torch.linalg.qr(x)[0],
    lambda x: torch.linalg.det(x[:3]),
    lambda x: torch.nn.functional.embedding_bag(torch.tensor([[0, 1]]), x),
]
for function in functions:
    try:
        lower_function(function, [X])
        print("lowered")
    except ValueError as error:
        print(error)
"""


def test_no_operator_of_these_ends_the_process() -> None:
    process = python_process(REFUSED, str(Path(__file__).parents[3] / "helpers"))
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    lines = output.splitlines()
    assert len(lines) == 18
    told = "of the step has no lowering to HLO; use target='cpu', or express it"
    assert all(line.startswith("aten.") and told in line for line in lines)
