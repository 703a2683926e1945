# SPDX-License-Identifier: Apache-2.0
"""Complex numbers, as some rotary positions are written, become pairs of real ones, by the operator; others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lowered import lower_function
from torch import Tensor

from optimum_neuron.targets.neuron.lint.lint import lint
from optimum_neuron.targets.neuron.run.hlo_executor import HloProgram


X, ANGLES = torch.linspace(-2, 3, 48).view(1, 3, 2, 8), torch.linspace(0, 40, 12).view(3, 1, 4)


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
def test_a_rotation_by_complex_numbers_is_that_of_torch(
    function: Callable[[Tensor, Tensor], Tensor], tmp_path: Path
) -> None:
    graph = lower_function(function, [X, ANGLES])
    assert not lint(graph.name, graph.hlo, graph.io, "hlo")
    (tmp_path / "function.hlo").write_bytes(graph.hlo)
    program = HloProgram(tmp_path / "function.hlo", graph.io)
    given = {"x.0": X, "x.1": ANGLES}
    (found,) = program.run([given[each.name].to(program.device) for each in graph.io.inputs])
    torch.testing.assert_close(found.cpu(), function(X, ANGLES), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: as_complex(x).abs(),
        lambda x: torch.view_as_real(as_complex(x) + as_complex(x)),
        lambda x: torch.view_as_real(as_complex(x) * torch.tensor([1j])),
    ],
)
def test_what_else_is_computed_with_complex_numbers_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ValueError, match=r"aten\.\w+\.\w+ of the step has no lowering to HLO; use target='cpu'"):
        lower_function(function, [X])
