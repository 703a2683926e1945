# SPDX-License-Identifier: Apache-2.0
"""Files of weights are written tensor by tensor, and whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from writing import MANIFEST, names

from optimum_neuron.artifact.weight_file import write_tensor_files
from optimum_neuron.artifact.writer import write_artifact


TENSORS = {f"model.{index}": torch.full((7, 9), float(index)) for index in range(4)}
DESCRIBED = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
RANKS = 2


def tensor(name: str, rank: int) -> Tensor:
    return TENSORS[name] + rank / 2


def export(output: Path, make: Callable[[str, int], Tensor]) -> None:
    with write_artifact(output) as writing:
        (writing.path / "config.json").write_text("{}", encoding="utf-8")
        write_tensor_files([writing.path / f"weights/tp{rank}.safetensors" for rank in range(RANKS)], DESCRIBED, make)
        writing.commit(MANIFEST)


def test_ranks_get_a_tensor_each_before_the_next_is_made(output: Path) -> None:
    made: list[tuple[str, int]] = []

    def make(name: str, rank: int) -> Tensor:
        made.append((name, rank))
        return tensor(name, rank)

    export(output, make)
    assert made == [(name, rank) for name in TENSORS for rank in range(RANKS)]
    for rank in range(RANKS):
        stored = load_file(output / f"weights/tp{rank}.safetensors")
        assert all(torch.equal(stored[name], tensor(name, rank)) for name in TENSORS)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_failure_or_a_tensor_that_is_no_number_leaves_nothing(output: Path, error: type[BaseException]) -> None:
    def fail(name: str, rank: int) -> Tensor:
        if name == "model.2" and error is KeyboardInterrupt:
            raise error
        return tensor(name, rank) * (torch.nan if name == "model.2" else 1)

    with pytest.raises(error, match=None if error is KeyboardInterrupt else r"^2 holds NaN"):
        export(output, fail)
    assert names(output.parent) == []


def test_an_error_of_the_disk_names_the_file() -> None:
    with pytest.raises(OSError, match=r"/dev/full"):
        write_tensor_files([Path("/dev/full")], DESCRIBED, tensor)
