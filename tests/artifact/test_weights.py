# SPDX-License-Identifier: Apache-2.0
"""The file of weights: what any reader of safetensors finds in it, and what is mapped of it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import weights_of
from safetensors.torch import load_file
from writing import as_artifact, write_tensors

from optimum_neuron.artifact import filesystem, pages, weights
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, ArtifactError
from optimum_neuron.artifact.filesystem import is_local
from optimum_neuron.artifact.weights import read_weights, untie
from optimum_neuron.checkpoints.mapped import DTYPES
from optimum_neuron.step.spec import TensorSpec


TENSORS = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}


def _owner(array: np.ndarray) -> object:
    return _owner(array.base) if isinstance(array.base, np.ndarray) else array.base


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_tied_that_are_the_same_part_of_a_storage(device: str) -> None:
    """With memory or without: what is told of a model on the meta device is what its weights will be."""
    block, other = (torch.empty(8, 4, device=device) for _ in range(2))
    tensors = {
        "whole": block, "first": block[:4], "second": block[4:], "turned": block.T, "again": block[4:].detach(),
        "other": other, "nothing": block[:0], "nothing again": block[:0],
    }  # fmt: skip
    unique, tied = untie(tensors)
    assert tied == {"again": "second"} and list(unique) == [name for name in tensors if name != "again"]


def test_weights_are_a_safetensors_file_whose_tensors_begin_at_a_page(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    path = tmp_path / WEIGHTS_NAME
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 4096 == 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_of_every_type_and_form_read_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Beside one of a byte, which leaves what follows it unaligned unless larger types come first."""
    square = torch.arange(12).view(3, 4)
    made = {
        "byte": torch.ones(1, dtype=torch.uint8),
        "odd": square.T.to(dtype),
        "none": torch.empty(0, 3, dtype=dtype),
    }
    made |= {"number": torch.ones((), dtype=dtype), "double": torch.ones(1, dtype=torch.float64)}
    artifact = write_tensors(tmp_path, made)
    found = weights_of(artifact)
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in made.items())
    assert len({id(_owner(value)) for value in read_weights(artifact).values() if value.nbytes}) == 1


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"")
    with pytest.raises(ArtifactError, match="no safetensors file: its header claims 0 bytes"):
        weights_of(as_artifact(tmp_path))


def test_a_head_of_odd_length_leaves_no_tensor_unaligned(tmp_path: Path) -> None:
    write_tensors(tmp_path, TENSORS)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    longer = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    (tmp_path / WEIGHTS_NAME).write_bytes(longer)
    tensors = weights_of(as_artifact(tmp_path))
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in tensors.values())


@pytest.mark.parametrize("largest", [0, 1 << 30], ids=["mapped", "copied"])
def test_loaded_weights_keep_what_is_written_to_them_and_outlive_an_artifact_that_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int
) -> None:
    monkeypatch.setattr(weights, "_LARGEST_COPY", largest)
    artifact = write_tensors(tmp_path, TENSORS)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    weights_of(artifact)["model.a"].fill_(7)
    assert (tmp_path / WEIGHTS_NAME).read_bytes() == data
    tensors = weights_of(artifact)
    (tmp_path / "other").write_bytes(b"x")
    (tmp_path / "other").replace(tmp_path / WEIGHTS_NAME)
    assert torch.equal(tensors["model.a"], TENSORS["model.a"])


def test_a_file_that_others_may_write_to_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "is_local", lambda descriptor: False)
    monkeypatch.delattr(weights, "read_verified")  # nothing is remembered of it
    artifact = write_tensors(tmp_path, TENSORS)
    tensors = weights_of(artifact)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"")
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    with pytest.raises(ArtifactError, match="was changed after the export"):
        weights_of(artifact)


def test_a_file_system_that_is_not_known_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(__file__).open("rb") as file:
        monkeypatch.setattr(filesystem, "_LOCAL", ())
        assert not is_local(file.fileno())


@pytest.mark.parametrize(("spared", "copies"), [(0, 1), (1, 0)], ids=["small", "large"])
def test_a_small_file_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: int, copies: int) -> None:
    artifact, made = write_tensors(tmp_path, TENSORS), []
    monkeypatch.setattr(weights, "is_local", lambda descriptor: True)
    monkeypatch.setattr(weights, "_LARGEST_COPY", (tmp_path / WEIGHTS_NAME).stat().st_size - spared)
    monkeypatch.setattr(weights, "copied", lambda *arguments: made.append(1) or pages.copied(*arguments))
    assert torch.equal(weights_of(artifact)["model.a"], TENSORS["model.a"])
    assert len(made) == copies


def test_states_and_copies_are_private_memory() -> None:
    """Which alone has huge pages; and a child's steps would change what is shared with it."""
    block = weights.allocate_states([TensorSpec("state", (4,), "int32")])["state"]
    child = os.fork()
    if child == 0:
        block[:] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert block.tolist() == [0, 0, 0, 0]
