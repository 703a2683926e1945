# SPDX-License-Identifier: Apache-2.0
"""The file of weights: what any reader of safetensors finds in it, and what is mapped of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from optimum_neuron.artifact import filesystem, pages, weights
from optimum_neuron.artifact.artifact import WEIGHTS_NAME, Artifact, ArtifactError
from optimum_neuron.artifact.filesystem import is_local
from optimum_neuron.artifact.tensor_file import DTYPES
from optimum_neuron.artifact.weights import read_weights, untie, write_weights
from optimum_neuron.step.spec import TensorSpec


TENSORS = {"model.a": torch.arange(12.0).view(3, 4), "model.b": torch.ones(5, dtype=torch.bfloat16)}


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> Artifact:
    """As much of an artifact as weights need."""
    (folder / "weights").mkdir()
    assert write_weights(tensors, folder) == {}
    return as_artifact(folder)


def as_artifact(folder: Path) -> Artifact:
    data = (folder / WEIGHTS_NAME).read_bytes()
    entry = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return Artifact(folder, {"files": {WEIGHTS_NAME: entry}, "tied_weights": {}})


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_are_tied_that_are_the_same_part_of_a_storage(device: str) -> None:
    """With memory or without: what is told of a model on the meta device is what its weights will be."""
    block, other = (torch.empty(8, 4, device=device) for _ in range(2))
    tensors = {
        "whole": block,
        "first": block[:4],
        "second": block[4:],
        "turned": block.T,
        "again": block[4:].detach(),
        "other": other,
        "nothing": block[:0],
        "nothing again": block[:0],
    }
    unique, tied = untie(tensors)
    assert tied == {"again": "second"} and list(unique) == [name for name in tensors if name != "again"]


def test_weights_are_a_safetensors_file_whose_tensors_begin_at_a_page(tmp_path: Path) -> None:
    written(tmp_path, TENSORS)
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
    found = read_weights(written(tmp_path, made))
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in made.items())
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == 1


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    written(tmp_path, TENSORS)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"")
    with pytest.raises(ArtifactError, match="no safetensors file: its header claims 0 bytes"):
        read_weights(as_artifact(tmp_path))


def test_a_head_of_odd_length_leaves_no_tensor_unaligned(tmp_path: Path) -> None:
    written(tmp_path, TENSORS)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    (tmp_path / WEIGHTS_NAME).write_bytes(
        (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    tensors = read_weights(as_artifact(tmp_path))
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    assert all(tensor.data_ptr() % tensor.dtype.itemsize == 0 for tensor in tensors.values())


@pytest.mark.parametrize("huge", [True, False], ids=["mapped", "copied"])
def test_what_is_written_to_a_tensor_stays_in_this_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    monkeypatch.setattr(weights, "has_huge_pages", lambda memory: huge)
    artifact = written(tmp_path, TENSORS)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    read_weights(artifact)["model.a"].fill_(7)
    assert (tmp_path / WEIGHTS_NAME).read_bytes() == data
    assert torch.equal(read_weights(artifact)["model.a"], TENSORS["model.a"])


@pytest.mark.parametrize("huge", [True, False], ids=["mapped", "copied"])
def test_loaded_weights_outlive_an_artifact_that_takes_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, huge: bool
) -> None:
    monkeypatch.setattr(weights, "has_huge_pages", lambda memory: huge)
    tensors = read_weights(written(tmp_path, TENSORS))
    (tmp_path / "other").write_bytes(b"x")
    (tmp_path / "other").replace(tmp_path / WEIGHTS_NAME)
    assert torch.equal(tensors["model.a"], TENSORS["model.a"])


def test_a_file_that_others_may_write_to_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "is_local", lambda descriptor: False)
    monkeypatch.delattr(weights, "read_verified")  # nothing is remembered of it
    artifact = written(tmp_path, TENSORS)
    tensors = read_weights(artifact)
    (tmp_path / WEIGHTS_NAME).write_bytes(b"")
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    with pytest.raises(ArtifactError, match="was changed after the export"):
        read_weights(artifact)


def test_a_file_system_that_is_not_known_is_not_local(monkeypatch: pytest.MonkeyPatch) -> None:
    with Path(__file__).open("rb") as file:
        monkeypatch.setattr(filesystem, "_LOCAL", ())
        assert not is_local(file.fileno())


@pytest.mark.parametrize(
    ("spared", "huge", "copies"), [(0, False, 1), (0, True, 0), (1, False, 0)], ids=["small", "huge", "large"]
)
def test_a_small_file_that_would_lie_in_small_pages_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spared: int, huge: bool, copies: int
) -> None:
    artifact, made = written(tmp_path, TENSORS), []
    monkeypatch.setattr(weights, "is_local", lambda descriptor: True)
    monkeypatch.setattr(weights, "_LARGEST_COPY", (tmp_path / WEIGHTS_NAME).stat().st_size - spared)
    monkeypatch.setattr(weights, "has_huge_pages", lambda memory: huge)
    monkeypatch.setattr(weights, "copied", lambda *arguments: made.append(1) or pages.copied(*arguments))
    assert torch.equal(read_weights(artifact)["model.a"], TENSORS["model.a"])
    assert len(made) == copies


def test_a_large_file_is_not_read_to_tell_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = written(tmp_path, TENSORS)
    monkeypatch.setattr(weights, "is_local", lambda descriptor: True)
    monkeypatch.setattr(weights, "_LARGEST_COPY", 0)
    monkeypatch.delattr(weights, "has_huge_pages")
    assert torch.equal(read_weights(artifact)["model.a"], TENSORS["model.a"])


@pytest.mark.parametrize(("becomes_huge", "copies"), [(True, 0), (False, 1)])
def test_a_file_in_small_pages_is_read_anew_before_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes_huge: bool, copies: int
) -> None:
    artifact, made, anew = written(tmp_path, TENSORS), [], []
    monkeypatch.setattr(weights, "is_local", lambda descriptor: True)
    monkeypatch.setattr(weights, "read_anew", lambda descriptor, size: anew.append(size))
    monkeypatch.setattr(weights, "has_huge_pages", lambda memory: becomes_huge and bool(anew))
    monkeypatch.setattr(weights, "copied", lambda *arguments: made.append(1) or pages.copied(*arguments))
    assert torch.equal(read_weights(artifact)["model.a"], TENSORS["model.a"])
    assert anew == [(tmp_path / WEIGHTS_NAME).stat().st_size]
    assert len(made) == copies


@pytest.mark.parametrize(
    ("huge", "can_be", "limit_s", "forgotten"),
    [
        ([], [0, 1, 2], 60, [0, 1, 2]),
        ([1], [0, 1, 2], 60, [0, 2]),
        ([0, 1, 2], [0, 1, 2], 60, []),
        ([0], [2], 60, [1]),
        ([], [], 60, [0]),
        ([], [0, 1, 2], -1, [0]),
        ([0], [0, 1, 2], -1, []),
    ],
    ids=["none", "some", "all", "no memory for one", "not to be had", "a slow disk", "a slow disk, huge"],
)
def test_pieces_in_small_pages_are_read_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    huge: list[int],
    can_be: list[int],
    limit_s: float,
    forgotten: list[int],
) -> None:
    piece, now, asked = pages._HUGE_PAGE, set(huge), []

    def forget(descriptor: int, begin: int, size: int, advice: int) -> None:
        assert (size, advice) == (piece, os.POSIX_FADV_DONTNEED)
        asked.append(begin // piece)
        now.update({begin // piece} & set(can_be))

    monkeypatch.setattr(pages, "_PIECE", piece)
    monkeypatch.setattr(pages, "_LONGEST_S", limit_s)
    monkeypatch.setattr(pages, "_is_huge", lambda descriptor, size, offset: offset // piece in now)
    monkeypatch.setattr(os, "posix_fadvise", forget)
    pages.read_anew(0, 3 * piece + 1)
    assert asked == forgotten


def test_a_file_that_cannot_be_forgotten_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    monkeypatch.setattr(pages, "_is_huge", lambda descriptor, size, offset: False)
    pages.read_anew(0, pages._HUGE_PAGE)
    monkeypatch.delattr(os, "posix_fadvise")  # a system that has no such call
    pages.read_anew(0, pages._HUGE_PAGE)


def test_a_file_that_is_read_anew_keeps_its_bytes(tmp_path: Path) -> None:
    """Those that the disk has not yet, and those that another process has mapped, too."""
    data = torch.randint(0, 255, (5 << 20,), dtype=torch.uint8).numpy().tobytes()
    with (tmp_path / "file").open("w+b") as file:
        for begin in range(0, len(data), 4096):
            os.write(file.fileno(), data[begin : begin + 4096])
        other = pages.mapped(file.fileno(), len(data))
        for _ in range(2):
            assert other[:] == data
            pages.read_anew(file.fileno(), len(data))
            assert pages.mapped(file.fileno(), len(data))[:] == data
            os.fsync(file.fileno())


def test_most_of_the_mapping_itself_has_to_be_in_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pages.zeroed(2 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    heads = [f"{address + shift:x}-{address + shift + 4096:x} rw-p 0 0:0 0 /a file" for shift in (-4096, 0, 4096)]
    listing = [
        f"{head}\nRss: 4 kB\nFilePmdMapped: {size} kB\n" for head, size in zip(heads, (7, 1536, 9), strict=True)
    ]
    monkeypatch.setattr(pages, "_MAPPINGS", tmp_path / "smaps")
    assert not pages.has_huge_pages(memory)
    (tmp_path / "smaps").write_text("".join(listing))
    assert pages.has_huge_pages(memory)
    (tmp_path / "smaps").write_text("".join([listing[0], listing[1].replace("1536", "1532"), listing[2]]))
    assert not pages.has_huge_pages(memory)


def test_states_and_copies_are_private_memory() -> None:
    """Which alone has huge pages; and a child's steps would change what is shared with it."""
    block = weights.allocate_states([TensorSpec("state", (4,), "int32")])["state"]
    child = os.fork()
    if child == 0:
        block.numpy()[:] = 7
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert block.tolist() == [0, 0, 0, 0]
