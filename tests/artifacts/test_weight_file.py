# SPDX-License-Identifier: Apache-2.0
"""Weights that a killed process has begun to write are gone on with where they are the same, and written again where they are not."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from writing import MANIFEST, in_child, names, write

from optimum_neuron.artifacts import weight_file, writer
from optimum_neuron.artifacts.artifact import MANIFEST_NAME
from optimum_neuron.artifacts.weight_file import noting_progress, write_tensor_files
from optimum_neuron.artifacts.writer import check_output, unfinished_bytes, write_artifact
from optimum_neuron.checkpoints.digest import file_sha256


TENSORS = {f"model.{index}": torch.full((7, 9), float(index)) for index in range(4)}
DESCRIBED = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()]
RANKS = 2
NAMES = [f"weights/tp{rank}.safetensors" for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def noted_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A note after each tensor; and nothing waits for the disk."""
    monkeypatch.setattr(weight_file, "_BETWEEN_NOTES", 1)
    monkeypatch.setattr(writer, "sync", lambda path: None)


def tensor(name: str, rank: int) -> Tensor:
    return TENSORS[name] + rank / 2


def export(output: Path, source: str = "one", make: Callable[[str, int], Tensor] = tensor) -> None:
    with write_artifact(output, overwrite=True, source=source) as writing:
        (writing.path / "config.json").write_text("{}", encoding="utf-8")
        write_tensor_files([writing.path / name for name in NAMES], DESCRIBED, make)
        writing.commit(MANIFEST)


def killed(output: Path, source: str = "one", at: str = "model.2") -> None:
    """Leaves what a process leaves that was killed when it had made the first rank's tensor of a name."""

    def make(name: str, rank: int) -> Tensor:
        if (name, rank) == (at, 1):
            signal.raise_signal(signal.SIGKILL)
        return tensor(name, rank)

    assert in_child(lambda: export(output, source, make)) == signal.SIGKILL


def made_by(output: Path, source: str = "one") -> list[tuple[str, int]]:
    """What an export makes anew."""
    made: list[tuple[str, int]] = []

    def make(name: str, rank: int) -> Tensor:
        made.append((name, rank))
        return tensor(name, rank)

    export(output, source, make)
    return made


def contents(output: Path) -> list[bytes]:
    """Of the weights of a whole artifact, with nothing left beside it."""
    files = json.loads((output / MANIFEST_NAME).read_text(encoding="utf-8"))["files"]
    assert all(files[name]["sha256"] == file_sha256(output / name) for name in NAMES)
    assert names(output.parent) == ["artifact"] and names(output) == sorted([MANIFEST_NAME, "config.json", "weights"])
    assert names(output / "weights") == ["tp0.safetensors", "tp1.safetensors"]
    return [(output / name).read_bytes() for name in NAMES]


@pytest.fixture
def expected(tmp_path: Path) -> list[bytes]:
    export(tmp_path / "other" / "artifact")
    return contents(tmp_path / "other" / "artifact")


def test_ranks_get_a_tensor_each_before_the_next_is_made(output: Path) -> None:
    assert made_by(output) == [(name, rank) for name in TENSORS for rank in range(RANKS)]


def test_what_was_written_is_not_made_again(output: Path, expected: list[bytes]) -> None:
    killed(output)
    assert unfinished_bytes(output, "one") == sum(map(len, expected)) - (2 + 1) * TENSORS["model.3"].nbytes
    check_output(output, overwrite=True)
    assert made_by(output) == [("model.2", 1), ("model.3", 0), ("model.3", 1)]
    assert contents(output) == expected


def test_two_kills_are_gone_on_with_as_one(output: Path, expected: list[bytes]) -> None:
    killed(output, at="model.1")
    killed(output, at="model.3")
    assert made_by(output) == [("model.3", 1)]
    assert contents(output) == expected


def test_weights_of_another_source_are_written_again(output: Path, expected: list[bytes]) -> None:
    killed(output, "another")
    assert unfinished_bytes(output, "one") == 0
    assert len(made_by(output)) == len(TENSORS) * RANKS
    assert contents(output) == expected


def test_who_names_no_source_finds_and_leaves_nothing(output: Path) -> None:
    killed(output)
    write(output, "new", overwrite=True)
    assert names(output.parent) == ["artifact"]
    assert in_child(lambda: write(output, "killed", overwrite=True), kill_at=9) == signal.SIGKILL
    check_output(output, overwrite=True)
    assert names(output.parent) == ["artifact"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-TENSORS["model.0"].nbytes] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "a changed byte": lambda file, note: _flip(file),
    "a missing end": lambda file, note: file.write_bytes(file.read_bytes()[:-1]),
    "another head": lambda file, note: file.write_bytes(b" " + file.read_bytes()[1:]),
    "no file": lambda file, note: file.unlink(),
    "half a note": lambda file, note: note.write_text(note.read_text(encoding="utf-8")[:20], encoding="utf-8"),
    "another note": lambda file, note: note.write_text('{"bytes": 1, "sha256": "' + "0" * 64 + '"}', encoding="utf-8"),
    "a link to a file of somebody": lambda file, note: (shutil.move(file, file.parents[3] / "x"), file.symlink_to(file.parents[3] / "x")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_that_are_not_what_was_written_are_written_again(
    output: Path, expected: list[bytes], damage: str
) -> None:
    killed(output)
    file = output.with_name(".artifact.partial") / "new" / NAMES[0]
    DAMAGES[damage](file, weight_file.note_of(file))
    theirs = file.parents[3] / "x"
    before = theirs.read_bytes() if theirs.exists() else b""
    made = made_by(output)
    assert made[0] == ("model.0", 0) and ("model.0", 1) not in made
    if theirs.exists():
        assert theirs.read_bytes() == before
        theirs.unlink()
    assert contents(output) == expected


def test_bytes_behind_the_last_note_are_cut_off(output: Path, expected: list[bytes]) -> None:
    killed(output)
    file = output.with_name(".artifact.partial") / "new" / NAMES[0]
    file.write_bytes(file.read_bytes() + b"half a tensor")
    assert ("model.2", 0) not in made_by(output)
    assert contents(output) == expected


def test_a_kill_at_any_step_leaves_what_a_successor_makes_whole(output: Path, expected: list[bytes]) -> None:
    for step in range(1, 1000):
        shutil.rmtree(output.parent, ignore_errors=True)
        status = in_child(lambda: export(output), kill_at=step)
        check_output(output, overwrite=True)
        export(output)
        assert contents(output) == expected
        if status == 0:
            assert step > 20, "the steps of a writer are not seen any more"
            return
        assert status == signal.SIGKILL


def test_a_failure_leaves_nothing_to_go_on_with(output: Path) -> None:
    def fail(name: str, rank: int) -> Tensor:
        if name == "model.2":
            raise KeyboardInterrupt
        return tensor(name, rank)

    with pytest.raises(KeyboardInterrupt):
        export(output, make=fail)
    assert names(output.parent) == []


def test_nothing_is_noted_unless_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "tp0.safetensors"
    for added in (0.0, 1.0):
        write_tensor_files([path], DESCRIBED, lambda name, _, added=added: TENSORS[name] + added)  # type: ignore[misc]
    assert names(tmp_path) == ["tp0.safetensors"] and path.read_bytes().endswith(
        (TENSORS["model.3"] + 1).numpy().tobytes()
    )
    with noting_progress():
        write_tensor_files([path], DESCRIBED, tensor)
    assert names(tmp_path) == ["tp0.safetensors", "tp0.safetensors.progress"]
